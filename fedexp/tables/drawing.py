"""The interface of a table's drawings.

A drawing reproduces a figure of the paper from the files of the table's runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedexp.core.resolved_config import ResolvedConfig
from fedexp.tables.report.report import Picture, PlotStyle, Role, Value


@dataclass(frozen=True)
class DrawnRun:
    """A finished run of the table.

    Args:
        conditions: All conditions of the run: those that identify its row, and the
            others, in which the runs of one cell may differ.
        method: Key of the run's column.
        label: Label of this column.
        seed: Seed of the run.
        folder: Folder with ``result.json``, ``metrics.jsonl``, ``trace/`` and
            ``model.safetensors``.
        config: Resolved config.
        result: Content of ``result.json``.
        plot_style: Style of the column, see `fedexp.tables.report.report.Method`.
        role: Role of the column, see `fedexp.tables.report.report.Method`.
    """

    conditions: dict[str, Value]
    method: str
    label: str
    seed: int
    folder: Path
    config: ResolvedConfig
    result: dict[str, Any]
    plot_style: PlotStyle | None = None
    role: Role = "baseline"


class Drawing(ABC):
    """A figure of a table. Each node of the table's ``drawings`` describes one."""

    @abstractmethod
    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        """Draw the pictures of finished runs. Without runs, there are no pictures.

        Args:
            runs: Runs of the table.
            notes: Lines below each picture.

        Raises:
            FedexpError: The runs do not have the data to draw. The report shows the
                reason as a warning.
        """
