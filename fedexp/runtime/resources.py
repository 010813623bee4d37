"""The cores, threads and GPUs that one job of a sweep gets on a machine."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from fedexp.core.errors import ConfigError


def concurrent_jobs(launcher: Mapping[str, Any], jobs: int, cores: int) -> int:
    """Return how many jobs of a sweep run at the same time and share the cores.

    The number depends on Hydra's launcher:

    - joblib: ``n_jobs``, but at most `jobs`. A negative ``n_jobs`` counts down from the
      number of cores: -1 stands for all cores, -2 for one core fewer.
    - submitit_local: all jobs.
    - Slurm and Ray: 1, because every job gets its own cores.
    - Hydra's basic launcher: 1, because jobs run one after the other.

    Args:
        launcher: Config node of Hydra's launcher.
        jobs: Number of jobs of the sweep.
        cores: Number of cores that the jobs share.
    """
    if str(launcher.get("_target_", "")).endswith("submitit_launcher.LocalLauncher"):
        return jobs
    n_jobs = int(launcher.get("n_jobs") or 1)
    return max(1, min(jobs, cores + 1 + n_jobs if n_jobs < 0 else n_jobs))


def gpu_of(worker: int, visible: str | None, count: int) -> str:
    """Return the CUDA device for a worker process of Hydra's launcher.

    Worker i gets the device number i modulo the number of devices.

    Args:
        worker: Number of the worker, from 0.
        visible: Value of CUDA_VISIBLE_DEVICES, or None if it is not set.
        count: Number of devices that torch sees.

    Returns:
        The device as it is written in CUDA_VISIBLE_DEVICES.
    """
    devices = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
    return devices[worker % len(devices)]


def take_gpu(job: int) -> None:
    """Restrict this process to one of several GPUs.

    It is called in a worker process of Hydra's launcher, before the process uses CUDA.

    Args:
        job: Number of the job in the sweep. It selects the GPU if the launcher does not
            number its workers, as with submitit. Otherwise the worker's number does.
    """
    from fedexp.core.device import has_started_cuda, num_devices

    count = num_devices("cuda")
    if count > 1 and not has_started_cuda():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(
            worker_number(multiprocessing.current_process().name, job),
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            count,
        )


def worker_number(process: str, job: int) -> int:
    """Return the number of a worker process of Hydra's launcher, from 0.

    joblib's workers are called LokyProcess-1, LokyProcess-2 and so on. For a process
    with another name, the result is `job`.

    Args:
        process: Name of the worker process.
        job: Number of the job in the sweep, from 0.
    """
    numbered = re.fullmatch(r"LokyProcess-(\d+)", process)
    return int(numbered.group(1)) - 1 if numbered else job


def available_cores() -> int:
    """Return the number of cores that this process may use.

    If a scheduler restricts the process to some cores, only these cores count.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads_of_run(threads: Literal["auto"] | int) -> int:
    """Return the number of threads that all processes of a run share.

    With ``auto``, the available cores are divided among the jobs that run at the same
    time (``FEDEXP_CONCURRENT_JOBS``). ``OMP_NUM_THREADS`` is an upper bound.

    Args:
        threads: The config's ``threads``.

    Raises:
        ConfigError: ``OMP_NUM_THREADS`` does not begin with a number.
    """
    if threads != "auto":
        return threads
    share = max(1, available_cores() // int(os.environ.get("FEDEXP_CONCURRENT_JOBS", "1")))
    bound = os.environ.get("OMP_NUM_THREADS", "")
    try:
        return min(share, max(1, int(bound.partition(",")[0] or share)))
    except ValueError:
        raise ConfigError(
            "the number of threads is not known",
            where="OMP_NUM_THREADS",
            expected="a positive integer",
            got=bound,
            do="unset this environment variable, or set threads=N",
        ) from None
