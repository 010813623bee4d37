"""Peak memory of a run, in bytes: measured, never estimated."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedexp.core.data import POOLED, FederatedData
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob
from fedexp.core.outcome import Outcome
from fedexp.core.task import Task
from fedexp.core.weights import Weights
from fedexp.engines.timing import shortened
from fedexp.evaluation.evaluate import Evaluator
from fedexp.tracking.terminal import memory_text

Peak = dict[str, int]

_STEPS = 2  # the second runs beside what the first left behind


def reset_peak(device: torch.device) -> None:
    """Begin anew, so that a sweep's runs in one process do not report each other's peaks."""
    with suppress(OSError):  # not Linux, or not allowed: the process's peak since its start, then
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> Peak:
    """``ram``: the largest resident size of this process so far, and what each living child ever added to it;
    ``gpu``, on CUDA: the most that tensors of this process ever took. Peaks of several processes need not coincide."""
    peak = {"ram": _ram()}
    if device.type == "cuda":
        peak["gpu"] = torch.cuda.max_memory_allocated(device)
    return peak


def largest(a: Peak, b: Peak) -> Peak:
    return {kind: max(a.get(kind, 0), b.get(kind, 0)) for kind in {**a, **b}}


def probe_memory(
    jobs: list[ClientJob],
    data: FederatedData,
    engine: Engine,
    task: Task,
    model: Weights | None,
    eval_batch: int,
    device: torch.device,
) -> dict[str, Any]:
    """The peak after the heaviest pieces of the coming round were tried; their results are thrown away.

    Args:
        jobs: the round's; as many of its largest clients as train at once take two steps each (Ray's are not counted).
        model: evaluated on one test batch; by default the one that the largest client starts from.

    Returns:
        ``ram``, ``gpu`` (see `peak_memory`), ``clients``, ``steps`` of each, and ``text`` for a person.
    """
    tried = _largest_jobs(jobs, data, engine.jobs_at_once)
    steps = max((result.num_steps for result in engine.map(shortened(tried, _STEPS), data)), default=0)
    model = model or (tried[0].start if tried else None)
    if model is not None:
        part = replace(data.test, x=data.test.x[:eval_batch], y=data.test.y[:eval_batch])
        Evaluator(task, eval_batch)(Outcome((model,), "model"), part, "test")
    peak = peak_memory(device)
    clients = [job.client for job in tried]
    told = [_told(clients, steps, jobs[0].round + 1)] if tried else []
    told += ["one evaluation batch"] if model is not None else []
    text = f"peak memory {memory_text(peak)} (measured: {', and '.join(told) or 'after loading'})"
    return {**peak, "clients": clients, "steps": steps, "text": text}


def _told(clients: list[int], steps: int, round: int) -> str:
    work = f"{steps} step{'s' if steps != 1 else ''}"
    if clients == [POOLED]:
        return f"{work} on all clients' data"
    if len(clients) == 1:
        return f"{work} of client {clients[0]}, the largest of round {round}"
    return f"{work} of the {len(clients)} largest clients of round {round}"


def _largest_jobs(jobs: list[ClientJob], data: FederatedData, count: int) -> list[ClientJob]:
    """The `count` jobs of most samples, the largest first; of equal ones the first."""
    sizes = data.partition.sizes
    return sorted(jobs, key=lambda job: -int(sizes.sum() if job.client == POOLED else sizes[job.client]))[:count]


def _ram() -> int:
    own = _memory_of("self")
    if "VmHWM" not in own:  # no /proc: macOS counts in bytes, others in kB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = own["VmHWM"]
    for child in _descendants(str(os.getpid())):
        status = _memory_of(child)
        shared = status.get("RssFile", 0) + status.get("RssShmem", 0)  # libraries and data: this process has them, too
        total += max(0, status.get("VmHWM", 0) - shared)
    return total


def _memory_of(pid: str) -> Peak:
    """The sizes in ``/proc/<pid>/status``, in bytes; empty where there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines if line.endswith(" kB"))
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in split}


def _descendants(pid: str) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ended meanwhile
            for child in task.read_text().split():
                yield child
                yield from _descendants(child)
