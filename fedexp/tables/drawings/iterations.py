"""Curves over the iterations of a method that iterates on the server.

MA-Echo's Figures 3, 6b, 7 and 8 are such curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedexp.core.errors import ConfigError, suggest
from fedexp.tables.drawing import DrawnRun
from fedexp.tables.drawings.panels import Curve, Panels, Points
from fedexp.tables.lookup import traced


@dataclass(frozen=True)
class Iterations(Panels):
    """Curves over the iterations, one panel per combination of values of `panels`.

    The runs of the methods in `curves` must store a trace, which contains measurements
    after some of the iterations (``trace.every``). For the arguments that are not
    listed here, see `fedexp.tables.drawings.panels.Panels`.

    Args:
        series: Series of the trace that is drawn, ``<model>/<metric>``. In MA-Echo, the
            models are the fused model ``W``, the clients' models ``V``, and their mean
            ``mean_v``. A series of ``V`` has one value per client, such as ``V/acc``
            (on the test set) or ``V/train/acc`` (on the client's own samples). Then
            every client has a thin curve beside the mean.
        axis: Horizontal axis. ``iteration`` is the number of the iteration. ``record``
            counts the recorded points from 0, for methods that record at different
            iterations.
        called: Label of the horizontal axis if `axis` is ``iteration``.
        round: Number of the round whose iterations are drawn. The first round is 1.
    """

    name: str = "iterations"
    series: str = "mean_v/acc"
    axis: Literal["iteration", "record"] = "iteration"
    called: str = "iteration"
    round: int = 1

    @property
    def x_label(self) -> str:
        return self.called if self.axis == "iteration" else "recorded point"

    def curve(self, run: DrawnRun) -> Curve:
        try:
            rows = traced(run.folder, self.round)
        except ConfigError as error:
            raise ConfigError(
                f"column '{run.method}' has no trace of round {self.round}",
                where=str(run.folder),
                do="give it trace.every=1, or name it in 'lines'",
            ) from error

        xs = [
            float(row["iteration"]) if self.axis == "iteration" else float(at)
            for at, row in enumerate(rows)
        ]
        values = [_series(row, self.series) for row in rows]
        if not isinstance(values[0], list):
            return Curve((self._points(xs, values),))
        return Curve(tuple(self._points(xs, own) for own in zip(*values, strict=True)), thin=True)

    def _points(self, xs: Sequence[float], values: Sequence[Any]) -> Points:
        return {x: self.scale * value for x, value in zip(xs, values, strict=True)}


def _series(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ConfigError(
            f"a trace has no series '{name}'", where="a drawing's series", do=suggest(name, row)
        )
    return row[name]
