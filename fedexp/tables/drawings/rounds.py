"""Curves over communication rounds, such as MA-Echo's Figure 9."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.run_folder import rows_of
from fedexp.tables.drawing import DrawnRun
from fedexp.tables.drawings.panels import Curve, Panels


@dataclass(frozen=True)
class Rounds(Panels):
    """Curves over the rounds, one panel per combination of values of `panels`.

    For the arguments that are not listed here, see
    `fedexp.tables.drawings.panels.Panels`.

    Args:
        metric: Metric of the evaluated rounds, such as ``test/global/acc``.
        logarithmic: Whether the vertical axis is logarithmic.
    """

    name: str = "rounds"
    metric: str = "test/global/acc"
    logarithmic: bool = False

    @property
    def x_label(self) -> str:
        return "communication round"

    def draw_panel(
        self,
        axes: Axes,
        runs: Mapping[str, Sequence[DrawnRun]],
        styles: Mapping[str, dict[str, Any]],
    ) -> None:
        super().draw_panel(axes, runs, styles)
        if self.logarithmic:
            axes.set_yscale("log")

    def curve(self, run: DrawnRun) -> Curve:
        rows = rows_of(run.folder, run.result)
        points = {
            float(row["round"]): self.scale * row[self.metric] for row in rows if self.metric in row
        }
        if not points:
            known = dict.fromkeys(key for row in rows for key in row)
            raise ConfigError(
                f"column '{run.method}' has no metric '{self.metric}'",
                where=str(run.folder / "metrics.jsonl"),
                do=suggest(self.metric, known),
            )
        return Curve((points,))
