"""Stored models equal the models of the state, at whichever line the process stops."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.client_states import After, committed
from fedexp.core.errors import StorageError
from fedexp.core.runner import Snapshot, run
from fedexp.core.stored_weights import ModelStore, StoredWeights, stored_weights_in
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.running.execute import execute
from fedexp.storage import tensors
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.stored_weights import FileBackedModelStore, FileBackedWeights
from tests.reference.keeper import KeepLast
from tests.storage.crashes import before_every_change, interrupted_at
from tests.world import CPU, World, assert_same, make_data, make_world

SPEC = ModelSpec("tests.world.Softmax", (("num_classes", 2),))
SIZE = 3 * 4 + 8  # bytes of one model
KEEPER = [
    "aggregator._target_=tests.reference.keeper.KeepLast",
    "~aggregator.weights",
    "+aggregator.K=2",
]


def model_of(client: int, step: int) -> Weights:
    return Weights(
        SPEC, {"w": torch.tensor([client, step, -0.0])}, {"n": torch.tensor(2**40 + step)}
    )


def state_of(client: int, step: int) -> Trees:
    return {"c": {"z": torch.tensor([client, step])}}


def assert_kept(state: dict[str, Any], expected: dict[str, list[Weights]]) -> None:
    assert list(state["kept"]) == list(expected)
    for client, models in expected.items():
        found = [kept.load() for kept in state["kept"][client]]
        assert [model.spec for model in found] == [model.spec for model in models]
        assert_same([m.params for m in found] + [m.buffers for m in found],
                    [m.params for m in models] + [m.buffers for m in models])  # fmt: skip


Expected = dict[str, list[Weights]]


def play(
    saver: Checkpoint, count: int, every: int = 2, clients: int = 5
) -> Iterator[tuple[Snapshot, Expected, bool]]:
    """Yield the snapshot, the stored models and whether a save follows, for each step.

    In every step, one or two clients get a new state and a new model. The last two
    models of each client are stored.
    """
    now: Snapshot = Snapshot(0, {"kept": {}}, saver.client_states)
    expected: Expected = {}
    for step in range(1, count + 1):
        states = committed(now.clients)
        saver.models.keep_only(now.state)
        kept, expected = dict(now.state["kept"]), dict(expected)
        changes = {}
        for client in {step % clients, step * step % clients}:
            changes[client], name, model = (
                state_of(client, step),
                str(client),
                model_of(client, step),
            )
            kept[name] = [*kept.get(name, []), saver.models.store(model)][-2:]
            expected[name] = [*expected.get(name, []), model][-2:]
        now = Snapshot(step, {"kept": kept}, After(states, changes))
        yield now, expected, step % every == 0
        if step % every == 0:
            saver.save(now, set(), 0)


def files(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "checkpoint" / "tensors").iterdir()}


@pytest.mark.parametrize("held", [0, 2, 100])
def test_killed_before_any_change_on_disk_the_last_or_the_next_checkpoint_is_there(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = tmp_path / "run", tmp_path / "killed"
    folder.mkdir()
    saver = Checkpoint(folder, CPU, held * SIZE / 1e9)
    saved: dict[int, Expected] = {0: {}}
    looked: list[int] = []

    def look() -> None:
        shutil.copytree(folder, killed)
        found = Checkpoint(killed, CPU).load()
        step = found[0].step if found else 0
        assert step in list(saved)[-2:]
        assert_kept(found[0].state if found else {"kept": {}}, saved[step])
        if found:
            assert files(killed) == {kept.digest for kept in stored_weights_in(found[0].state)}
        shutil.rmtree(killed)
        looked.append(step)

    before_every_change(monkeypatch, look)
    for snapshot, expected, saves in play(saver, 12):
        if saves:
            saved[snapshot.step] = expected
    assert len(looked) > 60 and set(looked) == set(saved)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("held", [0, 3])
def test_interrupted_at_any_line_the_finished_step_can_be_saved(
    tmp_path: Path, held: int, saves: bool
) -> None:
    """After the interruption, the run saves and cleans up.

    A second interruption may prevent the save.
    """
    interrupted = 0
    for stop in itertools.count(1, 71):
        folder = tmp_path / str(stop)
        saver = Checkpoint(folder, CPU, held * SIZE / 1e9)
        pending: tuple[Snapshot, Expected] = Snapshot(0, {"kept": {}}, saver.client_states), {}
        saved: dict[int, Expected] = {0: {}}
        try:
            with interrupted_at(
                stop,
                "client_states.py",
                "checkpoint.py",
                "storage/stored_weights.py",
                "tensors.py",
                "files.py",
            ):
                for snapshot, expected, saving in play(saver, 8):
                    pending = snapshot, expected
                    if saving:
                        saved[snapshot.step] = expected
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        assert_kept(pending[0].state, pending[1])
        if saves:
            saver.save(pending[0], set(), 0)
            saved = {pending[0].step: pending[1]}
        saver.close()
        found = Checkpoint(folder, CPU).load()
        step = found[0].step if found else 0
        assert step in list(saved)[-2:]
        assert_kept(found[0].state if found else {"kept": {}}, saved[step])
    assert interrupted > 15


@pytest.mark.parametrize("held", [0, 1, 3, 20])
def test_stored_models_are_in_memory_up_to_the_limit(tmp_path: Path, held: int) -> None:
    saver = Checkpoint(tmp_path, CPU, held * SIZE / 1e9)
    for snapshot, expected, saves in play(saver, 20, every=3):
        assert_kept(snapshot.state, expected)
        kept = [
            model
            for model in stored_weights_in(snapshot.state)
            if isinstance(model, FileBackedWeights)
        ]
        in_memory = sum(model.bytes for model in kept if model.weights is not None)
        assert in_memory + saver.client_states.bytes <= held * SIZE
        assert held < 20 or in_memory == sum(map(len, expected.values())) * SIZE
        if saves:
            saver.save(snapshot, set(), 0)
            assert files(tmp_path) == {model.digest for model in kept} == saver.models.saved


def test_what_the_last_checkpoint_refers_to_outlives_its_equals(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU, 0)
    kept = saver.models.store(model_of(0, 1))
    saver.save(Snapshot(1, {"kept": {"0": [kept]}}, {}), set(), 0)
    again = saver.models.store(model_of(0, 1))
    assert saver.models.name_of(again) == kept.digest
    saver.models.keep_only({})
    saver.close()
    found = Checkpoint(tmp_path, CPU).load()
    assert found is not None
    assert_kept(found[0].state, {"0": [model_of(0, 1)]})


def test_without_checkpoints_the_disk_holds_the_state_and_in_the_end_nothing(
    tmp_path: Path,
) -> None:
    saver = Checkpoint(tmp_path, CPU, 0)
    before: set[str] = set()
    for snapshot, _, _ in play(saver, 20, every=100):
        kept = {model.digest for model in stored_weights_in(snapshot.state)}
        assert files(tmp_path) == kept | before
        before = kept
    saver.close()
    assert files(tmp_path) == set()


def test_client_states_and_models_share_one_limit(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU, 5 * SIZE / 1e9)
    one = saver.models.store(model_of(0, 0))
    for client in range(4):
        saver.client_states.commit({client: {"c": {"z": torch.zeros(5)}}})
    two = saver.models.store(model_of(1, 1))
    assert (one.weights is None, two.weights is None) == (True, False)
    saver.client_states.commit({4: {"c": {"z": torch.zeros(5)}}})
    saver.models.keep_only({"two": two})
    assert two.weights is None and len(saver.client_states._held) == 5


def test_written_and_hashed_once_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Tree] = []
    written: list[str] = []
    digest, save_tree = tensors.digest, tensors.save_tree
    monkeypatch.setattr(tensors, "digest", lambda tree: hashed.append(tree) or digest(tree))
    monkeypatch.setattr(
        tensors, "save_tree", lambda path, tree: written.append(path.name) or save_tree(path, tree)
    )
    saver = Checkpoint(tmp_path, CPU)
    kept = [saver.models.store(model_of(0, step)) for step in (1, 2, 1)]
    assert not hashed and not written
    for step in (1, 2, 3):
        saver.save(Snapshot(step, {"kept": kept}, {}), set(), 0)
        assert (
            len(hashed) == 3
            and len(written) == 2
            and files(tmp_path) == {kept[0].digest, kept[1].digest}
        )
    found = Checkpoint(tmp_path, CPU)
    snapshot, _ = found.load() or (None, 0)
    assert snapshot is not None and snapshot.state["kept"] == kept
    found.save(Snapshot(4, snapshot.state, {}), set(), 0)
    assert len(hashed) == 3 and len(written) == 2


def test_stored_models_are_equal_by_spec_and_content(tmp_path: Path) -> None:
    memory, disk = ModelStore(), Checkpoint(tmp_path, CPU, 0).models
    for one, two in itertools.product((memory, disk), repeat=2):
        first, other = one.store(model_of(1, 1)), model_of(1, 1)
        assert first == two.store(other) and hash(first) == hash(two.store(other))
        assert first != two.store(model_of(1, 2)) and first != two.store(replace(other, buffers={}))
        assert first != two.store(replace(other, spec=replace(SPEC, kwargs=())))


def test_stored_model_is_not_a_view_of_a_larger_tensor() -> None:
    stack = torch.arange(12.0).reshape(3, 4)
    own = torch.ones(2)
    kept = ModelStore().store(Weights(SPEC, {"a": stack[1], "b": own}, {})).load()
    assert kept.params["a"].untyped_storage().nbytes() == 16 and kept.params["b"] is own


def test_a_checkpoint_takes_models_from_elsewhere(tmp_path: Path) -> None:
    """The models come from memory and from the folder of another run."""
    mine, other = Checkpoint(tmp_path / "mine", CPU), Checkpoint(tmp_path / "other", CPU, 0)
    kept = [ModelStore().store(model_of(0, 1)), other.models.store(model_of(0, 2))]
    mine.save(Snapshot(1, {"kept": {"0": kept}}, {}), set(), 0)
    shutil.rmtree(tmp_path / "other")
    found = Checkpoint(tmp_path / "mine", CPU).load()
    assert found is not None
    assert_kept(found[0].state, {"0": [model_of(0, 1), model_of(0, 2)]})


def test_resuming_reads_no_kept_model_and_damage_names_the_file(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU)
    kept = [saver.models.store(model_of(0, step)) for step in (1, 2)]
    saver.save(Snapshot(1, {"kept": kept}, {}), set(), 0)
    for path in (tmp_path / "checkpoint" / "tensors").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    snapshot, _ = Checkpoint(tmp_path, CPU).load() or (None, 0)
    assert snapshot is not None and snapshot.state["kept"] == kept
    with pytest.raises(StorageError, match=r"(?s)reuse=false") as error:
        snapshot.state["kept"][1].load()
    path = tmp_path / "checkpoint" / "tensors" / f"{kept[1].digest}.safetensors"
    assert error.value.facts["where"] == str(path)
    path.unlink()
    with pytest.raises(StorageError, match=kept[1].digest):
        snapshot.state["kept"][1].load()


def test_a_parameter_is_read_alone_and_never_unverified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpoint(tmp_path, CPU)
    params = {
        name: torch.randn(3, generator=torch.Generator().manual_seed(i))
        for i, name in enumerate("ab")
    }
    saver.save(Snapshot(1, {"kept": [saver.models.store(Weights(SPEC, params, {}))]}, {}), set(), 0)
    whole = []
    load = tensors.load_tree
    monkeypatch.setattr(
        tensors, "load_tree", lambda path, *how: (whole.append(path), load(path, *how))[1]
    )

    def resumed() -> StoredWeights:
        snapshot, _ = Checkpoint(tmp_path, CPU).load() or pytest.fail("nothing was saved")
        kept: StoredWeights = snapshot.state["kept"][0]
        return kept

    kept = resumed()
    for _ in range(2):
        assert_same([{name: kept.parameter(name) for name in params}], [params])
    (path,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    assert whole == [path]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # a flipped bit
    with pytest.raises(StorageError, match=r"reuse=false"):
        resumed().parameter("a")
    path.unlink()
    with pytest.raises(StorageError, match=r"reuse=false"):
        kept.parameter("a")


def keeper_world(rounds: int = 6) -> World:
    world = make_world("method=fedavg", f"rounds={rounds}", data=make_data((9, 12, 7, 8, 10)), m=2)
    return replace(world, experiment=replace(world.experiment, aggregator=KeepLast(K=2)))


def all_kept(snapshot: Snapshot) -> dict[str, list[Tree]]:
    return {
        client: [kept.load().params for kept in models]
        for client, models in snapshot.state["kept"].items()
    }


def test_the_keepers_mean_is_the_mean_of_what_it_keeps() -> None:
    """The models are in memory, so no run folder is needed."""
    world, trained = keeper_world(), {}

    class Records(Serial):
        def map(self, jobs, data):
            for result in super().map(jobs, data):
                trained.setdefault(str(result.client), []).append(result.weights.params)
                yield result

    end = world.run(engine=Records())
    last = {client: models[-2:] for client, models in trained.items()}
    assert any(len(models) > 2 for models in trained.values())
    assert all(type(kept) is StoredWeights for kept in stored_weights_in(end.state))
    for client, models in all_kept(end).items():
        assert_same(models, last[client])
    stacked = [
        torch.stack(values)
        for values in zip(*(m.values() for ms in last.values() for m in ms), strict=True)
    ]
    mean = dict(zip(world.models(end)[0], (values.mean(0) for values in stacked), strict=True))
    assert_same(world.models(end), [mean], 1e-12)


@pytest.mark.parametrize("held", [0, 1, 3, 100])
@pytest.mark.parametrize("every", [1, 4])
def test_neither_a_limit_nor_resuming_after_any_step_changes_bits(
    tmp_path: Path, held: int, every: int
) -> None:
    world = keeper_world()
    expected = world.run()
    size = sum(value.nbytes for value in world.env.initial_weights().params.values())
    done = 0
    while done < 6:
        saver = Checkpoint(tmp_path, CPU, held * size / 1e9)
        snapshot = (
            saver.load() or (Snapshot(0, world.aggregator.init(world.env), saver.client_states), 0)
        )[0]
        env = replace(world.env, models=saver.models)
        for step in itertools.islice(
            run(world.aggregator, env, Serial(), world.data, snapshot), every
        ):
            snapshot = step.after
        saver.save(snapshot, set(), 0)
        done = snapshot.step
        assert files(tmp_path) >= {kept.digest for kept in stored_weights_in(snapshot.state)}
    assert_same(world.models(snapshot), world.models(expected))
    found, original = all_kept(snapshot), all_kept(expected)
    assert list(found) == list(original)
    for client in original:
        assert_same(found[client], original[client])


def test_a_run_holds_what_its_state_refers_to(tmp_path: Path) -> None:
    world, saver = keeper_world(), Checkpoint(tmp_path, CPU, 0)
    env, before = replace(world.env, models=saver.models), set[str]()
    start = Snapshot(0, world.aggregator.init(env), saver.client_states)
    for step in run(world.aggregator, env, Serial(), world.data, start):
        kept = {model.digest for model in stored_weights_in(step.after.state)}
        assert files(tmp_path) == kept | before
        before = kept


@pytest.mark.parametrize("every", ["1", "off"])
def test_a_runs_limit_changes_neither_results_nor_what_it_leaves(
    tmp_path: Path, every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Weights] = []
    store = FileBackedModelStore.store
    monkeypatch.setattr(
        FileBackedModelStore,
        "store",
        lambda self, weights: kept.append(weights) or store(self, weights),
    )
    results, left = [], []
    for limit in ("0", "2"):
        overrides = [
            "debug=smoke",
            "method=fedavg",
            *KEEPER,
            "rounds=6",
            "limit.rounds=null",
            "memo.enabled=false",
        ]
        more = [
            f"checkpoint.every={every}",
            f"state.memory_gb={limit}",
            f"output_root={tmp_path / limit}",
        ]
        folder = Path(execute(compose([*overrides, *more]), say=None)["folder"])
        results.append(
            ((folder / "metrics.jsonl").read_bytes(), (folder / "model.safetensors").read_bytes())
        )
        left.append({path.name for path in folder.glob("checkpoint/**/*") if path.is_file()})
        assert left[-1] if every == "1" else not left[-1]
    assert results[0] == results[1] and left[0] == left[1]
    assert len(kept) > 12
