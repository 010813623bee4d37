"""Tests of the choice of an engine.

On a CPU a rule chooses the engine. On CUDA timings choose it. A run keeps its engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, EngineContext, describe
from fedexp.core.jobs import ClientJob
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Trainer
from fedexp.core.trees import Tree
from fedexp.engines import vectorized
from fedexp.engines.auto import Auto
from fedexp.engines.rule import Workload
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers
from fedexp.running.execute import execute
from fedexp.running.run_engine import RunEngine
from fedexp.storage.files import read_json
from tests.world import MLP, make_data, make_world

CONV = {"_target_": "tests.core.test_kernel.Small"}
SIZES = (12, 30, 12, 5, 12, 12)
NUMERICS = Numerics({}, 1, "cpu", "float64")
CUDA = replace(NUMERICS, device="cuda")  # the tests compute on the CPU all the same
LONG = 10**9  # number of rounds
Seconds = Callable[[Engine], float]


def engine_context(
    *overrides: str,
    rounds: int = 3,
    threads: int = 1,
    numerics: Numerics = NUMERICS,
    sizes: tuple[int, ...] = SIZES,
    model: dict[str, Any] = MLP,
) -> EngineContext:
    w = make_world(*overrides, data=make_data(sizes), model=model)
    jobs = next_jobs(w.aggregator, w.env, Snapshot(0, w.aggregator.init(w.env)))
    return EngineContext(jobs, w.data, rounds, threads, numerics)


def noted(made: EngineContext) -> tuple[EngineContext, list[str]]:
    notes: list[str] = []
    return replace(made, note=notes.append), notes


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], None]:
    """Return a function that replaces the timings by a function of the engine.

    The engine trains all the same.
    """

    def answer(by: Seconds) -> None:
        def seconds_per_step(
            engine: Engine, jobs: Sequence[ClientJob], data: FederatedData
        ) -> float:
            list(engine.map(jobs, data))
            return by(engine)

        monkeypatch.setattr(vectorized, "seconds_per_step", seconds_per_step)

    return answer


@pytest.fixture
def untimed(seconds: Callable[[Seconds], None]) -> None:
    def refuse(engine: Engine) -> float:
        raise AssertionError("timed")

    seconds(refuse)


# ---------------------------------------------------------------- the rule

MIB = 1 << 20
W3 = Workload(
    jobs=10,
    most_stacked=100,
    parameters=1_663_370,
    bytes=6_653_480,
    steps=10_000,
    batch_size=10,
    threads=2,
)


@pytest.mark.parametrize(
    "size", [1, 636_040, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 20 * MIB, 20 * MIB + 1, 45 * MIB]
)
@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_stack_is_as_large_as_the_cache_and_32_and_the_processes_allow(
    size: int, most: int
) -> None:
    workload = replace(W3, bytes=size, most_stacked=most)
    allowed = [
        count
        for count in range(1, 33)
        if count <= most and (count == 1 or count * size <= 20 * MIB)
    ]
    assert workload.stack_size == max(allowed)
    assert {replace(workload, jobs=n, steps=n, threads=n).stack_size for n in (1, 5, 100)} == {
        workload.stack_size
    }


@pytest.mark.parametrize(
    ("change", "repays"),
    [
        ({}, True),
        ({"threads": 16}, True),
        ({"threads": 1}, False),
        ({"jobs": 2}, True),
        ({"jobs": 1}, False),
        ({"steps": 100}, False),
        ({"parameters": 1000, "steps": 3_000}, False),  # only the steps take time
        ({"parameters": 1000, "steps": 4_000}, True),
        ({"batch_size": 1000, "steps": 10}, True),
        ({"parameters": 11_173_962}, False),
    ],
)
def test_workers_repay_their_start(change: dict[str, int], repays: bool) -> None:
    assert replace(W3, **change).repays_workers is repays


def test_what_the_rule_looks_at() -> None:
    """The workload contains the numbers that the rule uses.

    A client takes ceil(n / 8) steps per epoch. The steps of all rounds count. The model
    is an MLP with 4 inputs, 8 hidden units and 3 classes.
    """
    workload = Workload.of(engine_context("method=scaffold", "local.epochs=2", rounds=5, threads=4))
    parameters = 4 * 8 + 8 + 8 * 3 + 3
    steps = 5 * 2 * sum(-(-n // 8) for n in SIZES)
    assert workload == Workload(
        6, EngineContext.most_stacked, parameters, 8 * parameters, steps, 8, 4
    )


def test_full_batches_count_the_samples_of_the_largest_client() -> None:
    workload = Workload.of(engine_context("local.batch_size=1000000"))
    assert workload.batch_size == max(SIZES)
    assert not workload.is_long


CHAIN, WORKERS, ALONE = Vectorized(32, "linear"), Workers(), Serial()


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, CHAIN),
        ({"threads": 16, "rounds": LONG}, CHAIN),
        ({"overrides": ["method=scaffold"], "threads": 2, "rounds": LONG}, CHAIN),
        ({"sizes": (20,), "threads": 2}, CHAIN),
        ({"overrides": ["method=centralized"], "threads": 2}, CHAIN),
        ({"model": CONV, "rounds": LONG}, ALONE),
        ({"model": CONV, "threads": 2}, ALONE),
        ({"model": CONV, "threads": 2, "rounds": LONG}, WORKERS),
        ({"model": CONV, "threads": 16, "rounds": LONG}, WORKERS),
        ({"model": CONV, "threads": 16, "rounds": LONG, "sizes": (20,)}, ALONE),
        ({"model": CONV, "threads": 2, "rounds": LONG, "overrides": ["method=centralized"]}, ALONE),
    ],
    ids=str,
)
def test_auto_on_a_cpu(untimed: None, made: dict[str, Any], expected: Engine) -> None:
    world = {key: value for key, value in made.items() if key != "overrides"}
    first, again = (
        Auto().choose(engine_context(*made.get("overrides", ()), **world)) for _ in range(2)
    )
    assert describe(first) == describe(again) == describe(expected)
    assert first.threads_each(made.get("threads", 1)) == (
        1 if expected is WORKERS else made.get("threads", 1)
    )


def test_vectorized_alone_stacks_chains_only_on_a_cpu(untimed: None) -> None:
    assert describe(Vectorized().choose(engine_context(rounds=LONG))) == describe(CHAIN)
    assert describe(Vectorized().choose(engine_context(rounds=LONG, model=CONV))) == describe(ALONE)
    nothing = replace(engine_context(), jobs=[])
    assert (
        describe(Vectorized().choose(nothing))
        == describe(Auto().choose(nothing))
        == describe(ALONE)
    )


@pytest.mark.parametrize("numerics", [NUMERICS, CUDA], ids=["cpu", "cuda"])
def test_what_the_user_says_is_kept(untimed: None, numerics: Numerics) -> None:
    for engine in (Vectorized(3), Vectorized(3, "vmap"), Vectorized(3, "linear")):
        assert engine.choose(engine_context(model=CONV, rounds=LONG, numerics=numerics)) is engine
    chosen = Vectorized(kernel="vmap").choose(engine_context(numerics=numerics))
    assert describe(chosen) == describe(Vectorized(32, "vmap"))
    made, notes = noted(engine_context(model=CONV, numerics=numerics))
    assert describe(Vectorized(kernel="linear").choose(made)) == describe(ALONE)
    assert "one after the other" in notes[0]


def test_unequal_clients_with_states_are_one_stack(untimed: None) -> None:
    made = engine_context("method=scaffold")
    engine = Auto().choose(made)
    assert engine.split(made.jobs, made.data) == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("threads", "stack"), [(1, 32), (2, 3), (4, 2), (16, 1)])
def test_every_worker_gets_a_stack(untimed: None, threads: int, stack: int) -> None:
    engine = Workers(inner=describe(Vectorized())).choose(engine_context(threads=threads))
    assert describe(engine.computing) == describe(Vectorized(stack, "linear"))


# ---------------------------------------------------------------- CUDA


def test_short_runs_on_cuda_are_not_timed(untimed: None) -> None:
    assert describe(Auto().choose(engine_context(threads=2, numerics=CUDA))) == describe(CHAIN)
    assert describe(
        Auto().choose(engine_context(threads=2, numerics=CUDA, model=CONV))
    ) == describe(Vectorized(32, "vmap"))


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (("linear", 3), Vectorized(3, "linear")),
        (("vmap", 2), Vectorized(2, "vmap")),
        (("linear", 6), Vectorized(6, "linear")),
        (None, Serial()),
    ],
)
def test_the_fastest_stack_is_taken(
    seconds: Callable[[Seconds], None], best: Any, expected: Engine
) -> None:
    def by(engine: Engine) -> float:
        if isinstance(engine, Serial):
            return 1e-3
        assert isinstance(engine, Vectorized)
        # A gain of 3 % is too small to replace the serial engine.
        return 0.5e-3 if (engine.kernel, engine.stack) == best else 0.97e-3

    seconds(by)
    made, notes = noted(engine_context(rounds=LONG, numerics=CUDA, threads=2))
    assert describe(Auto().choose(made)) == describe(expected)
    assert "serial 1" in notes[0] and "linear 3" in notes[0] and "vmap 2" in notes[0]


def test_note_of_timing_without_stacks_names_the_serial_time_only(
    seconds: Callable[[Seconds], None],
) -> None:
    seconds(lambda engine: 1e-3)
    made, notes = noted(engine_context(sizes=(12,), rounds=LONG, numerics=CUDA))
    assert describe(Auto().choose(made)) == describe(Serial())
    assert notes == ["engine: timed milliseconds per local step: serial 1"]


@dataclass(frozen=True)
class Unstackable(Trainer):
    """A trainer with a loss that `torch.vmap` cannot vectorise."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return ctx.task.loss(net, params, buffers, batch, ctx) * (1 + 0 * float(batch.x.sum()))


