"""Tests of state on disk, the identity of runs, journals and run folders."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import StorageError
from fedexp.core.runner import Snapshot
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage import identity
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.files import read_json, read_jsonl, write_text
from fedexp.storage.run_folder import Journal, RunFolder
from fedexp.storage.stored_run import find_runs
from fedexp.storage.stored_weights import FileBackedModelStore
from fedexp.storage.tensors import (
    TensorStore,
    check_storable,
    decode,
    encode,
    load_tree,
    save_tree,
)

CPU = torch.device("cpu")
SPEC = ModelSpec("a.B", (("hidden", (8, 4)), ("bias", True)))


def example() -> dict:
    tree = {
        "z": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)),
        "a": torch.tensor(3),
    }
    return {
        "weights": Weights(SPEC, tree, {"n": torch.tensor(2**40)}),
        "nested": [1, 2.5, None, True, "text", (1, (2,)), {"deep": tree}],
        "tensor": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": {},
        "bf16": {"x": torch.ones(2, dtype=torch.bfloat16)},
    }


def assert_equal(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        )
    elif isinstance(a, Weights):
        assert a.spec == b.spec and hash(a.spec) == hash(b.spec)
        assert_equal(a.params, b.params)
        assert_equal(a.buffers, b.buffers)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_state_encoded_and_loaded_is_equal(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    models = FileBackedModelStore(store, CPU, lambda: 0)
    text = json.dumps(encode(example(), store.put, models.name_of))
    assert_equal(
        decode(json.loads(text), lambda name: store.get(name, CPU), models.reference_to), example()
    )


def test_equal_trees_are_stored_once_and_garbage_goes(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    names = {
        store.put({"x": torch.ones(3)}),
        store.put({"x": torch.ones(3)}),
        store.put({"y": torch.ones(3)}),
    }
    assert len(names) == 2 == len(list(tmp_path.iterdir()))
    (tmp_path / ".x.1.part").touch()
    store.keep_only({next(iter(names))})
    assert len(list(tmp_path.iterdir())) == 1


def test_trees_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tree = {"a": base, "b": base.reshape(2, 3).T, "c": base[2:4]}
    save_tree(tmp_path / "t.safetensors", tree)
    assert_equal(
        load_tree(tmp_path / "t.safetensors", CPU)[0], {k: v.contiguous() for k, v in tree.items()}
    )


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(("value", "got"), [
    ({1, 2}, "builtins.set"),
    (Point(1), "test_storage.Point"),  # would be loaded as a tuple
    (defaultdict(int, a=1), "collections.defaultdict"),  # would be loaded as a dict
    ({0: 1.0}, "0"),
])  # fmt: skip
def test_encode_of_unsupported_values_raises(value: object, got: str) -> None:
    with pytest.raises(StorageError, match="method's state cannot be stored") as refused:
        check_storable({"x": [None, value]})
    facts = refused.value.facts
    assert facts["where"] == "state['x'][1]" and facts["got"].endswith(got)


def test_checkpoint_keeps_memories_of_clients_that_did_not_change(tmp_path: Path) -> None:
    clients = {c: {"c_i": {"w": torch.full((2,), float(c))}} for c in (0, 3)}
    saver = Checkpoint(tmp_path, CPU)
    assert saver.load() is None
    saver.save(Snapshot(1, {"k": 1}, clients), {0, 3}, 10)
    clients = {**clients, 3: {"c_i": {"w": torch.zeros(2)}}}
    saver.save(Snapshot(2, {"k": 2}, clients), {3}, 20)
    snapshot, offset = Checkpoint(tmp_path, CPU).load()
    assert (snapshot.step, snapshot.state, offset) == (2, {"k": 2}, 20)
    assert_equal(dict(snapshot.clients), clients)


def test_damaged_checkpoint_is_an_error_that_helps(tmp_path: Path) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {"w": {"x": torch.ones(2)}}, {}), set(), 0)
    next((tmp_path / "checkpoint" / "tensors").iterdir()).write_bytes(b"cut")
    with pytest.raises(StorageError, match="reuse=false"):
        Checkpoint(tmp_path, CPU).load()


def test_journal_is_cut_at_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1)
    journal.append({"round": 1})
    covered = journal.mark
    journal.append({"round": 2})
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3')
    assert [row["round"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    again = Journal(tmp_path, covered, 2)
    assert again.rows == [{"round": 1}]
    again.append({"round": 2})
    again.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"round": 1}\n{"round": 2}\n'


def test_a_torn_timing_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    (tmp_path / "timing.jsonl").write_text('{"round": 1}\n{"rou')
    journal = Journal(tmp_path, None, 2)
    journal.time(2, 0, {"train": 0.5})
    journal.close()
    assert [row["round"] for row in read_jsonl(tmp_path / "timing.jsonl")] == [1, 2]


@pytest.mark.parametrize("overrides", [
    ["device=cpu"], ["threads=1"], ["output_root=x"], ["data_root=y"], ["checkpoint.every=off"], ["on_running=fail"],
    ["reuse=false"], ["memo.enabled=false"], ["logger=tensorboard"], ["state.memory_gb=0.1"], ["dataset.download=true"],
    ["deterministic=true"],
])  # fmt: skip
def test_config_hash_ignores_place_and_speed(overrides: list[str]) -> None:
    assert identity.config_hash(compose(overrides)) == identity.config_hash(compose([]))


def test_a_key_that_came_later_counts_where_it_changes_something() -> None:
    """A key that was added later leaves the config hash as long as it has no effect.

    So results from before the key existed keep their run ID.
    """
    config = compose(["method=fed_adi"])
    for group, keys in (
        ("aggregator", {"tv"}),
        ("eval", {"per_class", "per_client"}),
        ("limit", {"proxy"}),
        ("proxy", {"resize"}),
    ):
        earlier = config.with_values(
            **{group: {k: v for k, v in config[group].items() if k not in keys}}
        )
        assert config[group].keys() >= keys and identity.config_hash(
            earlier
        ) == identity.config_hash(config)


@pytest.mark.parametrize("override", [
    "seed=1", "seed_data=1", "rounds=3", "clients=5", "local.lr=0.1", "partition.alpha=0.1", "model.hidden=[3]",
    "method=fedprox", "trainer=fedprox", "dtype=float64", "eval.every=2", "headline.rule=mean_last_10", "debug=smoke",
    "precision=bf16", "debug=profile", "eval.per_class=true", "eval.per_client=true", "limit.proxy=3",
])  # fmt: skip
def test_config_hash_changes_with_keys_that_decide_the_result(override: str) -> None:
    assert identity.config_hash(compose([override])) != identity.config_hash(compose([]))


def test_code_hash_sees_code_and_not_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for text in (
        '"""Doc."""\nX = 1\n',
        '"""Other doc."""\n# comment\nX  =  1\n',
        '"""Doc."""\nX = 2\n',
        "from fxhelp import Y\nX = 2\n",
    ):
        (tmp_path / "fxplug.py").write_text(text)
        (tmp_path / "fxhelp.py").write_text("Y = 1\n")
        forget_sources()
        hashes.append(identity.code_hash({"trainer": {"_target_": "fxplug.T"}}))
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    forget_sources()


def forget_sources() -> None:
    """Clear the cached sources, as in a new process."""
    identity._module.cache_clear()
    identity._fingerprint.cache_clear()


def test_code_hash_sees_a_plugins_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fxmethod.py").write_text("import json\nfrom fxhelpers import scale\n")
    hashes = set()
    for text in ("def scale():\n    return 1\n", "def scale():\n    return 2\n"):
        (tmp_path / "fxhelpers.py").write_text(text)
        forget_sources()
        hashes.add(identity.code_hash({"trainer": {"_target_": "fxmethod.T"}}))
    forget_sources()
    assert len(hashes) == 2


def test_code_hash_sees_the_versions_of_packages_that_a_plugin_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fxused.py").write_text("from scipy import optimize\nclass T: pass\n")
    config = {"trainer": {"_target_": "fxused.T"}}
    version = importlib.metadata.version
    hashes = []
    for package in ("none", "scipy", "matplotlib"):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name, p=package: version(name) + "1" * (name == p)
        )
        forget_sources()
        hashes.append((identity.code_hash(config), identity.code_hash({})))
    plain, updated, unused = hashes
    assert updated[0] != plain[0] and unused == plain
    # Without user modules, only the versions of torch and torchvision count.
    assert updated[1] == plain[1]
    monkeypatch.undo()
    forget_sources()


def test_code_hash_does_not_list_installed_packages_for_standard_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("the installed packages were listed")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", fail)
    (tmp_path / "fxplain.py").write_text("import math, torch\nclass T: pass\n")
    forget_sources()
    identity.code_hash({"trainer": {"_target_": "fxplain.T"}})
    forget_sources()


def test_code_hash_sees_modules_of_nested_namespace_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "outer_space" / "inner_space"
    inner.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = set()
    for text in ("x = 1\n", "x = 2\n"):
        (inner / "plugin.py").write_text(text)
        forget_sources()
        hashes.add(
            identity.code_hash({"trainer": {"_target_": "outer_space.inner_space.plugin.Mine"}})
        )
    assert len(hashes) == 2


def test_code_hash_covers_the_methods_own_modules() -> None:
    one, two = compose(["method=fedavg"]), compose(["method=scaffold"])
    assert identity.code_hash(one.values) != identity.code_hash(two.values)
    assert identity.code_hash(one.values) == identity.code_hash(
        compose(["method=fedavg", "logger=tensorboard"]).values
    )


def test_what_trains_a_client_knows_no_aggregator() -> None:
    """Methods share the local models, which stay valid if the server's code changes."""
    hashes = {
        m: identity.training_hash(compose([f"method={m}"]).values, {})
        for m in ("fedavg", "local", "fedprox")
    }
    assert hashes["fedavg"] == hashes["local"] != hashes["fedprox"]


