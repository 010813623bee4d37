"""A profile of a run: a trace for Perfetto or chrome://tracing, and the main costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from fedexp.core.data import FederatedData
from fedexp.core.device import profiler_activities
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.phases import PREFIX, phase
from fedexp.core.torch_private import ProfilerDevice
from fedexp.storage.files import write_json

_SHOWN = 5
PROFILE = "profile.json"


@contextmanager
def profiled(trace: Path, device: torch.device, note: Callable[[str], None]) -> Iterator[None]:
    """Profile this process in the `with` block. Worker processes are not profiled.

    If the block ends without an exception, two files are written: the trace and, next
    to it, ``profile.json``. The second file contains the path of the trace, the five
    phases with the most time and the five operations (ops) with the most time. Each
    entry has a name, seconds and the share of the profiled time. The time of a phase
    does not include nested phases. On CUDA, the time of an op is the time of its
    kernels.

    Args:
        trace: File to write, ``.json`` or ``.json.gz``.
        device: Device that the run computes on.
        note: Function that shows a note to the user. The note is that the trace is
            being written, which takes seconds.
    """
    activities = profiler_activities(device)
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()

    note(f"writing {trace}")
    profiler.export_chrome_trace(str(trace))
    phases = phase_seconds(profiler.events() or [])  # type: ignore[no-untyped-call]
    ops = Counter[str]()

    for op in profiler.key_averages():
        if not op.key.startswith(PREFIX):
            own_time = op.self_device_time_total if len(activities) > 1 else op.self_cpu_time_total
            ops[op.key] += own_time / 1e6

    total = sum(phases.values())
    write_json(
        trace.with_name(PROFILE),
        {
            "trace": str(trace),
            "phases": _costliest(phases, total),
            "ops": _costliest(ops, total),
        },
    )


class NamedEngine(Engine):
    """An engine that marks the training of another engine as a phase of the trace.

    Args:
        inner: Engine that executes the jobs.
    """

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        with closing(self._inner.map(jobs, data)) as results:
            while True:
                with phase("train"):
                    result = next(results, None)
                if result is None:
                    return
                yield result


def phase_seconds(events: Iterable[FunctionEvent]) -> Counter[str]:
    """Sum the seconds of each phase by name, without the time of nested phases."""
    seconds = Counter[str]()
    for event in events:
        if not event.name.startswith(PREFIX) or event.device_type != ProfilerDevice.CPU:
            continue
        duration = (event.time_range.end - event.time_range.start) / 1e6  # from microseconds
        seconds[event.name.removeprefix(PREFIX)] += duration
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith(PREFIX):
            parent = parent.cpu_parent
        if parent is not None:
            seconds[parent.name.removeprefix(PREFIX)] -= duration

    return seconds


def _costliest(seconds: Counter[str], total: float) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "seconds": round(value, 6),
            "share": round(value / total, 4) if total else 0.0,
        }
        for name, value in seconds.most_common(_SHOWN)
    ]
