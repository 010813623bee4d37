"""Counters of a simulated device, by phase, source line and operator."""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class Count:
    """The numbers of events that were counted.

    Args:
        launches: Kernels launched on a device.
        syncs: Times that the host waited for a device.
        h2d: Copies from host to device.
        h2d_bytes: Bytes of these copies.
        d2h: Copies from device to host.
        d2h_bytes: Bytes of these copies.
        cpu_kernels: Operators that computed on the CPU.
    """

    launches: float = 0
    syncs: float = 0
    h2d: float = 0
    h2d_bytes: float = 0
    d2h: float = 0
    d2h_bytes: float = 0
    cpu_kernels: float = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f) + getattr(other, f) for f in FIELDS))

    def __sub__(self, other: Count) -> Count:
        return self + other * -1

    def __mul__(self, factor: float) -> Count:
        return Count(*(getattr(self, f) * factor for f in FIELDS))


FIELDS = tuple(each.name for each in fields(Count))


class Rows:
    """Counts by phase, source line and operator.

    Args:
        rows: Counts by these three names.
    """

    def __init__(self, rows: Mapping[tuple[str, str, str], Count]) -> None:
        self._rows = dict(rows)

    def total(self, phase: str = "", file: str = "", operator: str = "") -> Count:
        """Return the sum over a phase and the phases inside it.

        By default, the sum covers all phases.

        Args:
            phase: Name of the phase.
            file: Beginning of the path of the source line, in the watched package.
            operator: Beginning of the operator's name.
        """
        chosen = (
            row
            for (where, line, name), row in self._rows.items()
            if where.startswith(phase) and line.startswith(file) and name.startswith(operator)
        )
        return sum(chosen, Count())

    def by_line(self, phase: str = "") -> dict[str, Count]:
        """Return the sum for each source line and operator."""
        lines: dict[str, Count] = collections.defaultdict(Count)
        for (where, line, operator), row in self._rows.items():
            if where.startswith(phase):
                lines[f"{line} {operator}"] += row
        return dict(lines)

    def plain(self) -> list[list[Any]]:
        """Return nested lists that JSON can store."""
        return [[*key, *astuple(row)] for key, row in self._rows.items()]

    @classmethod
    def of_plain(cls, rows: Sequence[Sequence[Any]]) -> Rows:
        """Return the rows that `plain` returned."""
        return cls({(row[0], row[1], row[2]): Count(*row[3:]) for row in rows})


class Counter:
    """The counts of a process.

    Args:
        watched: Folder of the package whose innermost line a count is attributed to.
    """

    def __init__(self, watched: Path) -> None:
        self._watched = f"{watched}/"
        self._rows: dict[tuple[str, str, str], Count] = collections.defaultdict(Count)
        # Uses of each device: allocations, launches, copies and synchronisations.
        self.uses: dict[int, int] = collections.defaultdict(int)
        self._local = threading.local()

    @property
    def is_paused(self) -> bool:
        return getattr(self._local, "paused", False)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in this thread inside the block."""
        before, self._local.paused = self.is_paused, True
        try:
            yield
        finally:
            self._local.paused = before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute counts of this thread to a phase, inside the phases around it."""
        before = self._phase
        self._local.phase = f"{before}/{name}" if before else name
        try:
            yield
        finally:
            self._local.phase = before

    def add(self, operator: str, device: int | None = None, **numbers: int) -> None:
        """Add numbers, which are fields of `Count`."""
        if self.is_paused:
            return
        row = self._rows[self._phase, self._line(), operator]
        for name, number in numbers.items():
            setattr(row, name, getattr(row, name) + number)
        if device is not None:
            self.use(device)

    def use(self, device: int) -> None:
        """Count a use of a device."""
        if not self.is_paused:
            self.uses[device] += 1

    def reset(self) -> None:
        """Forget all counts."""
        self._rows.clear()
        self.uses.clear()

    def rows(self) -> Rows:
        """Return a copy of all counts."""
        return Rows(self._rows)

    @property
    def _phase(self) -> str:
        return getattr(self._local, "phase", "")

    def _line(self) -> str:
        """Return the line of the watched package that made the current call.

        If there are several such lines on the call stack, it is the innermost one.
        """
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self._watched):
                return f"{file[len(self._watched) :]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return "elsewhere"
