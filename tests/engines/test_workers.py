"""The workers engine gives the serial engine's results to the bit.

The tests use several numbers of processes. They also cover dead workers, errors and
interruptions.
"""

from __future__ import annotations

import contextlib
import multiprocessing.context
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, EngineContext, describe
from fedexp.core.errors import ClientError, ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.trainer import Ctx, Received, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.engines.serial import Serial
from fedexp.engines.workers import Workers
from tests.engines.compare import about, distinct_methods
from tests.engines.plugins import NoBatchingRule
from tests.killing import kill
from tests.reference.witness import Witness
from tests.world import World, assert_same, make_data, make_world

NUMERICS = Numerics(engine={}, threads=1, device="cpu", dtype="float64")


def opened(workers: int, **config: object) -> Workers:
    engine = Workers(workers=workers, **config)  # type: ignore[arg-type]
    engine.open(NUMERICS, 1)
    return engine


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Workers]]:
    engines = {count: opened(count) for count in (1, 2)}
    yield engines
    for engine in engines.values():
        engine.close()


def jobs_of(world: World) -> list[ClientJob]:
    return next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))


def pids(engine: Workers, jobs: Sequence[ClientJob], data: FederatedData) -> list[int]:
    """Return the process ids of all workers, after they have started.

    A round can end while a worker is still being forked. Therefore rounds of `jobs` run
    until each worker has answered a probe.
    """
    asked = [replace(job, probes=(Witness(),)) for job in jobs]
    deadline = time.monotonic() + 60
    found: set[int] = set()
    while len(found) < int(engine.workers):
        assert time.monotonic() < deadline
        found |= {int(result.probes[Witness.name]["pid"]) for result in engine.map(asked, data)}
    return sorted(found)


def parent_of(pid: int) -> int:
    """Return the parent of a process. The parent of a worker is the fork server."""
    # The name of the process, in parentheses, may contain spaces
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def shared_memory_files() -> list[int]:
    """Return the file descriptors of this process that are memory without a name."""
    links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
    return [
        fd for fd, link in links.items() if link.is_symlink() and "memfd" in str(link.readlink())
    ]


def assert_equal(a: Sequence[ClientResult], b: Sequence[ClientResult]) -> None:
    """Check that two lists of results are bit-identical in every field."""
    assert [r.client for r in a] == [r.client for r in b]
    for left, right in zip(a, b, strict=True):
        assert (left.num_examples, left.num_steps, left.metrics) == (
            right.num_examples,
            right.num_steps,
            right.metrics,
        )
        assert left.weights.spec == right.weights.spec
        assert_same(
            [left.weights.params, left.weights.buffers],
            [right.weights.params, right.weights.buffers],
        )
        assert (left.state is None) == (right.state is None)
        for mine, other in ((left.payload, right.payload), (left.state or {}, right.state or {})):
            assert list(mine) == list(other)
            assert_same(list(mine.values()), list(other.values()))


def test_every_method_has_serials_bits(pools: dict[int, Workers]) -> None:
    for method in distinct_methods():
        with about(method):
            expected = make_world(f"method={method}", m=3)
            models = expected.models(after := expected.run())
            for engine in pools.values():
                world = make_world(f"method={method}", m=3)
                assert_same(world.models(end := world.run(engine=engine)), models)
                assert sorted(end.clients) == sorted(after.clients)
                for client, memory in after.clients.items():
                    for name, tree in memory.items():
                        assert_same([end.clients[client][name]], [tree])


@dataclass(frozen=True)
class Chatty(Trainer):
    """A trainer that sends and stores unusual trees.

    A tree holds one tensor under two names, a transposed tensor, a 0-dimensional tensor
    and an empty tensor.
    """

    def init_state(self, start: Tree, received: Received) -> Trees:
        return {"seen": {"rounds": torch.zeros((), dtype=torch.int64)}}

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees]:
        first = next(iter(params.values())).detach()
        sent = {
            "a": first,
            "b": first,
            "t": first.clone().t(),
            "none": first[:0].clone(),
            "start": ctx.start.copy()["net.1.weight"],
        }
        return {"sent": sent}, {"seen": {"rounds": ctx.state["seen"]["rounds"] + 1}}


@pytest.mark.parametrize("workers", [1, 2])
def test_payloads_memories_and_buffers_travel(pools: dict[int, Workers], workers: int) -> None:
    model = {"_target_": "tests.engines.test_workers.WithBuffers"}
    world = make_world("method=fedavg", model=model)
    jobs = [
        replace(job, trainer=Chatty(), state=Chatty().init_state({}, Received({}, {})))
        for job in jobs_of(world)
    ]
    expected = list(Serial().map(jobs, world.data))
    for order in (jobs, jobs[::-1], jobs * 5):
        got = list(pools[workers].map(order, world.data))
        assert_equal(got, list(Serial().map(order, world.data)))
    sent = got[0].payload["sent"]
    assert sent["a"] is sent["b"]
    assert sent["t"].stride() == expected[0].payload["sent"]["t"].stride()


