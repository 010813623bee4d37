"""Tests that altered files are named in an error or computed again.

Altered files do not stop other runs.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from filelock import FileLock

from fedexp.api import Run
from fedexp.commands.errors import run_guarded
from fedexp.commands.run import _job_row as sweep_row
from fedexp.commands.run import run_command
from fedexp.commands.runs import run_command as runs_command
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.runner import Snapshot
from fedexp.core.trees import clone
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data import cache
from fedexp.data.torchvision_sets import TorchvisionSet
from fedexp.running.execute import execute
from fedexp.running.experiment import Experiment
from fedexp.storage import run_folder, tensors
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.files import parse_yaml, read_json, write_json
from fedexp.storage.run_folder import (
    Journal,
    RunFolder,
    read_result_and_status,
    rows_of,
    trace_rows,
)
from fedexp.storage.stored_run import StoredRun, find_runs
from fedexp.tables.cells import Job
from fedexp.tables.lookup import find_run
from tests.data.idx import write_mnist

CPU = torch.device("cpu")
QUICK = ["rounds=1", "clients=2", "model.hidden=[4]", "limit.train=40", "limit.test=20"]


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def start(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    """Run and return the result and all notes."""
    said: list[str] = []
    result = execute(compose([*QUICK, *overrides]), say=said.append)
    # During training, messages go to the log and the progress bar, not to `said`.
    log = Path(result["folder"]) / "run.log"
    return result, [*said, *(log.read_text().splitlines() if log.exists() else ())]


def test_a_flipped_bit_of_the_servers_state_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {"w": {"x": torch.ones(2)}}, {}), set(), 0)
    (path,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    flip(path)
    with pytest.raises(StorageError, match=path.name):
        Checkpoint(tmp_path, CPU).load()


def test_a_flipped_bit_of_a_kept_model_is_refused_when_it_is_read(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU)
    kept = saver.models.store(Weights(ModelSpec("a.B", ()), {"x": torch.ones(2)}, {}))
    saver.save(Snapshot(1, {"model": kept}, {}), set(), 0)
    (path,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    flip(path)
    found = Checkpoint(tmp_path, CPU).load()
    assert found is not None
    with pytest.raises(StorageError, match=path.name):
        found[0].state["model"].load()


def test_a_flipped_bit_of_a_clients_memory_is_refused_when_it_is_read(tmp_path: Path) -> None:
    states = {client: {"c": {"w": torch.full((2,), float(client))}} for client in (0, 1)}
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {}, states), {0, 1}, 0)
    (path,) = (tmp_path / "checkpoint" / "client_states").iterdir()
    flip(path)  # the last bit of the last client's state
    found = Checkpoint(tmp_path, CPU).load()
    assert found is not None
    clients = found[0].clients
    assert torch.equal(clients[0]["c"]["w"], torch.zeros(2))
    with pytest.raises(StorageError, match=path.name):
        clients[1]


def test_an_altered_manifest_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {"h": 0.5}, {}), set(), 0)
    path = tmp_path / "checkpoint" / "manifest.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(StorageError, match="manifest"):
        Checkpoint(tmp_path, CPU).load()
    path.write_text("[1, 2]")
    with pytest.raises(StorageError, match="manifest"):
        Checkpoint(tmp_path, CPU).load()


def test_what_this_process_wrote_is_not_hashed_again_nor_a_file_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    digest = tensors.digest
    monkeypatch.setattr(tensors, "digest", lambda tree: hashed.append(1) or digest(tree))
    store = tensors.TensorStore(tmp_path)
    name = store.put({"x": torch.ones(2)})
    hashed.clear()
    store.get(name, CPU)
    assert not hashed
    other = tensors.TensorStore(tmp_path)
    other.get(name, CPU), other.get(name, CPU)
    assert len(hashed) == 1


def test_a_changed_digit_of_the_metrics_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1)
    journal.append({"round": 1, "acc": 0.25})
    mark = journal.mark
    journal.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace("0.25", "0.75"))
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        Journal(tmp_path, mark, 2)
    with pytest.raises(StorageError, match=r"metrics\.jsonl"):
        rows_of(tmp_path, {"metrics_sha256": mark[1]})


def test_client_cache_with_damaged_entry_is_repaired(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = start()
    shutil.rmtree(root / "runs")
    entries = sorted((root / "memo").glob("*/*.safetensors"))
    assert len(entries) == 2
    sound = [clone(tensors.load_tree(path, CPU)[0]) for path in entries]
    for path in entries:
        flip(path)
    third = next((root / "memo").glob("*")) / "entry.safetensors"
    tensors.save_tree(third, {"x": torch.ones(1)})
    # The file has no seal, like entries of earlier versions.
    assert tensors.load_sealed(third, CPU) is not None
    monkeypatch.setattr(tensors, "_trusted", set())  # as in a new process
    again, said = start()
    assert again["metrics"] == first["metrics"]
    assert sum("memo" in text and "damaged" in text for text in said) == 1
    for path, tree in zip(entries, sound, strict=True):
        healed = tensors.load_tree(path, CPU)[0]
        assert all(torch.equal(healed[name], tree[name]) for name in tree)


def test_a_memo_that_cannot_be_written_ends_no_run(root: Path) -> None:
    root.mkdir()
    (root / "memo").write_text("not a folder")
    result, said = start()
    assert result["status"] == "done"
    assert sum("memo" in text and "not stored" in text for text in said) == 1


def test_a_memo_on_a_full_disk_ends_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedexp.engines.client_cache.save_sealed", full)
    result, said = start()
    assert result["status"] == "done"
    assert sum("No space left" in text for text in said) == 1


def test_one_runs_truncated_result_stops_no_sweep(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["-m", "seed=0,1", *QUICK]
    assert run_command(sweep) == 0
    capsys.readouterr()
    path = next(root.glob("runs/*/*/result.json"))
    path.write_text(path.read_text()[:40])
    assert run_command(sweep) == 1
    told = capsys.readouterr()
    assert "1 done, 1 to run" in told.out and "1 damaged" in told.out and "1 done" in told.out
    assert str(path) in told.err and "Traceback" not in told.out + told.err


def test_a_run_whose_result_is_gone_is_to_be_run_again(root: Path) -> None:
    start()
    config = compose(QUICK)
    folder = RunFolder.of(config)
    assert sweep_row(folder, config)["status"] == "done"
    (folder.path / "result.json").unlink()
    assert sweep_row(folder, config)["status"] == "queued"


@pytest.mark.parametrize("text", ['{"cut', "[]"])
def test_a_tables_cell_with_a_damaged_run_is_named(root: Path, text: str) -> None:
    result, _ = start()
    overrides = tuple(QUICK)
    job = Job(0, {}, overrides, overrides)
    assert find_run(job).status == "done"
    folder = Path(result["folder"])
    (folder / "result.json").write_text(text)
    found = find_run(job)
    assert (found.status, found.error, found.result) == ("damaged", "result.json is damaged", {})
    (folder / "result.json").unlink()
    (folder / "status.json").write_text(text)
    assert (find_run(job).status, find_run(job).error) == ("damaged", "status.json is damaged")


@pytest.mark.parametrize(
    ("name", "text"), [("numerics.json", '{"cut'), ("data.json", '{"cut'), ("numerics.json", "{}")]
)
def test_a_truncated_file_of_a_run_is_named(root: Path, name: str, text: str) -> None:
    config = compose(QUICK)
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    (folder.path / name).write_text(text)
    with pytest.raises(StorageError, match=name):
        execute(config, say=None)
    state = json.loads((folder.path / "status.json").read_text())
    assert state["status"] == "failed" and name in state["error"]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("identity.json", "e", "f"), ("data.json", "e", "f"), ("numerics.json", "float32", "float64")],
)
def test_an_altered_letter_of_what_a_resumption_needs_is_named(
    root: Path, name: str, old: str, new: str
) -> None:
    folder = Path(start()[0]["folder"])
    (folder / "result.json").unlink()
    path = folder / name
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(StorageError, match=f"{name} is damaged"):
        start()


def test_an_altered_trace_is_named(root: Path) -> None:
    traced = ["method=ma_echo", "trace.every=1", "trace.weights=[1]", "aggregator.T=2"]
    folder = Path(start(*traced)[0]["folder"])
    rows, weights = (folder / "trace" / f"1.{kind}" for kind in ("json", "safetensors"))
    assert len(trace_rows(rows)) == 3
    flip(weights)
    with pytest.raises(StorageError, match=r"1\.safetensors is damaged"):
        tensors.load_tree(weights, CPU)
    weights.unlink()
    (folder / "result.json").unlink()
    rows.write_text(rows.read_text().replace('"iteration": 1', '"iteration": 7'))
    with pytest.raises(StorageError, match=r"1\.json is damaged"):
        start(*traced)


def test_a_changed_digit_of_a_result_is_named(root: Path) -> None:
    folder = Path(start()[0]["folder"])
    path = folder / "result.json"
    path.write_text(path.read_text().replace('"value": 0.', '"value": 1.'))
    with pytest.raises(StorageError, match=r"result\.json is damaged"):
        start()
    assert StoredRun(folder).status == "damaged"


@pytest.mark.parametrize("what", ["config.yaml is damaged", "no config.yaml"])
def test_changed_or_deleted_config_of_a_finished_run_is_named_and_not_used(
    root: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    start("seed=1")
    folder = Path(start()[0]["folder"])
    lr = Run(folder).config["local"]["lr"]
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace(f"lr: {lr}", "lr: 0.75"))
    if what.startswith("no"):
        path.unlink()
    with pytest.raises(StorageError, match=what) as refused:
        _ = Run(folder).config

    capsys.readouterr()
    for command in (["table", "rows=local.lr", "cols=method"], ["export"]):
        assert runs_command(command) == 0
        told = capsys.readouterr()
        assert "0.75" not in told.out and str(lr) in told.out
        assert f"{folder.name} is not used: {what}" in told.err
    assert runs_command(["list", "local.lr=0.75"]) == 0
    told = capsys.readouterr()
    assert "none of 2 runs" in told.out and what in told.err
    for command in (["diff", str(folder), str(folder)], ["rerun", str(folder)]):
        assert runs_command(command) == 2
        assert what in capsys.readouterr().err

    assert "reuse=false" in str(refused.value)
    start("reuse=false")
    assert Run(folder).config["local"]["lr"] == lr


def test_deleting_a_damaged_identity_as_advised_resumes_the_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = killed(root, monkeypatch) / "identity.json"
    content = path.read_bytes()
    flip(path, content.index(b"config") + 20)
    with pytest.raises(StorageError, match=r"identity\.json is damaged") as refused:
        start()
    assert "delete the file" in str(refused.value) and "reuse=false" not in str(refused.value)
    path.unlink()
    result, said = start()
    assert result["status"] == "done" and path.read_bytes() == content
    assert result["attempts"] == 2 and not any("round 1/1" in text for text in said)


@pytest.mark.parametrize("name", ["model.safetensors", "partition.safetensors", "config.yaml"])
def test_advice_on_a_missing_file_of_a_finished_run_works(root: Path, name: str) -> None:
    folder = Path(start()[0]["folder"])
    (folder / name).unlink()
    part = {"model.safetensors": "models", "partition.safetensors": "partition"}.get(name, "config")
    with pytest.raises(StorageError, match=f"no {name}") as refused:
        getattr(Run(folder), part)
    assert "with reuse=false" in str(refused.value)
    start("reuse=false")
    assert getattr(Run(folder), part) is not None


def test_advice_on_a_folder_whose_model_was_deleted_works(root: Path) -> None:
    folder = Path(start("method=local")[0]["folder"])
    (folder / "model.safetensors").unlink()
    use = ["method=average", f"client_models.path={folder}"]
    with pytest.raises(ConfigError, match="no models here") as refused:
        Experiment.of(compose([*QUICK, *use]))
    assert "reuse=false" in str(refused.value)
    start("method=local", "reuse=false")
    assert start(*use)[0]["status"] == "done"


@pytest.mark.parametrize("text", [b"a: [", b"- 1", b"\xff", b"[" * 3000])
def test_advice_on_a_damaged_config_of_a_killed_run_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    folder = killed(root, monkeypatch)
    (folder / "config.yaml").write_bytes(text)
    with pytest.raises(StorageError, match=r"config\.yaml is damaged") as refused:
        _ = Run(folder).config
    assert "run the same overrides again" in str(refused.value)
    start()
    assert Run(folder).config["rounds"] == 1


@pytest.mark.parametrize(("reuse", "condition"), [("true", ""), ("false", " without reuse=false")])
def test_killed_run_says_how_it_is_resumed(
    root: Path, monkeypatch: pytest.MonkeyPatch, reuse: str, condition: str
) -> None:
    folder = killed(root, monkeypatch, f"reuse={reuse}")
    with pytest.raises(StorageError, match=f"the same overrides{condition} resume it"):
        _ = Run(folder).result

    write_json(folder / "status.json", {"status": "running"})
    _, status = read_result_and_status(RunFolder(folder))
    assert f"the same command{condition} resumes it" in status["error"]


def test_run_whose_result_was_deleted_is_not_called_done_and_runs_again(root: Path) -> None:
    result, _ = start()
    folder = Path(result["folder"])
    (folder / "result.json").unlink()
    overrides = tuple(QUICK)
    found = find_run(Job(0, {}, overrides, overrides))
    assert found.status == "missing" and "the same command makes it again" in found.error
    assert StoredRun(folder).status == "unknown"
    with pytest.raises(StorageError, match=r"no result\.json") as refused:
        _ = Run(folder).result
    assert "the same overrides resume it" in str(refused.value)
    assert start()[0]["metrics"] == result["metrics"]
    assert StoredRun(folder).status == "done"


@pytest.mark.parametrize("name", ["result.json", "status.json", "data.json", "config.yaml"])
def test_deeply_nested_file_is_damaged(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = Path(start()[0]["folder"])
    (folder / name).write_text("[" * 100_000 + "]" * 100_000)
    if name == "data.json":
        (folder / "result.json").unlink()
    for command in (["list"], ["show", str(folder)], ["list", "method=fedavg"]):
        assert runs_command(command) == 0
    code = run_command(QUICK)
    assert code == (1 if name in ("result.json", "data.json") else 0)
    assert code == 0 or f"{name} is damaged" in capsys.readouterr().err
    with pytest.raises(yaml.YAMLError, match="nested"):
        parse_yaml("- " * 100_000)
    assert parse_yaml("[[1]]" + " " * 5000) == [[1]]


@pytest.mark.parametrize("layers", ["[1000000000000]", "[4, 4]", "[-1]", '["a"]', "[1e400]"])
def test_model_whose_header_names_another_network_is_refused(root: Path, layers: str) -> None:
    folder = Path(start()[0]["folder"])
    (folder / "result.json").unlink()
    path = folder / "model.safetensors"
    header = json.loads(safetensors_header(path)["fedexp"])
    header["specs"][0]["kwargs"]["hidden"] = json.loads(layers)
    tree = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tree, path, metadata={"fedexp": json.dumps(header)})
    for build in (Run(folder).module, Run(folder).models[0].module):
        with pytest.raises(ConfigError, match=r"do not fit the network|must be at least 1"):
            build()


def safetensors_header(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("name", ["result.json", "clients.json", "config.yaml"])
def test_named_pipe_in_a_folder_of_a_run_is_named(root: Path, name: str) -> None:
    folder = Path(start("method=local")[0]["folder"])
    path = folder / name
    (folder / "result.json").unlink()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    read = {
        "result.json": lambda: Run(folder).result,
        "clients.json": lambda: Run(folder).models,
        "config.yaml": lambda: Run(folder).config,
    }
    with pytest.raises(StorageError, match=f"{name} is damaged") as refused:
        read[name]()
    assert "named pipe" in str(refused.value)


def test_config_of_a_result_without_its_digest_is_read(root: Path) -> None:
    folder = Path(start()[0]["folder"])
    stored = read_json(folder / "result.json")
    del stored["config_sha256"]
    write_json(folder / "result.json", stored, seal=True)
    path = folder / "config.yaml"
    path.write_text(path.read_text() + "# a comment\n")
    assert Run(folder).config["rounds"] == 1


def test_a_flipped_bit_of_what_a_run_delivered_is_named_when_it_is_read(root: Path) -> None:
    folder = Path(start("method=local")[0]["folder"])
    use = [*QUICK, "method=average", f"client_models.path={folder}"]
    for name in ("model.safetensors", "clients.json"):
        whole = (folder / name).read_bytes()
        flip(folder / name, -4)
        with pytest.raises(StorageError, match=f"{name} is damaged"):
            _ = Run(folder).models
        with pytest.raises(StorageError, match=f"{name} is damaged"):
            Experiment.of(compose(use))
        (folder / name).write_bytes(whole)
    assert len(Run(folder).models) == 2 and Experiment.of(compose(use)).stored_models is not None


def killed(root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """Interrupt a run after its last step and return its folder."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedexp.running.execute.save_outcome", dies)
        with pytest.raises(KeyboardInterrupt):
            start(*overrides)
    (folder,) = root.glob("runs/*/*")
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"stacked"', b'"stackee"'),
        (b'"seconds"', b'"secondt"'),
        (b'"train": 0', b'"train": x'),
        (b'"peak_memory": {', b'"peak_memory": ['),
        (b'"round"', b'"\xf2ound"'),
        (b"}\n", b"}\x0b"),
    ],
)
def test_resumed_run_with_damaged_timing_finishes_without_these_costs(
    root: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes
) -> None:
    folder = killed(root, monkeypatch, "rounds=3")
    path = folder / "timing.jsonl"
    content = path.read_bytes()
    assert content.count(b"\n") == 3 and old in content
    path.write_bytes(content.replace(old, new, 1))
    result, said = start("rounds=3")
    assert result["status"] == "done" and result["seconds"]["train"] > 0
    # The message is shown and logged.
    assert sum("timing.jsonl is damaged" in text for text in said) == 2


