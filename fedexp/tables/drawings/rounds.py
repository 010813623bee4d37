"""Curves over communication rounds, such as MA-Echo's Figure 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.run_folder import rows_of
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.panels import Curve, Panels, check_methods, headline_value
from fedexp.tables.report.report import Picture


@dataclass(frozen=True)
class Rounds(Drawing):
    """One panel per combination of `panels`, with one curve per method.

    Curves are means over the runs of a method in a panel (usually its seeds), with a
    band of one standard deviation.

    Args:
        curves: Methods drawn as curves.
        title: Title of the picture.
        lines: Methods drawn as horizontal lines at their mean headline value.
        name: Part of the picture's file name.
        metric: Metric of the evaluated rounds, such as ``test/global/acc``.
        label: Label of the vertical axis.
        scale: Factor that turns the metric and the headline into the unit of `label`.
        logarithmic: Whether the vertical axis is logarithmic.
        panels: Conditions, or ``method``, that distinguish panels. Empty: one panel.
        heading: Heading of a panel, with the keys in `panels` as placeholders. None:
            the keys and values are listed.
    """

    curves: tuple[str, ...]
    title: str
    lines: tuple[str, ...] = ()
    name: str = "rounds"
    metric: str = "test/global/acc"
    label: str = "test accuracy (%)"
    scale: float = 100.0
    logarithmic: bool = False
    panels: tuple[str, ...] = ()
    heading: str | None = None

    def __post_init__(self) -> None:
        check_methods(self.curves, self.lines)

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        axes = "communication round", self.label, self.panels, self.heading, self.logarithmic
        panels = Panels(self.name, self.title, *axes)
        return panels.draw(runs, self.curves, self._curve, self._level, self.lines, notes)

    def _level(self, run: DrawnRun) -> float:
        return headline_value(run, self.scale)

    def _curve(self, run: DrawnRun) -> Curve:
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
