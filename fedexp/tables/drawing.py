"""The interface of a table's own drawings: figures of the paper that are made from its runs' files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedexp.tables.report.report import Picture, PlotStyle, Role, Value


@dataclass(frozen=True)
class DrawnRun:
    """A finished run of the table.

    Args:
        conditions: of its row and beyond; method, label: its column.
        folder: where ``result.json``, ``metrics.jsonl``, ``trace/`` and ``model.safetensors`` lie.
        config: resolved; result: its result.json.
        plot_style, role: of its column, see `fedexp.tables.report.report.Method`.
    """

    conditions: dict[str, Value]
    method: str
    label: str
    seed: int
    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    plot_style: PlotStyle | None = None
    role: Role = "baseline"


class Drawing(ABC):
    """One figure, named in the table's ``drawings`` by ``_target_`` and its keys."""

    @abstractmethod
    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        """Pictures of the runs that are there, `notes` below each; none where there are none.

        A `FedexpError` says why nothing can be drawn of them, and becomes a warning of the report.
        """