@pytest.mark.parametrize("part", [b"sha256", b"dirichlet", b"indices", None])
def test_damaged_partition_of_a_killed_run_is_written_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, part: bytes | None
) -> None:
    path = killed(root, monkeypatch) / "partition.safetensors"
    content = path.read_bytes()
    flip(path, -1 if part is None else content.index(part))
    _, said = start()
    assert path.read_bytes() == content
    assert sum("partition.safetensors is damaged" in text for text in said) == 2


def test_a_truncated_status_is_written_anew(root: Path) -> None:
    result, _ = start()
    path = Path(result["folder"]) / "status.json"
    path.write_text('{"cut')
    _, said = start()
    assert any("status.json" in text for text in said)
    assert json.loads(path.read_text())["status"] == "done"


def test_altered_labels_do_not_get_the_true_datas_result(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = root.parent / "data"
    write_mnist(data)
    mnist = [
        "dataset=mnist",
        "dataset.download=true",
        "model=mlp",
        "partition=iid",
        f"data_root={data}",
        "limit.train=null",
        "limit.test=null",
    ]
    first, _ = start(*mnist)
    loads: list[int] = []
    load = TorchvisionSet.load
    monkeypatch.setattr(
        TorchvisionSet, "load", lambda *args, **more: loads.append(1) or load(*args, **more)
    )
    again, _ = start(*mnist)
    # The file is recognised by size and time, so it is not read again.
    assert again["metrics"] == first["metrics"] and not loads
    monkeypatch.setattr(cache, "_fingerprints", {})  # as in a new process
    start(*mnist)
    assert not loads
    labels = data / "MNIST/raw/train-labels-idx1-ubyte"
    flip(labels)
    os.utime(labels, ns=(0, labels.stat().st_mtime_ns + 1_000_000))
    with pytest.raises(StorageError, match="other data"):
        start(*mnist)
    labels.unlink()
    loads.clear()
    # Without the file there is nothing to compare, and nothing is downloaded.
    assert start(*mnist)[0]["metrics"] == first["metrics"] and not loads


def test_a_flipped_bit_of_decoded_arrays_is_decoded_again(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    dataset = TorchvisionSet(source="MNIST", num_classes=10, shape=(1, 28, 28))
    first = dataset.load(tmp_path, download=False).fingerprint
    (entry,) = (tmp_path / ".fedexp").glob("*.safetensors")
    flip(entry)
    assert dataset.load(tmp_path, download=False).fingerprint == first
    assert dataset.load(tmp_path, download=False).fingerprint == first == dataset.content(tmp_path)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPERM, errno.EMFILE])
