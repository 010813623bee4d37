"""Short timings of engines on the first jobs of a run.

The timings are used on CUDA. On a CPU nothing is timed (see `fedexp.engines.rule`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fedexp.core.data import FederatedData
from fedexp.core.device import synchronise
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob

_SECONDS = 0.4  # seconds for one candidate
_REPEATS = 5
# Maximum number of local steps of a client. With this number, most of the client's time
# is spent on steps, not on preparation.
_STEPS = 8


def shortened_jobs(jobs: Sequence[ClientJob], steps: int) -> list[ClientJob]:
    """Return copies of `jobs` with at most `steps` local steps and without probes."""
    most = [min(steps, job.local_training.max_steps or steps) for job in jobs]
    return [
        replace(job, local_training=replace(job.local_training, max_steps=n), probes=())
        for job, n in zip(jobs, most, strict=True)
    ]


def seconds_per_step(engine: Engine, jobs: Sequence[ClientJob], data: FederatedData) -> float:
    """Return the seconds per local step in the fastest of a few passes over `jobs`.

    A pass runs shortened copies of all jobs. The first pass does not count, because it
    builds networks.
    """
    first = shortened_jobs(jobs, 1)
    _seconds(engine, first, data)
    one = _seconds(engine, first, data)
    if one * len(jobs) > _SECONDS:
        return one

    jobs = shortened_jobs(jobs, _STEPS)
    times = [one]
    end = time.perf_counter() + _SECONDS
    while len(times) <= _REPEATS and time.perf_counter() <= end:
        times.append(_seconds(engine, jobs, data))

    return min(times)


def _seconds(engine: Engine, jobs: Sequence[ClientJob], data: FederatedData) -> float:
    began = time.perf_counter()
    taken = sum(result.num_steps for result in engine.map(jobs, data))
    synchronise(data.train.x.device)
    return (time.perf_counter() - began) / max(1, taken)
