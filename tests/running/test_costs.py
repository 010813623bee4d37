"""Tests of the costs of a run: steps per second, memory before and after, phases."""

from __future__ import annotations

import gzip
import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.config.keys import StateMemory
from fedexp.core.jobs import ClientJob
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.running import execute as execute_module
from fedexp.running import peak_memory as peak_memory_module
from fedexp.running.costs import Meter, costs
from fedexp.running.execute import Interrupted, execute
from fedexp.running.experiment import choose_numerics
from fedexp.running.peak_memory import (
    estimate,
    free_memory,
    is_near_limit,
    largest,
    peak_memory,
    probe_memory,
    reset_peak,
)
from fedexp.storage.files import read_jsonl
from fedexp.storage.stored_run import find_runs
from tests.world import CPU, World, make_data, make_world

SMALL = [
    "rounds=3",
    "clients=4",
    "limit.train=200",
    "limit.test=100",
    "threads=1",
    "device=cpu",
    "engine=serial",
]


def run(folder: Path, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    told: list[str] = []
    result = execute(compose([*SMALL, f"output_root={folder}", *overrides]), say=told.append)
    return result, told


@pytest.fixture
def stored(tmp_path: Path) -> tuple[dict[str, Any], list[str]]:
    return run(tmp_path)


def test_every_result_says_what_it_cost(stored: tuple[dict[str, Any], list[str]]) -> None:
    result, _ = stored
    seconds, timing = result["seconds"], read_jsonl(Path(result["folder"]) / "timing.jsonl")
    phases = {"setup", "train", "aggregate", "evaluate", "checkpoint", "log", "curve"}
    assert set(seconds) == {*phases, "total"}
    assert seconds["total"] == pytest.approx(
        sum(s for phase, s in seconds.items() if phase != "total"), abs=0.01
    )
    assert sum(row["executed"] for row in timing) == result["local_steps"] > 0
    trained = sum(row["seconds"]["train"] for row in timing)
    assert result["steps_per_second"] == pytest.approx(result["local_steps"] / trained, abs=1e-3)
    assert result["stacked_share"] == 0.0
    assert result["peak_memory"]["ram"] >= timing[-1]["peak_memory"]["ram"] > 50e6


def test_work_from_the_memo_is_not_counted_as_executed(tmp_path: Path) -> None:
    first, _ = run(tmp_path, "rounds=1")
    second, _ = run(tmp_path, "rounds=1", "headline.rule=mean_last_10")
    assert second["local_steps"] == first["local_steps"]
    assert first["steps_per_second"] > 0
    assert second["steps_per_second"] is None
    assert read_jsonl(Path(second["folder"]) / "timing.jsonl")[0]["executed"] == 0


def test_costs_add_up_over_attempts_and_repeated_rounds_count_once() -> None:
    def row(round: int, train: float, executed: int, stacked: int, **more: Any) -> dict[str, Any]:
        return {
            "round": round,
            "step": round,
            "seconds": {"train": train, "log": 1.0},
            "executed": executed,
            "stacked": stacked,
            **more,
        }

    timing = [
        row(1, 9.0, 0, 0),
        row(2, 50.0, 10, 10, peak_memory={"ram": 7}),
        row(2, 2.0, 10, 4),
        row(3, 3.0, 10, 6),
    ]
    found = costs(timing, {"setup": 0.5, "log": 0.25}, {"ram": 5, "gpu": 1})
    assert found == {
        "seconds": {"setup": 0.5, "log": 3.25, "train": 14.0, "total": 17.75},
        "steps_per_second": 4.0,  # only rounds that executed steps
        "stacked_share": 0.5,
        "peak_memory": {"ram": 7, "gpu": 1},
    }
    assert costs([], {}, {"ram": 5})["steps_per_second"] is None


class Stacking(Serial):
    """An engine that reports all steps of a job but the first as stacked.

    It records the clients and the step limits of its jobs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []
        self.max_steps_seen: set[int | None] = set()
        self.stacked = 0

    @property
    def jobs_at_once(self) -> int:
        return 8

    @property
    def stacked_steps(self) -> int:
        return self.stacked

    def map(self, jobs: Any, data: Any) -> Any:
        self.given += [job.client for job in jobs]
        self.max_steps_seen |= {job.local_training.max_steps for job in jobs}
        for result in super().map(jobs, data):
            self.stacked += result.num_steps - 1
            yield result


def test_a_meter_counts_from_round_to_round_through_the_memo(tmp_path: Path) -> None:
    world = make_world()
    numerics = choose_numerics(world.experiment.config)
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    engine = Stacking()
    cache = ClientCache(engine, tmp_path, 1.0, numerics, "code")
    meter = Meter(cache)
    for asked, fresh in ((jobs[:1], jobs[:1]), (jobs, jobs[1:]), (jobs, [])):
        steps = {result.client: result.num_steps for result in cache.map(asked, world.data)}
        executed = [steps[job.client] for job in fresh]
        assert meter.step(sum(steps.values())) == {
            "executed": sum(executed),
            "stacked": sum(executed) - len(executed),
        }
    assert meter.step(0) == {"executed": 0, "stacked": 0}


# ---------------------------------------------------------------- memory


def test_peak_memory_is_a_high_water_mark_that_a_run_begins_anew() -> None:
    reset_peak(CPU)
    before = peak_memory(CPU)["ram"]
    # malloc might reuse memory of earlier tests, so the test uses mmap.
    with mmap.mmap(-1, 64_000_000) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert peak_memory(CPU)["ram"] >= before + 50e6
    reset_peak(CPU)
    assert peak_memory(CPU)["ram"] <= before + 30e6
    assert largest({"ram": 1, "gpu": 3}, {"ram": 2}) == {"ram": 2, "gpu": 3}


def test_peak_memory_includes_child_processes() -> None:
    import subprocess
    import sys

    reset_peak(CPU)
    before = peak_memory(CPU)["ram"]
    code = "x = bytearray(64_000_000); print('there', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        assert peak_memory(CPU)["ram"] >= before + 60e6
        child.communicate("\n")


def jobs_of(world: World) -> list[ClientJob]:
    return next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))


def probe(world: World, engine: Serial) -> dict[str, Any]:
    return probe_memory(jobs_of(world), world.data, engine, world.experiment.task, 8)


def test_the_probe_runs_the_largest_client_two_steps() -> None:
    sizes: list[int] = []

    class Watching(Serial):
        def map(self, jobs: Any, data: Any) -> Any:
            assert [job.client for job in jobs] == [2]
            for result in super().map(jobs, data):
                sizes.append(result.num_steps)
                yield result

    found = probe(make_world(data=make_data((20, 12, 57, 9))), Watching())
    assert sizes == [2]
    assert (found["clients"], found["steps"]) == ([2], 2)
    assert "2 steps of the 1 largest of round 1's 4 jobs, one evaluation batch" in found["text"]
    assert (
        probe(make_world("limit.steps=1", data=make_data((20, 12, 57, 9))), Serial())["steps"] == 1
    )


def test_an_engine_that_stacks_is_probed_with_a_stack() -> None:
    engine = Stacking()
    found = probe(make_world(), engine)
    assert engine.given == found["clients"] == [0, 2, 1, 3]  # ordered by size
    assert engine.max_steps_seen == {2}
    assert "2 steps of the 4 largest of round 1's 4 jobs" in found["text"]


@pytest.mark.parametrize(("overrides", "trees"), [(["method=fedavg"], 1), (["method=scaffold"], 2)])
def test_an_estimate_is_the_formulas(overrides: list[str], trees: int) -> None:
    """The estimate is ``d + p (c + 4 s) + a max(s b, e / 4)``.

    A client of SCAFFOLD keeps a tree that is as large as its model.
    """
    world = make_world(*overrides, "local.batch_size=8")
    d, p = world.data.train.x.nbytes, trees * 8 * (4 * 8 + 8 + 8 * 3 + 3)
    a = 400 * 4 * 8  # for 4 float64 inputs
    jobs = jobs_of(world)
    for at_once, s in ((1, 1), (3, 3), (32, 4)):
        for e in (4, 400):
            assert estimate(jobs, world.data, at_once, e) == d + p * (4 + 4 * s) + a * max(
                8 * s, min(e, 58) // 4
            )


def test_an_estimate_counts_no_more_samples_in_a_batch_than_there_are() -> None:
    estimates = []
    for batch_size in (20, 1_000_000):  # the largest client has 20 samples
        world = make_world("method=fedavg", f"local.batch_size={batch_size}")
        estimates.append(estimate(jobs_of(world), world.data, 3, 8))
    assert estimates[0] == estimates[1]


def test_half_of_the_free_memory_is_near_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    jobs = jobs_of(world)
    for engine in (Serial(), Stacking()):
        needed = estimate(jobs, world.data, engine.jobs_at_once, 8)
        for free, near in ((2 * needed, False), (2 * needed - 2, True)):
            monkeypatch.setattr(peak_memory_module, "free_memory", lambda device, free=free: free)
            assert is_near_limit(jobs, world.data, engine, 8) is near
    # Without jobs nothing is trained, because the models are stored ones.
    assert not is_near_limit([], world.data, Serial(), 8)


def test_free_memory_is_what_the_machine_and_the_control_group_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:   5000 kB\n",
        "proc/self/cgroup": "0::/slurm/job\n",
        "sys/fs/cgroup/slurm/job/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job/memory.current": "900000\n",
        "sys/fs/cgroup/slurm/memory.max": "4000000\n",
        "sys/fs/cgroup/slurm/memory.current": "1000000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        peak_memory_module, "Path", lambda first, *rest: Path(f"{tmp_path}{first}", *rest)
    )
    assert free_memory(CPU) == 3_000_000  # limit of the outer group
    (tmp_path / "sys/fs/cgroup/slurm/memory.max").write_text("9000000\n")
    assert free_memory(CPU) == 5000 * 1024  # limit of the machine
    (tmp_path / "proc/self/cgroup").unlink()
    assert free_memory(CPU) == 5000 * 1024
    (tmp_path / "proc/meminfo").unlink()
    assert free_memory(CPU) > 5000 * 1024  # unknown limits: all memory counts as free


def test_peak_memory_far_from_the_limit_is_not_probed(
    stored: tuple[dict[str, Any], list[str]],
) -> None:
    result, _ = stored
    assert result["memory_probe"] is None
    assert not (Path(result["folder"]) / "run.log").exists()  # there was no message


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedavg"],
        ["method=scaffold", "clients_per_round=2"],
        ["method=local"],
        ["method=centralized"],
    ],
)
def test_near_the_limit_the_probe_is_reported_and_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    plain, _ = run(tmp_path / "without", *overrides)
    monkeypatch.setattr(peak_memory_module, "free_memory", lambda device: 0)
    result, _ = run(tmp_path / "with", *overrides)
    assert result["memory_probe"]["text"].startswith("memory may run short: peak memory ")
    assert result["memory_probe"]["text"] in (Path(result["folder"]) / "run.log").read_text()
    assert result["memory_probe"]["ram"] > 50e6
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (Path(result["folder"]) / name).read_bytes() == (
            Path(plain["folder"]) / name
        ).read_bytes()


def test_an_interrupted_run_reports_the_costs_of_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedexp.tracking.progress import Progress

    show = Progress.step

    def stop(self: Progress, row: dict[str, Any], headline: str, ends_round: bool) -> None:
        show(self, row, headline, ends_round)
        if row["round"] == 2:
            raise Interrupted(15)

    monkeypatch.setattr(Progress, "step", stop)
    with pytest.raises(Interrupted):
        run(tmp_path, "deterministic=true", "checkpoint.every=1")
    monkeypatch.undo()
    monkeypatch.setattr(peak_memory_module, "free_memory", lambda device: 0)
    result, _ = run(tmp_path, "deterministic=true", "checkpoint.every=1")
    assert result["attempts"] == 2
    assert "the 1 largest of round 3's 4 jobs" in result["memory_probe"]["text"]
    assert result["numerics"]["deterministic"] is True
    timing = read_jsonl(Path(result["folder"]) / "timing.jsonl")
    assert {row["attempt"] for row in timing} == {1, 2}
    assert result["seconds"]["train"] == pytest.approx(
        sum(row["seconds"]["train"] for row in timing), abs=0.002
    )


def test_an_interrupted_run_is_listed_with_its_finished_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint before the interruption, the status counts the rounds too."""
    from fedexp.tracking.progress import Progress

    def stop(self: Progress, row: dict[str, Any], headline: str, within: int | None) -> None:
        if row["round"] == 2:
            raise Interrupted(15)

    monkeypatch.setattr(Progress, "step", stop)
    with pytest.raises(Interrupted):
        run(tmp_path)
    (stored,) = find_runs(tmp_path)
    assert stored.status == "interrupted" and stored.rounds == (2, 3)


# ---------------------------------------------------------------- profile


def test_a_profile_is_a_trace_with_the_phases_and_a_table(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "debug=profile", "checkpoint.every=1")
    report = result["profile"]
    trace = json.loads(gzip.decompress(Path(report["trace"]).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {
        f"fedexp: {name}" for name in ("train", "aggregate", "evaluate", "checkpoint", "log")
    } <= names
    assert "aten::addmm" in names
    assert Path(report["trace"]).parent == Path(result["folder"])
    assert {row["name"] for row in report["phases"]} == {
        "train",
        "aggregate",
        "evaluate",
        "checkpoint",
        "log",
    }
    assert sum(row["share"] for row in report["phases"]) == pytest.approx(1, abs=0.001)
    assert all(row["seconds"] > 0 for row in report["phases"])
    seconds = [row["seconds"] for row in report["phases"]]
    assert seconds == sorted(seconds, reverse=True)
    assert report["ops"]
    measured = sum(
        row["seconds"]["train"] for row in read_jsonl(Path(result["folder"]) / "timing.jsonl")
    )
    (train,) = [row["seconds"] for row in report["phases"] if row["name"] == "train"]
    # The phase includes the choice of the engine, which is part of the setup.
    assert train <= (measured + result["seconds"]["setup"]) * 1.05


def test_a_profile_trains_the_same_bits_at_an_address_of_its_own(tmp_path: Path) -> None:
    profiled, _ = run(tmp_path, "debug=profile")
    plain, _ = run(tmp_path, "limit.rounds=3", "limit.steps=50")
    assert profiled["folder"] != plain["folder"]
    assert "profile" not in plain
    for name in ("metrics.jsonl", "model.safetensors"):
        assert (Path(profiled["folder"]) / name).read_bytes() == (
            Path(plain["folder"]) / name
        ).read_bytes()


@pytest.mark.parametrize(
    ("setting", "memory", "gb"), [("auto", None, 1.0), ("auto", 80e9, 20.0), (0.5, 80e9, 0.5)]
)
def test_states_stay_on_a_quarter_of_the_free_memory(
    setting: Any, memory: float | None, gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "free_device_memory", lambda device: memory)
    assert execute_module._memory_gb(StateMemory(setting), CPU) == gb
