"""Which engine is chosen, when it is timed, and that the choice is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.core.engine import Engine, Trial, describe
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines import auto, vectorized
from fedexp.engines.auto import Auto
from fedexp.engines.choice import ChoiceStore
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers
from fedexp.running.execute import execute
from tests.world import make_data, make_world

CONV = {"_target_": "tests.core.test_kernel.Small"}
NUMERICS = Numerics({}, 1, "cpu", "float64")
Seconds = Callable[[Engine], float]


def trial(rounds: int = 3, threads: int = 1, method: str = "fedavg", **world: Any) -> Trial:
    w = make_world(f"method={method}", data=make_data((12,) * 6), **world)
    jobs = next_jobs(w.aggregator, w.env, Snapshot(0, w.aggregator.init(w.env)))
    return Trial(jobs, w.data, rounds, threads, NUMERICS)


def long(**kwargs: Any) -> Trial:
    """One whose choice is worth a timing."""
    return trial(rounds=10**9, **kwargs)


def told(made: Trial) -> tuple[Trial, list[str]]:
    notes: list[str] = []
    return replace(made, note=notes.append), notes


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], None]:
    """Answer timings by a function of the engine."""

    def answer(by: Seconds) -> None:
        monkeypatch.setattr(vectorized, "seconds_a_step", lambda engine, jobs, data: by(engine))
        monkeypatch.setattr(vectorized, "_attempt", lambda engine, jobs, data: by(engine))
        monkeypatch.setattr(auto, "seconds_a_step", lambda engine, jobs, data: by(engine))

    return answer


def test_short_runs_are_decided_by_rule_and_not_timed(seconds: Callable[[Seconds], None]) -> None:
    def refuse(engine: Engine) -> float:
        raise AssertionError("timed")

    seconds(refuse)
    for _ in range(2):
        assert describe(Auto().settle(trial(threads=2))) == describe(Vectorized(8, "linear"))
        assert describe(Auto().settle(trial(threads=2, model=CONV))) == describe(Serial())


def test_a_step_without_client_work_needs_no_engine() -> None:
    empty = replace(long(), jobs=[])
    assert describe(Vectorized().settle(empty)) == describe(Vectorized())


@pytest.mark.parametrize(
    ("best", "expected"),
    [(("linear", 4), Vectorized(4, "linear")), (("vmap", 2), Vectorized(2, "vmap")), (None, Serial())],
)
def test_the_fastest_stack_is_taken(seconds: Callable[[Seconds], None], best: Any, expected: Engine) -> None:
    def by(engine: Engine) -> float:
        if isinstance(engine, Serial):
            return 1e-3
        assert isinstance(engine, Vectorized)
        return 0.5e-3 if (engine.kernel, engine.stack) == best else 0.97e-3  # 3 % are no reason to leave serial

    seconds(by)
    made, notes = told(long())
    assert describe(Vectorized().settle(made)) == describe(expected)
    assert "serial 1" in notes[0] and "linear 4" in notes[0] and "vmap 2" in notes[0]


def test_a_slow_model_stays_serial(seconds: Callable[[Seconds], None]) -> None:
    seconds(lambda engine: 1.0)
    made, notes = told(long())
    assert describe(Vectorized().settle(made)) == describe(Serial())
    assert "already takes 1 s" in notes[0]


def test_a_stack_that_is_given_is_kept() -> None:
    assert describe(Vectorized(3, "vmap").settle(long())) == describe(Vectorized(3, "vmap"))


@pytest.mark.parametrize(("gain", "kind"), [(0.5, Workers), (0.98, Serial)])
def test_workers_are_taken_where_they_gain(
    seconds: Callable[[Seconds], None], monkeypatch: pytest.MonkeyPatch, gain: float, kind: type[Engine]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Workers, "open", lambda self, numerics, threads: calls.append(f"open {numerics.threads}"))
    monkeypatch.setattr(Workers, "close", lambda self: calls.append("close"))
    seconds(lambda engine: 0.1 * gain if isinstance(engine, Workers) else 0.1)
    made, notes = told(long(threads=2, model=CONV))
    chosen = Auto().settle(made)
    assert isinstance(chosen, kind)
    assert chosen.threads_each(2) == (1 if kind is Workers else 2)
    assert calls == (["open 1"] if kind is Workers else ["open 1", "close"])
    assert "in 2 workers" in notes[-1]


def test_a_resumed_run_gets_workers_where_its_processes_had_fewer_threads() -> None:
    computing = Vectorized(4, "linear")
    assert Auto().adopt(computing, threads=2, budget=2) is computing
    spread = Auto().adopt(computing, threads=1, budget=2)
    assert isinstance(spread, Workers) and describe(spread.computing) == describe(computing)


def test_a_timed_choice_is_kept_for_runs_alike(seconds: Callable[[Seconds], None], tmp_path: Path) -> None:
    seconds(lambda engine: 1e-3 if isinstance(engine, Serial) else 0.5e-3)
    first = describe(ChoiceStore(tmp_path, "code", False).settle(Vectorized(), long()))
    seconds(lambda engine: 1e-3)  # timed now, it would be serial
    made, notes = told(long())
    assert describe(ChoiceStore(tmp_path, "code", False).settle(Vectorized(), made)) == first
    assert "chosen by an earlier run" in notes[0]
    for other in (long(method="fedprox"), replace(long(), threads=2), replace(long(), rounds=10**10)):
        assert describe(ChoiceStore(tmp_path, "code", False).settle(Vectorized(), other)) == describe(Serial())
    assert describe(ChoiceStore(tmp_path, "other code", False).settle(Vectorized(), long())) == describe(Serial())
    assert describe(ChoiceStore(tmp_path, "code", True).settle(Vectorized(), long())) == describe(Serial())


def test_a_choice_by_rule_is_not_stored(tmp_path: Path) -> None:
    ChoiceStore(tmp_path, "code", False).settle(Auto(), trial())
    assert not list(tmp_path.glob("*.json"))


def test_the_choice_is_part_of_the_numerics_and_kept_on_resume(tmp_path: Path) -> None:
    """A run that began stacked goes on stacked, whatever engine is asked for then."""
    common = ["rounds=2", "clients=4", "limit.train=200", "limit.test=100", "threads=1", f"output_root={tmp_path}"]
    result = execute(compose(common), say=lambda text: None)
    assert result["numerics"]["engine"] == describe(Vectorized(8, "linear"))
    assert result["stacked_share"] == 1.0
    folder = Path(result["folder"])
    before = (folder / "model.safetensors").read_bytes()
    for name in ("result.json", "model.safetensors", "checkpoint/manifest.json"):
        (folder / name).unlink()
    again = execute(compose([*common, "engine=serial", "memo.enabled=false"]), say=lambda text: None)
    assert again["folder"] == result["folder"] and again["numerics"] == result["numerics"]
    assert json.loads((folder / "numerics.json").read_text()) == result["numerics"]
    assert (folder / "model.safetensors").read_bytes() == before