def test_run_folder_set_aside_keeps_its_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run" / "code")
    folder.acquire("fail", print)
    assert folder.set_aside() is None
    for text in ("one", "two"):
        write_text(folder.path / "result.json", text)
        folder.set_aside()
    folder.release()
    assert sorted(p.read_text() for p in tmp_path.glob("run/code.*/result.json")) == ["one", "two"]


def test_running_twice_at_once_fails_if_asked(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.acquire("fail", print)
    with pytest.raises(StorageError, match="already being executed") as early:
        second.acquire("fail", print)
    assert early.value.facts["got"] == "another process"
    first.set_status("running")
    with pytest.raises(StorageError, match="already being executed") as caught:
        second.acquire("fail", print)
    assert f"process {os.getpid()} on" in caught.value.facts["got"]
    first.release()
    second.acquire("fail", print)
    second.release()


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    """Two configs whose hashes begin with the same digits would share the folder."""
    mine, other = ({"config": "0" * 16 + end, "code": "c" * 32} for end in "ab")
    first = RunFolder(tmp_path / "run", mine)
    first.acquire("fail", print)
    first.release()
    second = RunFolder(tmp_path / "run", other)
    with pytest.raises(StorageError, match="another run"):
        second.acquire("fail", print)
    first.acquire("fail", print)  # the refused run left no lock
    write_text(first.path / "result.json", json.dumps({"status": "done", "hashes": mine}))
    assert first.result() is not None
    with pytest.raises(StorageError, match="another run"):
        second.result()
    first.set_aside()
    assert (first.path / "identity.json").exists()
    first.release()


def test_a_name_holds_enough_of_the_config_hash(tmp_path: Path) -> None:
    config = compose([f"output_root={tmp_path}"])
    folder = RunFolder.of(config)
    assert folder.path.parent.name.endswith("-" + identity.config_hash(config)[:16])
    assert folder.path.name == identity.code_hash(config.values)[:8]
    folder.acquire("fail", print)
    folder.release()
    stored = read_json(folder.path / "identity.json")
    assert stored == {
        "config": identity.config_hash(config),
        "code": identity.code_hash(config.values),
    }
    names = {
        identity.config_hash(config.with_values(seed=seed, seed_data=seed))[:16]
        for seed in range(2000)
    }
    assert len(names) == 2000


def test_address_names_method_and_data(tmp_path: Path) -> None:
    config = compose([f"output_root={tmp_path}"])
    path = RunFolder.of(config).path
    assert path.parent.parent == tmp_path.resolve() / "runs"
    assert path.parent.name.startswith("fedavg-digits-")


def test_a_name_is_one_folder_under_runs(tmp_path: Path) -> None:
    """The name of a run is one folder under `runs`, whatever its parts contain.

    Examples are options in subfolders and methods with names that look like paths.
    """
    config = compose([f"output_root={tmp_path}"])
    for method, dataset in (("fedavg", "sub/mine"), ("../../../x", "digits"), ("x" * 300, "..")):
        choices = {**config.choices, "dataset": dataset}
        named = replace(config.with_values(method=method), choices=choices)
        folder = RunFolder.of(named)
        folder.acquire("fail", print)
        folder.release()
        assert folder.path in [run.path for run in find_runs(tmp_path.resolve())]


def test_replacing_keeps_links_and_pipes(tmp_path: Path) -> None:
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    link.symlink_to(file)
    write_text(link, "new")
    assert link.is_symlink() and file.read_text() == "new"

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "sent")
    assert os.read(reader, 9) == b"sent" and pipe.is_fifo()
    os.close(reader)