def test_a_kernel_that_stacks_nothing_is_not_chosen(seconds: Callable[[Seconds], None]) -> None:
    seconds(lambda engine: 1e-3 if isinstance(engine, Serial) else 0.5e-3)
    made, notes = noted(engine_context(rounds=LONG, numerics=CUDA, model=CONV))
    assert describe(Auto().choose(made)) == describe(Vectorized(2, "vmap"))
    made = replace(made, jobs=[replace(job, trainer=Unstackable()) for job in made.jobs])
    assert describe(Auto().choose(made)) == describe(Serial())
    assert "vmap" not in notes[-1]


def test_a_slow_model_stays_serial(seconds: Callable[[Seconds], None]) -> None:
    seconds(lambda engine: 1.0)
    made, notes = noted(engine_context(rounds=LONG, numerics=CUDA))
    assert describe(Vectorized().choose(made)) == describe(Serial())
    assert "already takes 1 s" in notes[0]


# ---------------------------------------------------------------- the choice is kept


def test_a_resumed_run_gets_workers_where_its_processes_had_fewer_threads() -> None:
    computing = Vectorized(4, "linear")
    assert Auto().restore(computing, threads=2, num_threads=2) is computing
    spread = Auto().restore(computing, threads=1, num_threads=2)
    assert isinstance(spread, Workers) and describe(spread.computing) == describe(computing)