def test_run_with_system_error_reports_it_without_traceback(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fedexp.storage.checkpoint.write_text", refused)
    assert run_command(QUICK) == 1
    told = capsys.readouterr().err
    assert os.strerror(code) in told and "Traceback" not in told
    (path,) = root.glob("runs/*/*/status.json")
    state = json.loads(path.read_text())
    assert (state["status"], state["error"]) == (
        "failed",
        f"the work cannot go on: {os.strerror(code)}",
    )


def test_commands_with_system_error_report_it_without_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_guarded(full) == 1  # type: ignore[arg-type]
    assert "No space left" in capsys.readouterr().err


def test_on_a_full_disk_the_status_is_not_left_running(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(QUICK)
    folder = RunFolder.of(config)
    folder.acquire("fail", print)
    for status in ("failed", "interrupted"):
        folder.set_status("running")
        with monkeypatch.context() as patch:
            patch.setattr(run_folder, "write_json", full)
            folder.set_ended(status)  # type: ignore[arg-type]
        assert json.loads((folder.path / "status.json").read_text())["status"] == status
    folder.release()


def test_a_disk_that_is_full_after_the_result_leaves_a_finished_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: run_folder.RunFolder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "set_done", full)
        with pytest.raises(StorageError, match="No space left"):
            start()
    (run,) = find_runs(root)
    assert run.state["status"] == "running" and run.status == "done" and run.headline


def test_an_error_after_the_result_marks_the_run_as_done(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = run_folder.RunFolder.set_done, []

    def full_once(folder: run_folder.RunFolder) -> None:
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(folder)

    monkeypatch.setattr(run_folder.RunFolder, "set_done", full_once)
    with pytest.raises(StorageError, match="No space left"):
        start()
    (run,) = find_runs(root)
    assert run.state["status"] == "done"


def test_a_tensor_file_on_a_full_disk_is_the_systems_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(safetensors.torch, "save_file", no_space)
    with pytest.raises(OSError, match="No space left") as caught:
        tensors.save_tree(tmp_path / "x.safetensors", {"x": torch.ones(1)})
    assert caught.value.errno == errno.ENOSPC


def test_under_a_root_that_is_read_only_a_finished_runs_result_is_returned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    first, _ = start()
    monkeypatch.setattr(FileLock, "acquire", read_only)
    assert start()[0] == first
    with pytest.raises(StorageError, match="cannot be used"):
        start("seed=1")


def _age(file: Path, recent: Path) -> None:
    """Make a file two hours old unless it is `recent`.

    If the name of the file's folder ends with `.deleted`, the folder becomes two hours
    old, too.
    """
    if file != recent:
        for path in (file, file.parent) if file.parent.name.endswith(".deleted") else (file,):
            os.utime(path, (time.time() - 7200,) * 2)


def test_launch_removes_files_of_a_killed_process(root: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    dead, alive = (f"{socket.gethostname()}.{pid}" for pid in (process.pid, os.getppid()))
    path = RunFolder.of(compose(QUICK)).path
    memo = root / "memo" / "ab"
    gone = [
        path / f".status.json.{dead}.part",
        path / "trace" / f".1.json.{alive}.part",  # the new run locks the folder
        path.with_name(f".{path.name}.{dead}.deleted") / "result.json",
        memo / f".x.safetensors.{dead}.part",
        root / "tables" / "my" / "tiny" / f".report.md.{dead}.part",
    ]
    recent = memo / f".y.safetensors.{dead}.part"  # another container may have our name
    kept = [
        recent,
        path.with_name(f".{path.name}.{alive}.deleted") / "result.json",
        memo / f".x.safetensors.{alive}.part",
        memo / f".x.safetensors.elsewhere.{process.pid}.part",
    ]
    for file in (*gone, *kept):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        _age(file, recent)
    start()
    assert not any(file.exists() for file in gone[:-1]) and all(file.exists() for file in kept)
    for file in gone[2:]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        _age(file, recent)
    locked = path / f".data.json.{dead}.part"
    locked.touch()
    _age(locked, recent)
    with FileLock(path / "lock"):  # as a run that is being executed holds it
        assert (
            runs_command(["clean", "--root", str(root), "--set-aside", "--yes"]) == 0
            and locked.exists()
        )
    for file in gone[2:]:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        _age(file, recent)
    assert runs_command(["clean", "--root", str(root), "--stale"]) == 0 and all(
        file.exists() for file in gone[2:]
    )
    assert runs_command(["clean", "--root", str(root), "--stale", "--yes"]) == 0
    assert not any(file.exists() for file in gone) and all(file.exists() for file in kept)