def test_replacing_flushes_the_new_file_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file is flushed to disk before it replaces the old one.

    Metrics are flushed before the checkpoint that relies on them.
    """
    done: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: done.append(Path(f"/proc/self/fd/{file}").readlink().name)
    )
    monkeypatch.setattr(
        Path, "replace", lambda path, target: done.append("renamed") or replace(path, target)
    )
    write_text(tmp_path / "a.txt", "new")
    assert done == [f".a.txt.{socket.gethostname()}.{os.getpid()}.part", "renamed"]
    journal = Journal(tmp_path, None, 1)
    journal.append({"step": 1})
    journal.sync()
    journal.close()
    assert done[2:] == ["metrics.jsonl"]


def test_loaded_tensors_are_aligned_like_new_ones(tmp_path: Path) -> None:
    """On some processors the bits of a matrix product depend on the alignment."""
    tree = {str(size): torch.arange(size, dtype=torch.float32) for size in range(1, 40)}
    save_tree(tmp_path / "tree", tree)
    loaded, _ = load_tree(tmp_path / "tree", CPU)
    store = TensorStore(tmp_path)
    single = [store.tensor(store.put(tree), key, CPU) for key in tree]
    for value in (*loaded.values(), *single):
        assert value.data_ptr() % 64 == tree["1"].data_ptr() % 64 == 0
    for key, value in tree.items():
        assert torch.equal(loaded[key], value)
