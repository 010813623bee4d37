"""Stored client states equal a plain dict, at whichever line the process stops."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.client_states import After, ClientStates, StatesInMemory, committed, owned
from fedexp.core.errors import StorageError
from fedexp.core.runner import Snapshot, run
from fedexp.core.trees import Trees
from fedexp.engines.serial import Serial
from fedexp.running.execute import execute
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.client_states import StoredClientStates
from tests.storage.crashes import before_every_change, interrupted_at
from tests.world import CPU, assert_same, make_data, make_world

SIZE = 4 * 3 + 8  # bytes of one state


def state_of(client: int, step: int) -> Trees:
    return {"c": {"z": torch.tensor([client, step, -0.0]), "a": torch.tensor(2**40 + step)}}


def assert_states(found: Mapping[int, Trees], expected: Mapping[int, Trees]) -> None:
    assert sorted(found) == sorted(expected) and len(found) == len(expected)
    for client, trees in expected.items():
        assert client in found and list(found[client]) == list(trees)
        for name, tree in trees.items():
            assert_same([found[client][name]], [tree])
    assert found.get(-7) is None


def steps(
    count: int, clients: int = 12, cohort: int = 4, seed: int = 0
) -> Iterator[tuple[int, dict[int, Trees]]]:
    rng = random.Random(seed)
    for step in range(1, count + 1):
        yield (
            step,
            {client: state_of(client, step) for client in rng.sample(range(clients), cohort)},
        )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedexp.storage.client_states._MOST", 3)
    monkeypatch.setattr("fedexp.storage.client_states._SLACK", 2)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("held", [0, 1, 5, 100])
@pytest.mark.parametrize("every", [1, 3])
def test_as_a_dict_and_after_every_save_on_disk(tmp_path: Path, held: int, every: int) -> None:
    saver = Checkpoint(tmp_path, CPU, held * SIZE / 1e9)
    clients: Mapping[int, Trees] = saver.client_states
    now: dict[int, Trees] = {}
    for step, changes in steps(30):
        clients = After(committed(clients), changes)
        now = {**now, **changes}
        assert_states(clients, now)
        assert len(saver.client_states._held) <= held
        if step % every == 0:
            saver.save(Snapshot(step, {}, clients), set(), 0)
            found = StoredClientStates(tmp_path / "checkpoint" / "client_states", CPU, 0)
            found.restore(
                json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["client_states"]
            )
            assert_states(found, now)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("held", [0, 5])
def test_killed_before_any_change_on_disk_the_last_or_the_next_checkpoint_is_there(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in the state that a kill before a rename or a deletion leaves."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    run.mkdir()
    saver = Checkpoint(run, CPU, held * SIZE / 1e9)
    saved: dict[int, dict[int, Trees]] = {0: {}}
    looked: list[int] = []

    def look() -> None:
        shutil.copytree(run, killed)
        found = Checkpoint(killed, CPU).load()
        step = found[0].step if found else 0
        assert step in list(saved)[-2:]
        assert_states(found[0].clients if found else {}, saved[step])
        shutil.rmtree(killed)
        looked.append(step)

    before_every_change(monkeypatch, look)
    clients: Mapping[int, Trees] = saver.client_states
    now: dict[int, Trees] = {}
    for step, changes in steps(12, clients=8):
        clients = After(committed(clients), changes)
        now = {**now, **changes}
        if step % 2 == 0:
            saved[step] = now
            saver.save(Snapshot(step, {"step": {"x": torch.tensor(step)}}, clients), set(), 0)
    assert len(looked) > 40 and set(looked) == set(saved)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("held", [0, 2])
def test_interrupted_at_any_line_the_finished_step_can_be_saved(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KeyboardInterrupt is raised at every 61st line.

    Then the run saves for the last time.
    """
    # A few superseded states are enough for the clean-up, since the run is short.
    monkeypatch.setattr("fedexp.storage.client_states._SLACK", -4)
    interrupted = in_clean_up = 0
    for stop in itertools.count(1, 61):
        folder = tmp_path / str(stop)
        saver = Checkpoint(folder, CPU, held * SIZE / 1e9)
        pending: tuple[Snapshot, dict[int, Trees]] = Snapshot(0, {}, saver.client_states), {}
        try:
            with interrupted_at(stop, "client_states.py", "checkpoint.py"):
                for step, changes in steps(8, clients=6):
                    after = After(committed(pending[0].clients), changes)
                    pending = Snapshot(step, {}, after), {**pending[1], **changes}
                    if step % 2 == 0:
                        saver.save(pending[0], set(), 0)
        except KeyboardInterrupt as stopped:
            interrupted += 1
            # The last two functions are the interrupted one and the one that raises. Every
            # save reaches the first lines of `_clean_up`, so they do not count.
            callers = traceback.extract_tb(stopped.__traceback__)[:-2]
            in_clean_up += any(frame.name == "_clean_up" for frame in callers)
        else:
            break
        assert_states(pending[0].clients, pending[1])
        saver.save(pending[0], set(), 0)
        found = Checkpoint(folder, CPU).load()
        assert found is not None and found[0].step == pending[0].step
        assert_states(found[0].clients, pending[1])
    assert interrupted > 15
    if held:  # otherwise too few lines belong to the clean-up
        assert in_clean_up


