"""Peak memory of a run, in bytes: measured; estimated only to see whether measuring ahead is worth two steps."""

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
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob
from fedexp.core.outcome import Outcome
from fedexp.core.task import Task
from fedexp.core.trees import num_bytes
from fedexp.engines.timing import shortened
from fedexp.evaluation.evaluate import Evaluator
from fedexp.tracking.terminal import memory_text

Peak = dict[str, int]

_STEPS = 2  # the second runs beside what the first left behind
# Times an input's size, kept for the backward pass: ResNet-18's on 32x32 pixels; a small CNN's are 90 times.
_ACTIVATIONS = 400
_NEAR = 0.5  # of what is free: an estimate is a rough one


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


def is_near_limit(
    jobs: Sequence[ClientJob], data: FederatedData, engine: Engine, eval_batch: int
) -> bool:
    """Whether a round of such jobs might come near the end of the memory of the data's device."""
    free = free_memory(data.train.x.device)
    return bool(jobs) and estimate(jobs, data, engine.jobs_at_once, eval_batch) > _NEAR * free


def estimate(jobs: Sequence[ClientJob], data: FederatedData, at_once: int, eval_batch: int) -> int:
    """Bytes, roughly, that a round takes once the data are loaded: ``d + p (c + 4 s) + a max(s b, e / 4)``.

    d: the training data, which worker processes hold once more. p: the largest client's model and state; c: the round's jobs,
    of which every result may wait; s: clients that train at once, each with weights, gradients and two buffers of an optimizer.
    a: a sample's activations, 400 times its input (evaluation keeps a few layers' alone); b, e: batch sizes.
    """
    starts = {id(job.start): job.start for job in jobs}.values()
    states = {id(job.state): job.state or {} for job in jobs}.values()
    p = max(num_bytes(start.params | start.buffers) for start in starts)
    p += max(sum(map(num_bytes, state.values())) for state in states)
    x, s = data.train.x, min(at_once, len(jobs))
    a = _ACTIVATIONS * x[:1].numel() * data.train.dtype.itemsize
    batch = max(job.local_training.batch_size for job in jobs)
    return x.nbytes + p * (len(jobs) + 4 * s) + a * max(s * batch, eval_batch // 4)


def free_memory(device: torch.device) -> int:
    """What this process may still take: of the GPU, or of the machine and its control group (a container's, a Slurm job's)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = _sizes(Path("/proc/meminfo")).get("MemAvailable")
    if free is None:  # not Linux: the whole of it
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()[0]
        own = Path("/sys/fs/cgroup", group)
        for folder in (own, *own.parents[:-3]):
            with suppress(OSError, ValueError):  # no limit, or none to be read
                limit, taken = (
                    int((folder / f"memory.{name}").read_text()) for name in ("max", "current")
                )
                free = min(free, limit - taken)
    return free


def probe_memory(
    jobs: Sequence[ClientJob], data: FederatedData, engine: Engine, task: Task, eval_batch: int
) -> dict[str, Any]:
    """The peak after the heaviest pieces of the coming round were tried; their results are thrown away.

    As many of the round's largest clients as train at once take two steps each (Ray's are not counted), and the model that the
    largest starts from is evaluated on one test batch.

    Returns:
        ``ram``, ``gpu`` (see `peak_memory`), ``clients``, ``steps`` of each, and ``text`` for a person.
    """
    tried = sorted(jobs, key=lambda job: -data.partition.size(job.client))[: engine.jobs_at_once]
    steps = max(result.num_steps for result in engine.map(shortened(tried, _STEPS), data))
    part = replace(data.test, x=data.test.x[:eval_batch], y=data.test.y[:eval_batch])
    Evaluator(task, eval_batch)(Outcome((tried[0].start,), "global"), part, "test")
    peak = peak_memory(data.train.x.device)
    what = f"{steps} steps of the {len(tried)} largest of round {jobs[0].round + 1}'s {len(jobs)} jobs, one evaluation batch"
    text = f"memory may run short: peak memory {memory_text(peak)} (measured: {what})"
    return {**peak, "clients": [job.client for job in tried], "steps": steps, "text": text}


def _ram() -> int:
    own = _sizes(Path("/proc/self/status"))
    if "VmHWM" not in own:  # no /proc: macOS counts in bytes, others in kB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    total = own["VmHWM"]
    for child in descendants(str(os.getpid())):
        status = _sizes(Path(f"/proc/{child}/status"))  # nothing where it ended meanwhile
        shared = status.get("RssFile", 0) + status.get(
            "RssShmem", 0
        )  # libraries and data: this process has them, too
        total += max(0, status.get("VmHWM", 0) - shared)
    return total


def _sizes(file: Path) -> Peak:
    """Lines ``name: number kB``, in bytes; empty where there is no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    split = (line.split() for line in lines if line.endswith(" kB"))
    return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in split}


def descendants(pid: str) -> Iterator[str]:
    """Processes that `pid` started, theirs included."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ended meanwhile
            for child in task.read_text().split():
                yield child
                yield from descendants(child)