class WithBuffers(torch.nn.Module):
    """A model with BatchNorm between two layers. It has float and integer buffers."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        size = int(torch.tensor(input_shape).prod())
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(size, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.Linear(6, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_results_do_not_change_when_the_memory_is_used_again(pools: dict[int, Workers]) -> None:
    world = make_world("method=scaffold")
    jobs = jobs_of(world)
    first = list(pools[2].map(jobs, world.data))
    list(pools[2].map([replace(job, seed=job.seed + 1) for job in jobs * 3], world.data))
    assert_equal(first, list(Serial().map(jobs, world.data)))


def test_the_training_data_lie_in_memory_once() -> None:
    world = make_world("method=fedavg")
    before, was = world.data.train.x.clone(), world.data.train.x.data_ptr()
    engine = opened(2)
    list(engine.map(jobs_of(world), world.data))
    # The tensor itself has moved into shared memory.
    assert world.data.train.x.data_ptr() != was
    engine.close()
    assert torch.equal(world.data.train.x, before)


def test_other_data_are_sent(pools: dict[int, Workers]) -> None:
    for seed in (1, 2):
        world = make_world("method=fedavg", data=make_data(seed=seed))
        jobs = jobs_of(world)
        assert_equal(list(pools[2].map(jobs, world.data)), list(Serial().map(jobs, world.data)))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_early_close_leaves_the_engine_usable(pools: dict[int, Workers], workers: int) -> None:
    world = make_world("method=fedavg", "local.epochs=20")
    jobs = jobs_of(world) * 3
    expected = list(Serial().map(jobs, world.data))
    for taken in (0, 1, 5):
        stream = pools[workers].map(jobs, world.data)
        assert_equal([next(stream) for _ in range(taken)], expected[:taken])
        stream.close()
        assert_equal(list(pools[workers].map(jobs, world.data)), expected)


@dataclass(frozen=True)
class Fails(Trainer):
    """A trainer that raises an error for one client after its training."""

    size: int = 0

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, None]:
        if ctx.num_steps == self.size:
            raise KeyError("no such thing")
        return {}, None


def test_errors_are_serials(pools: dict[int, Workers]) -> None:
    empty = make_world("method=fedavg", data=make_data((10, 0, 7, 5)))
    jobs = [empty.env.job(client, empty.env.initial_weights(), {}) for client in range(4)]
    failing = make_world("method=fedavg", "local.batch_size=1", "local.epochs=1")
    broken = [replace(job, trainer=Fails(17)) for job in jobs_of(failing)]
    for world, work, before in ((empty, jobs, 1), (failing, broken, 2)):
        stream = Serial().map(work, world.data)
        expected = [next(stream) for _ in range(before)]
        with pytest.raises(ClientError) as serial:
            next(stream)
        for engine in pools.values():
            mine = engine.map(work, world.data)
            assert_equal([next(mine) for _ in range(before)], expected)
            with pytest.raises(ClientError) as caught:
                next(mine)
            assert str(caught.value) == str(serial.value)
            assert "Traceback" in str(caught.value.__cause__) and "train_client" in str(
                caught.value.__cause__
            )


@dataclass(frozen=True)
class Draws(Trainer):
    """A trainer that draws from the global generator of its process."""

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, None]:
        torch.rand(1)
        return {}, None


def test_a_draw_from_a_workers_global_generator_is_refused(pools: dict[int, Workers]) -> None:
    world = make_world("method=fedavg")
    jobs = [replace(job, trainer=Draws()) for job in jobs_of(world)]
    with pytest.raises(ClientError, match="trainer Draws draws from torch's global generator"):
        next(pools[2].map(jobs, world.data))


@dataclass(frozen=True)
class Dies(Trainer):
    """A trainer that kills its worker while it trains.

    Each kill creates a file in `folder`. After `times` files no worker is killed.
    """

    folder: str = ""
    times: int = 1
    steps: int = 0

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, None]:
        if ctx.num_steps == self.steps:
            for number in range(self.times):
                try:
                    (Path(self.folder) / str(number)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return {}, None


@pytest.mark.parametrize(("workers", "times"), [(1, 1), (2, 1), (2, 2)])
def test_a_killed_worker_costs_a_retry(
    pools: dict[int, Workers], tmp_path: Path, workers: int, times: int
) -> None:
    world = make_world("method=scaffold", "local.batch_size=1", "local.epochs=1")
    jobs = jobs_of(world) * 3
    expected = list(Serial().map([replace(job, trainer=Dies()) for job in jobs], world.data))
    engine = pools[workers]
    before = pids(engine, jobs, world.data)
    mortal = [replace(job, trainer=Dies(str(tmp_path), times, steps=17)) for job in jobs]
    with pytest.warns(UserWarning, match="a worker process died .SIGKILL"):
        assert_equal(list(engine.map(mortal, world.data)), expected)
    assert len(list(tmp_path.iterdir())) == times
    assert set(pids(engine, jobs, world.data)) != set(before)


@pytest.mark.filterwarnings(
    "ignore:a worker process died"
)  # reported only if the worker's next job was already on its way
@pytest.mark.parametrize("fork_server_too", [False, True])
def test_processes_killed_between_rounds_are_replaced(
    pools: dict[int, Workers], fork_server_too: bool
) -> None:
    world = make_world("method=fedavg")
    jobs = jobs_of(world)
    expected = list(pools[2].map(jobs, world.data))
    before = pids(pools[2], jobs, world.data)
    if fork_server_too:
        kill(parent_of(before[0]))
    for pid in before:
        kill(pid)
    for _ in range(2):
        assert_equal(list(pools[2].map(jobs, world.data)), expected)
    assert not set(before) & set(pids(pools[2], jobs, world.data))


def test_three_deaths_over_one_client_are_an_error(
    pools: dict[int, Workers], tmp_path: Path
) -> None:
    world = make_world("method=fedavg", "local.batch_size=1", "local.epochs=1")
    jobs = [replace(job, trainer=Dies(str(tmp_path), 9, steps=17)) for job in jobs_of(world)]
    with (
        pytest.warns(UserWarning),
        pytest.raises(ClientError, match="died 3 times while it trained client 2") as caught,
    ):
        list(pools[2].map(jobs, world.data))
    assert "SIGKILL" in str(caught.value) and "engine.workers=1" in str(caught.value)
    again = jobs_of(world)
    assert_equal(list(pools[2].map(again, world.data)), list(Serial().map(again, world.data)))


@dataclass
class Pairs(Engine):
    """An engine that takes jobs in pairs: the first with the last, and so on.

    It adds to each result the number of jobs in the call of `map`.
    """

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        last = len(jobs) - 1
        return [sorted({i, last - i}) for i in range((last + 2) // 2)]

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        for result in Serial().map(jobs, data):
            yield replace(result, metrics={**result.metrics, "together": len(jobs)})


def test_parts_of_the_inner_engine_stay_together() -> None:
    world = make_world("method=fedavg", data=make_data((5, 6, 7, 8, 9, 5, 6)))
    jobs = jobs_of(world)
    engine = opened(2, inner={"_target_": "tests.engines.test_workers.Pairs"})
    try:
        got = list(engine.map(jobs, world.data))
    finally:
        engine.close()
    assert [result.metrics["together"] for result in got] == [2, 2, 2, 1, 2, 2, 2]
    assert [result.client for result in got] == [job.client for job in jobs]


def test_choices_are_the_inner_engines() -> None:
    engine = Workers(workers=3, threads=2)
    world = make_world("method=fedavg")
    chosen = engine.choose(EngineContext(jobs_of(world), world.data, 3, 4, NUMERICS))
    assert describe(chosen) == describe(engine)
    assert isinstance(chosen.computing, Serial)
    assert (chosen.threads_each(8), chosen.threads_each(1)) == (2, 1)
    restored = Workers().restore(Serial(), threads=2, num_threads=4)
    assert describe(restored) == describe(Workers(threads=2))


def test_one_worker_runs_the_inner_engine_in_this_process() -> None:
    engine = Workers()
    engine.open(NUMERICS, 1)
    world = make_world("method=fedavg")
    jobs = [replace(job, probes=(Witness(),)) for job in jobs_of(world)]
    results = list(engine.map(jobs, world.data))
    assert {int(result.probes[Witness.name]["pid"]) for result in results} == {os.getpid()}
    assert_equal(results, list(Serial().map(jobs, world.data)))
    engine.close()


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="do not fit into the run's threads"):
        Workers(workers=3, threads=2).open(replace(NUMERICS, threads=2), 4)
    with pytest.raises(ValueError, match="workers must be"):
        Workers(workers=0)
    with pytest.raises(ValueError, match="must not be a workers engine"):
        Workers(inner={"_target_": "fedexp.engines.workers.Workers"})
    with pytest.raises(ConfigError, match="unknown key 'no_such_key'"):
        Workers(inner={"_target_": "fedexp.engines.serial.Serial", "no_such_key": 1})


def test_a_plugin_that_cannot_travel_is_told(pools: dict[int, Workers]) -> None:
    @dataclass(frozen=True)
    class Local(Trainer):
        """A trainer that is defined in a function."""

    world = make_world("method=fedavg")
    jobs = [replace(job, trainer=Local()) for job in jobs_of(world)]
    with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
        list(pools[2].map(jobs, world.data))


SCRIPT = """
import sys, time
from tests.engines.test_workers import jobs_of, opened, parent_of, pids
from tests.world import make_world