def test_interrupted_clean_up_loses_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With two superseded states, the third state of the first segment is written again.
    monkeypatch.setattr("fedexp.storage.client_states._SLACK", -2)
    states = StoredClientStates(tmp_path, CPU, 0)
    old, new = ({client: state_of(client, step) for client in range(4 - step)} for step in (1, 2))
    states.commit(old)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as inside:
        inside.setattr(StoredClientStates, "_drop", interrupt)
        with pytest.raises(KeyboardInterrupt):
            states.commit(new)
    assert_states(states, {**old, **new})

    found = StoredClientStates(tmp_path, CPU, 0)
    found.restore(states.flush())
    assert_states(found, {**old, **new})


@pytest.mark.usefixtures("small_segments")
def test_disk_holds_little_more_than_the_memories(tmp_path: Path) -> None:
    states = StoredClientStates(tmp_path, CPU, 0)
    sizes = []
    for _, changes in steps(200, clients=20):
        states.commit(changes)
        sizes.append(size_of(tmp_path))
    assert max(sizes[100:]) < 1.5 * max(sizes[20:60])
    stored = sum(states._written.values())
    assert stored <= 2 * len(states) + 2 + 4
    assert len(list(tmp_path.iterdir())) == len(states._written)


def test_what_no_checkpoint_refers_to_goes_when_the_run_ends(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, CPU, 0.0)
    one, two = {1: state_of(1, 1)}, {1: state_of(1, 2), 2: state_of(2, 2)}
    clients = After(committed(saver.client_states), one)
    saver.save(Snapshot(1, {}, clients), set(), 0)
    saver.client_states.commit(two)
    assert len(list((tmp_path / "checkpoint" / "client_states").iterdir())) == 2
    saver.close()
    assert len(list((tmp_path / "checkpoint" / "client_states").iterdir())) == 1
    found = Checkpoint(tmp_path, CPU).load()
    assert found is not None
    assert_states(found[0].clients, one)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_memories_are_an_error_that_helps(tmp_path: Path, damage: str) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {}, {0: state_of(0, 1)}), {0}, 0)
    (path,) = (tmp_path / "checkpoint" / "client_states").iterdir()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()
    with pytest.raises(StorageError, match="reuse=false"):
        Checkpoint(tmp_path, CPU).load()


@pytest.mark.parametrize("exchanged", [False, True])
def test_missing_or_exchanged_segment_is_named(tmp_path: Path, exchanged: bool) -> None:
    """An earlier segment still has a state of each client, so their number is right."""
    saver = Checkpoint(tmp_path, CPU)
    clients: Mapping[int, Trees] = saver.client_states
    for step, cohort in ((1, (0, 1)), (2, (1,))):
        changes = {client: state_of(client, step) for client in cohort}
        clients = After(committed(clients), changes)
        saver.save(Snapshot(step, {}, clients), set(), 0)
    latest = tmp_path / "checkpoint" / "client_states" / "00000002.safetensors"

    if exchanged:
        other = Checkpoint(tmp_path / "other", CPU)
        other.save(Snapshot(1, {}, {1: state_of(1, 1)}), {1}, 0)
        (path,) = (tmp_path / "other" / "checkpoint" / "client_states").iterdir()
        path.replace(latest)
    else:
        latest.unlink()
    with pytest.raises(StorageError, match=latest.name):
        Checkpoint(tmp_path, CPU).load()


