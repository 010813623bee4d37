"""The peak memory of a run in bytes.

The peak is measured while the run computes. Before the first round, the peak is only
estimated. If the estimate is more than half of the free memory, `probe_memory` measures
the peak of two local steps and one evaluation batch.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedexp.core.data import FederatedData
from fedexp.core.device import device_peak, free_device_memory, reset_device_peak
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import largest_batch
from fedexp.core.outcome import Outcome
from fedexp.core.task import Task
from fedexp.core.trees import num_bytes
from fedexp.engines.timing import shortened_jobs
from fedexp.evaluation.evaluate import Evaluator
from fedexp.tracking.terminal import memory_text

Peak = dict[str, int]

# Number of local steps of a probe. The second step may need more memory, because the
# first one leaves memory allocated.
_STEPS = 2
# Size of the activations that are stored for the backward pass, as a multiple of the
# input's size. 400 is the value of ResNet-18 on 32x32 pixels. For small CNNs it is 90.
_ACTIVATIONS = 400
# If the estimate exceeds this share of the free memory, the peak is measured. The share
# is low because the estimate is rough.
_NEAR = 0.5


def reset_peak(device: torch.device) -> None:
    """Reset the peaks, so that each run of a process reports its own peak."""
    # This file exists only on Linux, and writing it may not be permitted. The RAM peak
    # is then measured from the start of the process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    reset_device_peak(device)


def peak_memory(device: torch.device) -> Peak:
    """Return the peak memory so far.

    Returns:
        ``ram`` is the sum of the peaks of this process and its living descendant
        processes. Memory that a descendant shares is counted once. The processes may
        reach their peaks at different times. ``gpu``, on CUDA and XPU only, is the most
        memory that tensors of this process occupied.
    """
    peak = {"ram": _ram()}
    gpu = device_peak(device)
    return peak if gpu is None else {**peak, "gpu": gpu}


def largest(a: Peak, b: Peak) -> Peak:
    """Return the larger peak of each kind of memory."""
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}


def is_near_limit(
    jobs: Sequence[ClientJob], data: FederatedData, engine: Engine, eval_batch: int
) -> bool:
    """Return whether `jobs` may need more than half of the free memory.

    The free memory is that of the device on which the data are stored.
    """
    return bool(jobs) and (
        estimate(jobs, data, engine.jobs_at_once, eval_batch)
        > _NEAR * free_memory(data.train.x.device)
    )


def estimate(jobs: Sequence[ClientJob], data: FederatedData, at_once: int, eval_batch: int) -> int:
    """Estimate the bytes that a round allocates after the data have been loaded.

    The estimate is ``d + p (c + 4 s) + a max(s b, e / 4)``. Sizes are in bytes:

    - d: size of the training inputs, because worker processes may hold a copy of them
    - p: size of the largest model plus the largest state of a client
    - c: number of jobs of the round, because all results may be in memory at once
    - s: number of clients that train at once. Each client needs 4 p, for weights,
      gradients and two buffers of an optimizer.
    - a: size of the activations of one sample, 400 times the size of its input
    - b, e: numbers of samples of the largest batches in training and evaluation. They
      are smaller than the configured batch sizes if there are fewer samples. Evaluation
      stores the activations of a few layers only, so e is divided by 4.
    """
    starts = {id(job.start): job.start for job in jobs}.values()
    states = {id(job.state): job.state or {} for job in jobs}.values()
    p = max(num_bytes(start.params | start.buffers) for start in starts)
    p += max(sum(map(num_bytes, state.values())) for state in states)
    x, s = data.train.x, min(at_once, len(jobs))
    a = _ACTIVATIONS * x[:1].numel() * data.train.dtype.itemsize
    b, e = largest_batch(jobs, data), min(eval_batch, max(len(data.train), len(data.test)))

    return x.nbytes + p * (len(jobs) + 4 * s) + a * max(s * b, e // 4)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate.

    On the CPU, a container or a Slurm job may have less memory than the machine. This
    limit is read from the Linux control groups of the process.
    """
    on_device = free_device_memory(device)
    if on_device is not None:
        return on_device
    free = _sizes(Path("/proc/meminfo")).get("MemAvailable")
    # Outside of Linux, the result is the whole memory of the machine.
    if free is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    with suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
        own = Path("/sys/fs/cgroup", group)
        for folder in (own, *own.parents[:-3]):
            # A control group may have no limit, or its limit may not be readable.
            with suppress(OSError, ValueError):
                limit, taken = (
                    int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
                )
                free = min(free, limit - taken)

    return free


def probe_memory(
    jobs: Sequence[ClientJob], data: FederatedData, engine: Engine, task: Task, eval_batch: int
) -> dict[str, Any]:
    """Measure the peak memory of the heaviest parts of the next round.

    The clients with the most samples take two local steps each. Their number is the
    number of clients that train at once. Then the start model of the largest client is
    evaluated on one test batch. The results are discarded. Memory of Ray's workers is
    not counted.

    Returns:
        ``ram`` and ``gpu`` (see `peak_memory`), the ``clients`` that trained, the
        number of ``steps`` of each, and a ``text`` for the user.
    """
    tried = sorted(jobs, key=lambda job: -data.partition.size(job.client))[: engine.jobs_at_once]
    steps = max(result.num_steps for result in engine.map(shortened_jobs(tried, _STEPS), data))
    part = replace(data.test, x=data.test.x[:eval_batch], y=data.test.y[:eval_batch])
    Evaluator(task, eval_batch)(Outcome((tried[0].start,), "global"), part, "test")
    peak = peak_memory(data.train.x.device)
    what = (
        f"{steps} steps of the {len(tried)} largest of round {jobs[0].round + 1}'s "
        f"{len(jobs)} jobs, one evaluation batch"
    )
    text = f"memory may run short: peak memory {memory_text(peak)} (measured: {what})"

    return {**peak, "clients": [job.client for job in tried], "steps": steps, "text": text}


def _ram() -> int:
    own = _sizes(Path("/proc/self/status"))
    # Without /proc, `getrusage` returns the peak, in bytes on macOS and otherwise in
    # kB.
    if "VmHWM" not in own:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    total = own["VmHWM"]
    for child in descendants(str(os.getpid())):
        # The status is empty if the process has ended.
        status = _sizes(Path(f"/proc/{child}/status"))
        # Libraries and data that the child shares with this process are counted once.
        shared = status.get("RssFile", 0) + status.get("RssShmem", 0)
        total += max(0, status.get("VmHWM", 0) - shared)

    return total


def _sizes(file: Path) -> Peak:
    """Return the sizes in a file with lines ``name: number kB``, in bytes.

    The result is empty if the file is absent.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines if line.endswith(" kB"))
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in split}


def descendants(pid: str) -> Iterator[str]:
    """Yield the IDs of the processes that `pid` started, and of their descendants."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # Reading fails if the process has ended.
        with suppress(OSError):
            for child in task.read_text().split():
                yield child
                yield from descendants(child)
