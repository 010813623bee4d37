"""Files that were altered are refused by name, or computed again; one run's do not stop the others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedexp.commands.run import run_command
from fedexp.config.compose import compose
from fedexp.core.errors import StorageError
from fedexp.core.runner import Snapshot
from fedexp.core.trees import clone
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data import cache
from fedexp.data.torchvision_sets import TorchvisionSet
from fedexp.running.execute import execute
from fedexp.storage import tensors
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.run_folder import Journal, RunFolder, rows_of
from tests.data.idx import write_mnist

CPU = torch.device("cpu")
QUICK = ["rounds=1", "clients=2", "model.hidden=[4]", "limit.train=40", "limit.test=20"]


def flip(path: Path, at: int = -1) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def start(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    """The result, and all notes."""
    said: list[str] = []
    result = execute(compose([*QUICK, *overrides]), say=said.append)
    log = Path(result["folder"]) / "run.log"  # once training began, they are printed
    return result, [*said, *(log.read_text().splitlines() if log.exists() else ())]


def test_a_flipped_bit_of_the_servers_state_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {"w": {"x": torch.ones(2)}}, {}), set(), 0)
    (path,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    flip(path)
    with pytest.raises(StorageError, match=path.name):
        Checkpoint(tmp_path, CPU).load()


def test_a_flipped_bit_of_a_kept_model_is_refused_when_it_is_read(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU)
    kept = saver.models.keep(Weights(ModelSpec("a.B", ()), {"x": torch.ones(2)}, {}))
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
    flip(path)  # the last client's
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


def test_a_damaged_memo_heals_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = start()
    shutil.rmtree(root / "runs")
    entries = sorted((root / "memo").glob("*/*.safetensors"))
    assert len(entries) == 2
    sound = [clone(tensors.load_tree(path, CPU)[0]) for path in entries]
    for path in entries:
        flip(path)
    monkeypatch.setattr(tensors, "_trusted", set())  # as a new process
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
    assert sum("memo" in text and "not kept" in text for text in said) == 1


def test_a_memo_on_a_full_disk_ends_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedexp.engines.memo.remember", full)
    result, said = start()
    assert result["status"] == "done"
    assert sum("No space left" in text for text in said) == 1


def test_one_runs_truncated_result_stops_no_sweep(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "seed=0,1", *QUICK]
    assert run_command(sweep) == 0
    capsys.readouterr()
    path = next(root.glob("runs/*/*/result.json"))
    path.write_text(path.read_text()[:40])
    assert run_command(sweep) == 1
    told = capsys.readouterr()
    assert "1 done, 1 to run" in told.out and "1 damaged" in told.out and "1 done" in told.out
    assert str(path) in told.err and "Traceback" not in told.out + told.err


@pytest.mark.parametrize("name", ["numerics.json", "data.json"])
def test_a_truncated_file_of_a_run_is_named(root: Path, name: str) -> None:
    config = compose(QUICK)
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    (folder.path / name).write_text('{"cut')
    with pytest.raises(StorageError, match=name):
        execute(config, say=None)
    state = json.loads((folder.path / "status.json").read_text())
    assert state["status"] == "failed" and name in state["error"]


def test_a_truncated_status_is_written_anew(root: Path) -> None:
    result, _ = start()
    path = Path(result["folder"]) / "status.json"
    path.write_text('{"cut')
    _, said = start()
    assert any("status.json" in text for text in said)
    assert json.loads(path.read_text())["status"] == "done"


def test_altered_labels_do_not_get_the_true_datas_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = root.parent / "data"
    write_mnist(data)
    mnist = ["dataset=mnist", "model=mlp", "partition=iid", f"data_root={data}", "limit.train=null", "limit.test=null"]
    first, _ = start(*mnist)
    loads: list[int] = []
    load = TorchvisionSet.load
    monkeypatch.setattr(TorchvisionSet, "load", lambda *args, **more: loads.append(1) or load(*args, **more))
    again, _ = start(*mnist)
    assert again["metrics"] == first["metrics"] and not loads  # remembered by size and time
    monkeypatch.setattr(cache, "_fingerprints", {})  # as a new process
    start(*mnist)
    assert not loads
    labels = data / "MNIST/raw/train-labels-idx1-ubyte"
    flip(labels)
    os.utime(labels, ns=(0, labels.stat().st_mtime_ns + 1_000_000))
    with pytest.raises(StorageError, match="other data"):
        start(*mnist)


def test_a_flipped_bit_of_decoded_arrays_is_decoded_again(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    dataset = TorchvisionSet(source="MNIST", num_classes=10, shape=(1, 28, 28))
    first = dataset.load(tmp_path, download=False).fingerprint
    (entry,) = (tmp_path / ".fedexp").glob("*.safetensors")
    flip(entry)
    assert dataset.load(tmp_path, download=False).fingerprint == first
    assert dataset.load(tmp_path, download=False).fingerprint == first == dataset.content(tmp_path, download=False)