world = make_world("method=fedavg", "local.epochs=100000")
engine = opened(2)
if sys.argv[1] == "done":
    world = make_world("method=fedavg")
    print(len(list(engine.map(jobs_of(world), world.data))), flush=True)
    engine.close()
else:
    quick = make_world("method=fedavg", data=world.data)
    started = pids(engine, jobs_of(quick), world.data)
    print(*started, parent_of(started[0]), flush=True)
    list(engine.map(jobs_of(world), world.data))
"""


def run_script(mode: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "error", "-c", SCRIPT, mode]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_run(signum: int) -> None:
    """All worker processes end if the main process is killed during a round.

    The jobs of the round would take minutes.
    """
    process = run_script("busy")
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 3, process.communicate()
    time.sleep(0.1)
    process.send_signal(signum)
    process.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stream_that_outlives_its_engine_writes_to_no_file(tmp_path: Path) -> None:
    """A stream that is closed after its engine writes to no other file.

    This can happen if the traceback of an error holds the stream. By then, other files
    have the file descriptors of the engine's closed memory.
    """
    world = make_world("method=fedavg", data=make_data((12, 12, 12)))
    others = shared_memory_files()
    engine = opened(1)
    stream = engine.map(jobs_of(world), world.data)
    next(stream)
    mine = {*shared_memory_files()} - {*others}
    engine.close()
    # The training data stay in shared memory
    closed = mine - {*shared_memory_files()}
    assert closed
    with contextlib.ExitStack() as files:
        written = []
        while not written or written[-1].fileno() < max(closed):
            path = tmp_path / str(len(written))
            written.append(files.enter_context(path.open("wb", buffering=0)))
            written[-1].write(b"x" * 64)
        assert closed <= {file.fileno() for file in written}
        stream.close()
        assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"x" * 64}
    engine.close()


def test_a_closed_engine_leaves_nothing_and_says_nothing() -> None:
    process = run_script("done")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "4\n", "")


def test_a_worker_says_why_it_does_not_stack() -> None:
    """A worker reports why it does not stack clients.

    A reason that is found during training arrives with the results. A reason that the
    job itself shows is reported when the jobs are split.
    """
    from tests.engines.test_vectorized import OwnGrad

    world = make_world("method=fedavg", data=make_data((12, 12, 12)))
    engine = opened(
        1, inner={"_target_": "fedexp.engines.vectorized.Vectorized", "stack": 3, "kernel": "vmap"}
    )
    said: list[str] = []
    engine.note = said.append
    try:
        for trainer, reason in (
            (OwnGrad(), "the trainer overrides `grad`"),
            (NoBatchingRule(), "cannot be vectorised"),
        ):
            list(engine.map([replace(job, trainer=trainer) for job in jobs_of(world)], world.data))
            assert said and all(reason in text for text in said)
            said.clear()
    finally:
        engine.close()


def test_the_start_method_of_the_caller_does_not_matter() -> None:
    """Workers start in a process whose start method new processes do not know.

    joblib's workers are such processes.
    """
    pytest.importorskip("joblib")
    from joblib.externals import loky

    assert "loky" in loky.backend.context.START_METHODS
    world = make_world("method=fedavg")
    engine = opened(1)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("loky", force=True)
    try:
        results = list(engine.map(jobs_of(world), world.data))
        assert multiprocessing.get_start_method() == "loky"
    finally:
        multiprocessing.set_start_method(before, force=True)
        engine.close()
    assert_equal(results, list(Serial().map(jobs_of(world), world.data)))


def test_an_interruption_waits_for_the_start_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose start was interrupted would print a traceback."""
    started = []
    whole = multiprocessing.context.ForkServerProcess.start

    def start(process: multiprocessing.context.ForkServerProcess) -> None:
        signal.raise_signal(signal.SIGINT)
        whole(process)
        started.append(process)

    world = make_world("method=fedavg")
    engine = opened(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(multiprocessing.context.ForkServerProcess, "start", start)
            list(engine.map(jobs_of(world), world.data))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.exitcode for process in started] == [-signal.SIGKILL]
    assert_equal(
        list(engine.map(jobs_of(world), world.data)), list(Serial().map(jobs_of(world), world.data))
    )
    engine.close()
