"""Tests that steps and communication rounds are counted separately."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedexp.core.aggregator import State
from fedexp.core.data import FederatedData
from fedexp.core.env import Env
from fedexp.core.errors import FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, Step, run
from fedexp.core.seeds import seed_of
from fedexp.core.task import Metrics
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.running.steps import steps
from fedexp.storage.checkpoint import Checkpoint
from tests.reference.layerwise import FROZEN, STEPS, Layerwise
from tests.world import CPU, MLP, World, assert_same, make_world

TWO = {**MLP, "hidden": [5, 4]}


def world(*overrides: str, aggregator: Layerwise | None = None) -> World:
    made = make_world(
        "method=fedavg", "local.epochs=2", "local.lr_decay=0.5", *overrides, model=TWO, m=2
    )
    experiment = replace(made.experiment, aggregator=aggregator or Layerwise())
    return World(experiment, made.env, made.data)


class Seen(Serial):
    """An engine that records its jobs, in one list for each step that has jobs."""

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if jobs:
            self.asked = [*getattr(self, "asked", []), list(jobs)]
        yield from super().map(jobs, data)


def all_steps(of: World, engine: Serial, snapshot: Snapshot | None = None) -> list[Step]:
    return list(run(of.aggregator, of.env, engine, of.data, snapshot))


def test_sampling_and_decay_follow_the_round_and_seeds_the_step() -> None:
    one, engine = world(), Seen()
    done = all_steps(one, engine)
    assert [(s.round, s.ends_round, s.ends_run) for s in done] == [
        (r, step == STEPS - 1, r == 2 and step == STEPS - 1)
        for r in range(3)
        for step in range(STEPS)
    ]
    assert [s.after.step for s in done] == list(range(1, 10))
    for number, jobs in enumerate(engine.asked):
        round, again = divmod(number, 2)
        assert {(job.round, job.step) for job in jobs} == {(round, 2 * again)}
        assert [job.client for job in jobs] == one.env.at(round).sample()
        assert {job.local_training.lr for job in jobs} == {0.05 * 0.5**round}
        assert {job.local_training.epochs for job in jobs} == {1 if again else 2}
        names = [["client", round, job.client, *([2] if again else [])] for job in jobs]
        assert [job.seed for job in jobs] == [seed_of(one.env.seed, *name) for name in names]
        assert {job.first for job in jobs} == {number == 0}
    assert len({job.seed for jobs in engine.asked for job in jobs}) == 12


def test_a_grown_model_is_trained_on_and_what_is_frozen_stays() -> None:
    done = all_steps(world(), Serial())
    models = [step.after.state["weights"] for step in done]
    assert [len(m.params["hidden.0.bias"]) for m in models] == [5, 7, 7, 7, 9, 9, 9, 11, 11]
    for grown, retrained in ((models[1], models[2]), (models[7], models[8])):
        for name in FROZEN:
            assert torch.equal(grown.params[name], retrained.params[name])
        assert not torch.equal(grown.params["output.weight"], retrained.params["output.weight"])


def test_rows_say_round_and_step_and_only_rounds_are_evaluated() -> None:
    one = world("eval.every=2")
    start = Snapshot(0, one.aggregator.init(one.env))
    rows = [
        s.row
        for s in steps(one.experiment, one.env, one.data, Serial(), start, lambda done, of: None)
    ]
    assert [(row["round"], row["step"]) for row in rows] == [
        (r + 1, 3 * r + s + 1) for r in range(3) for s in range(3)
    ]
    evaluated = [row["step"] for row in rows if "test/global/acc" in row]
    assert evaluated == [6, 9]  # the last steps of round 2 and of the run
    assert ["train/loss" in row for row in rows] == [True, False, True] * 3
    assert rows[1]["layerwise/width"] == 7


def test_only_the_first_step_is_cached(tmp_path: Path) -> None:
    one, numerics = world(), Numerics({}, 1, "cpu", "float64")
    first = ClientCache(Serial(), tmp_path, 1.0, numerics, "code")
    plain = all_steps(one, first)
    again = ClientCache(Serial(), tmp_path, 1.0, numerics, "code")
    cached = all_steps(one, again)
    assert (first.hits, first.misses, again.hits, again.misses) == (0, 2, 2, 0)
    assert_same(
        [plain[-1].after.state["weights"].params], [cached[-1].after.state["weights"].params]
    )


@pytest.mark.parametrize("at", range(1, 9))
def test_resumes_after_any_step_to_the_same_bits(tmp_path: Path, at: int) -> None:
    one = world()
    whole = all_steps(one, Serial())
    Checkpoint(tmp_path, CPU).save(whole[at - 1].after, set(), 0)
    loaded = Checkpoint(tmp_path, CPU).load()
    assert loaded is not None
    rest = all_steps(one, Serial(), loaded[0])
    assert [s.metrics for s in rest] == [s.metrics for s in whole[at:]]
    assert_same([rest[-1].after.state["weights"].params], [whole[-1].after.state["weights"].params])


@dataclass(frozen=True)
class Stuck(Layerwise):
    def position(self, state: State, step: int) -> tuple[int, int]:
        return min(step, 1), 0


def test_positions_must_ascend() -> None:
    with pytest.raises(FedexpError, match="position does not ascend") as caught:
        all_steps(world(aggregator=Stuck()), Serial())
    assert caught.value.facts["where"] == "Stuck.position"
    assert caught.value.facts["got"] == "(1, 0)"


@dataclass(frozen=True)
class LongServerWork(Layerwise):
    """An aggregator whose round has twenty server steps, or fewer by the config."""

    def position(self, state: State, step: int) -> tuple[int, int]:
        return (0, step) if step < state["length"] else (1, 0)

    def init(self, env: Env) -> State:
        return {**super().init(env), "length": env.server_steps(20)}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return []

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        return state, {"at": env.step}


@pytest.mark.parametrize(("limit", "expected"), [("null", 20), ("3", 3), ("50", 20)])
def test_server_steps_are_limited_by_the_config(limit: str, expected: int) -> None:
    one = world("rounds=1", f"limit.server_steps={limit}", aggregator=LongServerWork())
    done: list[Any] = all_steps(one, Serial())
    assert [s.metrics for s in done] == [{"at": float(i)} for i in range(expected)]
    assert [s.ends_round for s in done] == [False] * (expected - 1) + [True]