def test_a_run_that_ends_before_it_trains_has_its_numerics_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numerics of a run that ends before it trains are fixed.

    Steps that only the server takes may already have used them.
    """
    common = [
        "rounds=1",
        "clients=4",
        "limit.train=200",
        "limit.test=100",
        f"output_root={tmp_path}",
    ]

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunEngine, "_engine_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute(compose([*common, "threads=1"]), say=None)
    (stored,) = tmp_path.glob("runs/*/*/numerics.json")
    assert json.loads(stored.read_text())["threads"] == 1
    said: list[str] = []
    assert execute(compose([*common, "threads=2"]), say=said.append)["numerics"]["threads"] == 1
    assert any("numerics of the first launch" in text for text in said)


def test_the_choice_is_part_of_the_numerics_and_kept_on_resume(tmp_path: Path) -> None:
    """A run that began with a stacked engine continues with it after a resume.

    This holds whatever engine is requested on the resume.
    """
    common = [
        "rounds=2",
        "clients=4",
        "limit.train=200",
        "limit.test=100",
        "threads=1",
        f"output_root={tmp_path}",
    ]
    result = execute(compose(common), say=lambda text: None)
    assert result["numerics"]["engine"] == describe(CHAIN)
    assert result["stacked_share"] == 1.0
    folder = Path(result["folder"])
    before = (folder / "model.safetensors").read_bytes()
    for name in ("result.json", "model.safetensors", "checkpoint/manifest.json"):
        (folder / name).unlink()
    again = execute(
        compose([*common, "engine=serial", "memo.enabled=false"]), say=lambda text: None
    )
    assert again["folder"] == result["folder"] and again["numerics"] == result["numerics"]
    assert read_json(folder / "numerics.json") == result["numerics"]
    assert (folder / "model.safetensors").read_bytes() == before