def test_checkpoint_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    Checkpoint(tmp_path, CPU).save(Snapshot(1, {}, {0: state_of(0, 1)}), {0}, 0)
    (name,) = (path.name for path in (tmp_path / "checkpoint" / "client_states").iterdir())
    stored = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["client_states"]
    assert [number for number, _ in stored.pop("segments")] == [int(name.partition(".")[0])]
    found = StoredClientStates(tmp_path / "checkpoint" / "client_states", CPU, 0)
    found.restore(stored)
    assert_states(found, {0: state_of(0, 1)})


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("held", [0, 1, 2, 8])
def test_a_limit_does_not_change_bits(tmp_path: Path, held: int) -> None:
    world = make_world("method=scaffold", "rounds=6", data=make_data((9, 12, 7, 8, 10, 11)), m=2)
    expected = world.run()
    size = sum(v.numel() for v in world.env.initial_weights().params.values()) * 8
    saver = Checkpoint(tmp_path, CPU, held * size / 1e9)
    found = world.run(Snapshot(0, world.aggregator.init(world.env), saver.client_states))
    assert_same(world.models(found), world.models(expected))
    assert_states(found.clients, dict(expected.clients))


@pytest.mark.usefixtures("small_segments")
def test_a_runs_limit_changes_neither_results_nor_what_it_leaves(tmp_path: Path) -> None:
    results = []
    for limit in ("0", "2"):
        overrides = [
            "debug=smoke",
            "method=scaffold",
            "rounds=6",
            "limit.rounds=null",
            "memo.enabled=false",
        ]
        config = compose(
            [*overrides, f"state.memory_gb={limit}", f"output_root={tmp_path / limit}"]
        )
        folder = Path(execute(config, say=lambda text: None)["folder"])
        found = Checkpoint(folder, CPU).load()
        assert found is not None and len(found[0].clients) > 0
        results.append(
            ((folder / "metrics.jsonl").read_bytes(), (folder / "model.safetensors").read_bytes())
        )
        last = json.loads((folder / "checkpoint" / "manifest.json").read_text())["client_states"][
            "last"
        ]
        assert all(
            int(path.stem) <= last for path in (folder / "checkpoint" / "client_states").iterdir()
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_an_aborted_step_leaves_the_memories(tmp_path: Path, kind: str) -> None:
    class Breaks(Serial):
        def map(self, jobs, data):
            yield from itertools.islice(super().map(jobs, data), 2)
            raise RuntimeError("broken")

    states: ClientStates = (
        StatesInMemory({}) if kind == "memory" else StoredClientStates(tmp_path, CPU, 0)
    )
    one, two = make_world("method=scaffold", "rounds=1"), make_world("method=scaffold", "rounds=2")
    after = one.run(Snapshot(0, one.aggregator.init(one.env), states))
    before = dict(after.clients)
    with pytest.raises(RuntimeError, match="broken"):
        two.run(after, engine=Breaks())
    assert_states(after.clients, before)
    assert_same(two.models(two.run(after)), two.models(two.run()))


def test_outdated_snapshots_are_refused() -> None:
    world = make_world("method=scaffold", "rounds=3")
    first, second, third = (
        step.after for step in run(world.aggregator, world.env, Serial(), world.data)
    )
    assert len(third.clients) == len(second.clients) == 4
    for use in (lambda: world.run(first), lambda: first.clients[0], lambda: list(first.clients)):
        with pytest.raises(RuntimeError, match="outdated"):
            use()


def test_a_snapshots_plain_mapping_is_left_alone() -> None:
    world = make_world("method=scaffold", "rounds=1")
    mine: dict[int, Trees] = {}
    world.run(Snapshot(0, world.aggregator.init(world.env), mine))
    assert mine == {}


def test_views_of_large_tensors_are_copied_and_others_are_not() -> None:
    large, own = torch.arange(12.0).reshape(3, 4), torch.ones(2)
    kept = owned({"view": large[1], "own": own})
    assert kept["own"] is own
    assert kept["view"].untyped_storage().nbytes() == 16 and torch.equal(kept["view"], large[1])
