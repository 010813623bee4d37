"""Probes are answered in the process that trained or received the model.

The answers are bit-identical to the serial engine's. Each probe is answered only once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import fedexp.engines
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.errors import ClientError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.core.trainer import Ctx
from fedexp.core.trees import Tree, Trees
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.engines.stored_models import FromStoredModels, StoredModels
from fedexp.engines.timing import shortened_jobs
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers
from fedexp.methods.bases.class_counts import ClassCounts
from fedexp.methods.fedavg import PlainTrainer
from fedexp.storage.model_folder import Clients, ModelFolder, save_outcome
from tests.reference.witness import Witness, told
from tests.world import MLP, World, assert_same, make_data, make_world

NUMERICS = Numerics({}, threads=1, device="cpu", dtype="float64")
STACKED = {"_target_": "fedexp.engines.vectorized.Vectorized", "stack": 2}


@dataclass(frozen=True)
class Signed(PlainTrainer):
    """A trainer that sends the id of the process that trained."""

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        return {"signed": {"pid": torch.tensor(os.getpid())}}, None


@dataclass(frozen=True)
class Registered(Witness):
    """A second witness with another name."""

    name: ClassVar[str] = "registered"


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    made: dict[str, Engine] = {
        "serial": Serial(),
        "vectorized": Vectorized(2),
        "workers": Workers(2),
        "workers of stacks": Workers(2, inner=STACKED),
    }
    for engine in made.values():
        engine.open(NUMERICS, 2)
    yield made
    for engine in made.values():
        engine.close()


NAMES = ["serial", "vectorized", "workers", "workers of stacks"]


def jobs_of(world: World, *probes: object) -> list[ClientJob]:
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    return [replace(job, probes=probes) for job in jobs]


def assert_processes_of(engine: Engine, found: Sequence[int]) -> None:
    """Check that an engine answers in its workers, or in this process."""
    if isinstance(engine, Workers):
        assert os.getpid() not in found and 1 <= len({*found}) <= int(engine.workers)
    else:
        assert {*found} == {os.getpid()}


def pids(results: Sequence[ClientResult]) -> list[int]:
    return [int(result.probes["witness"]["pid"]) for result in results]


def of_serial(jobs: Sequence[ClientJob], like: str, data: FederatedData) -> list[ClientResult]:
    """Return the results with which the engine `like` must agree.

    The last bits of models from stacked training differ from those of clients trained
    one by one.
    """
    return list(
        (Vectorized(2) if "stack" in like or like == "vectorized" else Serial()).map(jobs, data)
    )


def assert_agree(got: Sequence[ClientResult], expected: Sequence[ClientResult]) -> None:
    assert [r.client for r in got] == [r.client for r in expected]
    assert_same([told(r) for r in got], [told(r) for r in expected])
    assert_same([r.weights.params for r in got], [r.weights.params for r in expected])


@pytest.mark.parametrize("name", NAMES)
def test_who_trained_answers(name: str, engines: dict[str, Engine]) -> None:
    world = make_world("method=fedavg", data=make_data((9, 9, 5, 9, 7, 5)))
    jobs = jobs_of(world, Witness())
    assert_agree(list(engines[name].map(jobs, world.data)), of_serial(jobs, name, world.data))
    if name in ("vectorized", "workers of stacks"):
        assert engines[name].stacked_steps > 0
    else:  # a stack of clients cannot send a process id
        jobs = [replace(job, trainer=Signed()) for job in jobs]
    results = list(engines[name].map(jobs, world.data))
    assert_processes_of(engines[name], pids(results))
    for result in results:
        signed = result.payload.get("signed")
        assert signed is None or int(signed["pid"]) == int(result.probes["witness"]["pid"])
        assert result.probe_seconds > 0


@pytest.mark.parametrize(
    "model", [MLP, {"_target_": "tests.engines.plugins.Normalised"}], ids=["mlp", "buffers"]
)
@pytest.mark.parametrize("name", NAMES)
def test_trained_models_are_asked_where_the_engine_trains(
    name: str, model: dict[str, object], engines: dict[str, Engine]
) -> None:
    """Trained models are asked in the processes in which the engine trains.

    Only answers come back, and nothing is trained.
    """
    world = make_world("method=fedavg", model=model)
    jobs = jobs_of(world, Witness())
    models = [result.weights for result in Serial().map(jobs, world.data)]
    asked = [job.asking(model, job.probes) for job, model in zip(jobs, models, strict=True)]
    results = list(engines[name].map(asked, world.data))
    assert_processes_of(engines[name], pids(results))
    assert_same([told(r) for r in results], [told(r) for r in Serial().map(jobs, world.data)])
    assert [(r.num_steps, r.weights.params, r.weights.buffers, r.metrics) for r in results] == [
        (0, {}, {}, {})
    ] * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_failing_probe_names_its_client(name: str, engines: dict[str, Engine]) -> None:
    world = make_world("method=fedavg", data=make_data((5, 8, 6, 4)))
    jobs = jobs_of(world, Witness(fails_on=6))
    done = []
    with pytest.raises(ClientError, match="client 2 failed: ArithmeticError: no answer"):
        for result in engines[name].map(jobs, world.data):
            done.append(result.client)
    assert done == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_finite_is_not_asked(name: str, engines: dict[str, Engine]) -> None:
    world = make_world("method=fedavg")
    jobs = jobs_of(world, Witness())
    bad = replace(
        jobs[1].start, params={n: v * float("nan") for n, v in jobs[1].start.params.items()}
    )
    jobs[1] = replace(jobs[1], start=bad)
    answered = [list(r.probes) for r in engines[name].map(jobs, world.data)]
    asked = [job.asking(job.start, job.probes) for job in jobs]
    assert answered == [["witness"], [], ["witness"], ["witness"]]
    assert [list(r.probes) for r in engines[name].map(asked, world.data)] == answered


class OneStream(Engine):
    """An engine that runs another engine and counts what it is asked.

    It refuses a second stream while the first one is open.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner, self.trained, self.asked, self.streams = inner, 0, 0, 0
        self.calls: list[list[int]] = []  # clients that were to be trained together

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        return self.inner.split(jobs, data)

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        assert not self.streams
        self.streams += 1
        self.calls.append([job.client for job in jobs if not job.trained])
        try:
            for job, result in zip(jobs, self.inner.map(jobs, data), strict=True):
                self.trained += not job.trained
                self.asked += len(job.probes)
                yield result
        finally:
            self.streams -= 1

    def counted(self) -> tuple[int, int]:
        counts = self.trained, self.asked
        self.trained = self.asked = 0
        return counts


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_model_is_asked_a_new_probe_without_training(
    name: str, engines: dict[str, Engine], tmp_path: Path
) -> None:
    world = make_world("method=fedavg", data=make_data((9, 9, 5, 9, 7, 5)))
    plain, first = jobs_of(world), jobs_of(world, Witness())
    both = jobs_of(world, ClassCounts(3), Witness())
    other = jobs_of(world, Witness(note=1))
    inner = OneStream(engines[name])
    client_cache = ClientCache(inner, tmp_path, 1.0, NUMERICS, "code")
    list(client_cache.map(plain, world.data))
    assert inner.counted() == (6, 0)
    for jobs, asked in ((first, 6), (first, 0), (both, 6), (both, 0), (other, 6), (other, 0)):
        got = list(client_cache.map(jobs, world.data))
        assert inner.counted() == (0, asked)
        assert_agree(got, of_serial(jobs, name, world.data))
        assert all(set(r.probes) == {probe.name for probe in jobs[0].probes} for r in got)
        assert_processes_of(engines[name], pids(got))
    assert (client_cache.hits, client_cache.misses) == (36, 6)
    counted = [r.probes["class_counts"]["n"] for r in client_cache.map(both, world.data)]
    assert torch.equal(torch.stack(counted), torch.from_numpy(world.data.class_counts()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gone", [(0,), (3,), (1, 4), (2, 3, 5)])
def test_what_is_lost_in_part_is_made_anew(
    gone: tuple[int, ...], name: str, engines: dict[str, Engine], tmp_path: Path
) -> None:
    """A client with a missing model or a missing answer is computed again.

    Models, answers or both are missing. A client with nothing missing is not asked
    again.
    """
    world = make_world("method=fedavg", data=make_data((9, 9, 5, 9, 7, 5)))
    jobs = jobs_of(world, Witness(), ClassCounts(3))
    inner = OneStream(engines[name])
    client_cache = ClientCache(inner, tmp_path, 1.0, NUMERICS, "code")
    expected = of_serial(jobs, name, world.data)
    for lost in (lambda job, key: [key], answers_of, lambda job, key: [key, *answers_of(job, key)]):
        list(client_cache.map(jobs, world.data))
        assert inner.counted()[0] in (0, 6)
        unlink(client_cache, jobs, gone, world.data, lost)
        got = list(client_cache.map(jobs, world.data))
        assert_agree(got, expected)
        assert [list(r.probes) for r in got] == [["witness", "class_counts"]] * 6
        trained, asked = inner.counted()
        parts = inner.split(jobs, world.data)
        # The last bits agree within a part.
        whole = [i for part in parts if set(part) & set(gone) for i in part]
        models, answers = lost is not answers_of, lost(jobs[0], "key") != ["key"]
        assert (trained, asked) == (len(whole) * models, 2 * len(gone) * answers)
        if "stack" in name or name == "vectorized":
            assert len(parts) < 6 and all(
                clients in (*parts, list(range(6)), []) for clients in inner.calls
            )


def answers_of(job: ClientJob, key: str) -> list[str]:
    from fedexp.engines.client_cache import _answer_key

    return [_answer_key(key, probe) for probe in job.probes]


def unlink(
    client_cache: ClientCache,
    jobs: Sequence[ClientJob],
    which: Sequence[int],
    data: FederatedData,
    names: Callable[[ClientJob, str], list[str]],
) -> None:
    keys = client_cache._keys(jobs, client_cache.inner.split(jobs, data), data)
    for i in which:
        for name in names(jobs[i], keys[i]):
            client_cache._path(name).unlink()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_evicted_while_others_are_trained_is_trained_too(
    name: str, engines: dict[str, Engine], tmp_path: Path
) -> None:
    world = make_world("method=fedavg", data=make_data((9, 9, 5, 9, 7, 5)))
    jobs = jobs_of(world)
    client_cache = ClientCache(OneStream(engines[name]), tmp_path, 1.0, NUMERICS, "code")
    expected = [r.weights.params for r in client_cache.map(jobs, world.data)]
    unlink(client_cache, jobs, (0, 5), world.data, lambda job, key: [key])
    stream = client_cache.map(jobs, world.data)
    got = [next(stream)]
    unlink(client_cache, jobs, (2, 3), world.data, lambda job, key: [key])
    got += stream
    assert_same([r.weights.params for r in got], expected)


def test_records_answer_before_data_are_asked(engines: dict[str, Engine], tmp_path: Path) -> None:
    """Probes of stored models are answered from the folder if it contains the answer.

    All other probes are answered from the data, in the worker processes.
    """
    world = make_world("method=local")
    jobs = jobs_of(world, ClassCounts(3), Witness(), Registered(records=True))
    state, _ = world.aggregator.update(
        world.aggregator.init(world.env), Serial().map(jobs, world.data), world.env
    )
    outcome = world.aggregator.outcome(state)
    clients = Clients.of(outcome, 4, world.data)
    assert clients is not None
    counts = tuple((7, 0, client) for client in range(4))
    for known in (replace(clients, class_counts=counts, num_examples=(31, 32, 33, 34)), None):
        (tmp_path / "clients.json").unlink(missing_ok=True)
        save_outcome(outcome, known, tmp_path)
        inner = OneStream(engines["workers"])
        stored = FromStoredModels(inner, StoredModels(ModelFolder.open(tmp_path)))
        results = list(stored.map(jobs, world.data))
        assert_same([r.weights.params for r in results], [model.params for model in outcome.models])
        assert_processes_of(engines["workers"], pids(results))
        assert_same([told(r) for r in results], [told(r) for r in Serial().map(jobs, world.data)])
        told_counts = torch.stack([r.probes["class_counts"]["n"] for r in results])
        if known is None:
            assert inner.counted() == (0, 12)
            assert torch.equal(told_counts, torch.from_numpy(world.data.class_counts()))
        else:
            assert inner.counted() == (0, 4)
            assert told_counts.tolist() == [list(row) for row in counts]
            assert [int(r.probes["registered"]["recorded"]) for r in results] == [31, 32, 33, 34]


def test_probes_have_seconds_of_their_own_and_nothing_goes_below_zero() -> None:
    class Slow(Serial):
        def map(
            self, jobs: Sequence[ClientJob], data: FederatedData
        ) -> Generator[ClientResult, None, None]:
            for result in super().map(jobs, data):
                yield replace(result, probe_seconds=seconds)

    for seconds in (0.0, 1e9):
        world = make_world("method=average", "aggregator.last_layer=masked", "rounds=1")
        (step,) = run(world.aggregator, world.env, Slow(), world.data)
        assert set(step.seconds) == {"train", "aggregate", "probe"}
        assert step.seconds["train"] >= 0
        assert (step.seconds["train"] > 0, step.seconds["probe"] > 0) == (seconds == 0, seconds > 0)


def test_a_shortened_job_is_asked_nothing() -> None:
    world = make_world("method=fedavg")
    assert [job.probes for job in shortened_jobs(jobs_of(world, Witness()), 2)] == [()] * 4


def test_engines_name_no_probe() -> None:
    for path in Path(fedexp.engines.__file__).parent.rglob("*.py"):
        assert "fedexp.methods" not in path.read_text(), path
