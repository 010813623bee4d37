"""Tests of a sweep job's share of cores and GPUs."""

from __future__ import annotations

import pytest

from fedexp.config.compose import compose
from fedexp.config.keys import Config
from fedexp.running.experiment import choose_numerics
from fedexp.runtime.resources import available_cores, concurrent_jobs, gpu_of, worker_number

LOCAL = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}
SLURM = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"}
RAY = {"_target_": "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"}
BASIC = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}


@pytest.mark.parametrize(("launcher", "jobs", "expected"), [
    (BASIC, 9, 1), (SLURM, 9, 1), (RAY, 9, 1), (LOCAL, 9, 9), ({"n_jobs": 4}, 9, 4), ({"n_jobs": 4}, 3, 3),
    ({"n_jobs": -1}, 99, 8), ({"n_jobs": -2}, 99, 7), ({"n_jobs": -99}, 99, 1), ({"n_jobs": None}, 9, 1),
])  # fmt: skip
def test_jobs_that_share_eight_cores(launcher: dict[str, object], jobs: int, expected: int) -> None:
    assert concurrent_jobs(launcher, jobs, 8) == expected


def test_a_job_gets_its_share_of_the_cores_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.of(compose([]))
    monkeypatch.delenv("OMP_NUM_THREADS")
    # Slurm assigns cores in this way.
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12))
    assert available_cores() == 12
    for jobs, threads in ((1, 12), (4, 3), (5, 2), (99, 1)):
        monkeypatch.setenv("FEDEXP_CONCURRENT_JOBS", str(jobs))
        assert choose_numerics(config).threads == threads


def test_workers_take_gpus_in_turn() -> None:
    assert [gpu_of(worker, None, 3) for worker in range(5)] == ["0", "1", "2", "0", "1"]
    # The sweep may use only these GPUs.
    assert [gpu_of(worker, "2,7", 2) for worker in range(3)] == ["2", "7", "2"]
    assert gpu_of(1, "GPU-a,GPU-b", 2) == "GPU-b"


def test_joblibs_workers_are_numbered_others_go_by_job() -> None:
    assert [worker_number(f"LokyProcess-{n}", 9) for n in (1, 2, 12)] == [0, 1, 11]
    assert worker_number("MainProcess", 9) == 9
