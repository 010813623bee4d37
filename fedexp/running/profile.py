"""A profile of a run: a trace for Perfetto or chrome://tracing, and the main costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.phases import PREFIX, phase
from fedexp.core.torch_private import ProfilerDevice
from fedexp.storage.files import write_json

_SHOWN = 5
PROFILE = "profile.json"


class Profile:
    """A context manager that profiles this process. Worker processes are not profiled.

    It writes `PROFILE` beside the trace, with the trace's path and the costliest phases
    and ops. Each entry has a name, seconds and the share of the profiled time. The time
    of a phase does not include nested phases. The time of ops is kernel time on CUDA.

    Args:
        trace: File to write, ``.json`` or ``.json.gz``.
        device: Device that the run computes on.
        note: Shows the user a note that the trace is being written, which takes
            seconds.
    """

    def __init__(self, trace: Path, device: torch.device, note: Callable[[str], None]) -> None:
        self._trace, self._cuda, self._note = trace, device.type == "cuda", note
        kinds = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if self._cuda else [kinds.CPU], acc_events=True
        )

    def watch(self, engine: Engine) -> Engine:
        """Return `engine` with its work named in the trace."""
        return _NamedEngine(engine)

    def __enter__(self) -> Profile:
        self._profiler.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profiler.stop()
        if error is None:
            self._note(f"writing {self._trace}")
            self._profiler.export_chrome_trace(str(self._trace))
            phases = phase_seconds(self._profiler.events() or [])  # type: ignore[no-untyped-call]
            ops = Counter[str]()

            for op in self._profiler.key_averages():
                if not op.key.startswith(PREFIX):
                    ops[op.key] += (
                        op.self_device_time_total if self._cuda else op.self_cpu_time_total
                    ) / 1e6

            total = sum(phases.values())
            report = {
                "trace": str(self._trace),
                "phases": _costliest(phases, total),
                "ops": _costliest(ops, total),
            }
            write_json(self._trace.with_name(PROFILE), report)


class _NamedEngine(Engine):
    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        results = self._inner.map(jobs, data)
        try:
            while True:
                with phase("train"):
                    result = next(results, None)
                if result is None:
                    return
                yield result
        finally:
            results.close()


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
