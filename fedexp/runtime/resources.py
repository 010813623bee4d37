"""The share of a machine's cores and GPUs that one job of a sweep has."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping
from typing import Any, Literal


def concurrent_jobs(launcher: Mapping[str, Any], jobs: int, cores: int) -> int:
    """How many of a sweep's `jobs` share `cores` at a time.

    joblib runs ``n_jobs``, submitit_local starts all at once; Slurm and Ray give every job cores of its own, and Hydra's
    basic launcher runs one after the other.
    """
    if str(launcher.get("_target_", "")).endswith("submitit_launcher.LocalLauncher"):
        return jobs
    n_jobs = int(launcher.get("n_jobs") or 1)
    return max(1, min(jobs, cores + 1 + n_jobs if n_jobs < 0 else n_jobs))


def gpu_of(worker: int, visible: str | None, count: int) -> str:
    """The CUDA device of a launcher's worker, in the words of CUDA_VISIBLE_DEVICES: workers take them in turn.

    Args:
        worker: counted from 0; visible: CUDA_VISIBLE_DEVICES, where it is set; count: devices that torch sees.
    """
    devices = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
    return devices[worker % len(devices)]


def take_gpu(job: int) -> None:
    """In a worker of a launcher, before CUDA starts there: leave this process one of several GPUs.

    Args:
        job: number of the sweep's job, by which launchers whose workers have none (submitit) spread.
    """
    import torch

    count = torch.cuda.device_count()
    if count > 1 and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        worker = worker_number(multiprocessing.current_process().name, job)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(
            worker, os.environ.get("CUDA_VISIBLE_DEVICES"), count
        )


def worker_number(process: str, job: int) -> int:
    """From 0: joblib's workers are called LokyProcess-1, -2 ...; elsewhere the job's number."""
    numbered = re.fullmatch(r"LokyProcess-(\d+)", process)
    return int(numbered.group(1)) - 1 if numbered else job


def available_cores() -> int:
    """Cores that this process may use: a scheduler's allotment, where there is one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads_of_run(threads: Literal["auto"] | int) -> int:
    """Threads that all processes of a run share; `threads` is the config's."""
    if threads != "auto":
        return threads
    share = max(1, available_cores() // int(os.environ.get("FEDEXP_CONCURRENT_JOBS", "1")))
    return min(share, max(1, int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or share)))
