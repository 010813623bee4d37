"""The base class of figures that show curves in panels."""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedexp.core.build import require
from fedexp.core.errors import ConfigError, suggest
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.lookup import read_path
from fedexp.tables.report import canvas, layout
from fedexp.tables.report.report import Picture, PlotStyle

# Length of a dash in points.
_DASH = 5
# A curve of at most this many points has a marker at each point. A longer curve has
# markers only at some points.
_FEW = 12

# The points of a curve: the value y for each x.
Points = dict[float, float]


@dataclass(frozen=True)
class Curve:
    """The curves of one run, for example one curve per client.

    Args:
        each: The curves, in the units of the axes. Their mean is drawn.
        thin: Whether each curve is also drawn, as a thin line beside the mean.
    """

    each: tuple[Points, ...]
    thin: bool = False


@dataclass(frozen=True)
class Panels(Drawing):
    """One panel per combination of values of `panels`, with one curve per method.

    A curve is the mean over the runs of a method in the panel. These runs usually
    differ in the seed. Around the curve is a band of one standard deviation.

    Args:
        curves: Methods drawn as curves.
        title: Title of the picture.
        lines: Methods drawn as horizontal lines. The height of a line is the mean of
            the headline values, which are the main numbers of the method's runs.
        name: Part of the picture's file name.
        label: Label of the vertical axis.
        scale: Factor that converts the values of curves and lines into the unit of
            `label`.
        panels: Conditions, or ``method``, that distinguish panels. Empty: one panel.
        heading: Heading of a panel, with the keys in `panels` as placeholders
            (``"{init}-init {clients}-MLPs"``). None: the keys and values are listed.
    """

    curves: tuple[str, ...]
    title: str
    lines: tuple[str, ...] = ()
    name: str = "panels"
    label: str = "test accuracy (%)"
    scale: float = 100.0
    panels: tuple[str, ...] = ()
    heading: str | None = None

    def __post_init__(self) -> None:
        require(len(self.curves) > 0, "curves: name at least one method")
        require(
            not set(self.curves) & set(self.lines),
            "a method is either one of 'curves' or one of 'lines'",
        )

    @property
    @abstractmethod
    def x_label(self) -> str:
        """The label of the horizontal axis."""

    @abstractmethod
    def curve(self, run: DrawnRun) -> Curve:
        """Return the curves of a run."""

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        """Draw the picture. There is no picture if no method in `curves` has a run."""
        methods = (*self.curves, *self.lines)
        places: dict[tuple[Any, ...], dict[str, list[DrawnRun]]] = {}
        for run in runs:
            if run.method in methods:
                where = tuple(_condition_value(run, key) for key in self.panels)
                same = places.setdefault(where, {}).setdefault(run.method, [])
                # Several rows may read their numbers from the same run.
                if all(run.folder != other.folder for other in same):
                    same.append(run)
        shown = {where: found for where, found in places.items() if set(found) & set(self.curves)}
        if not shown:
            return ()

        known = {run.method: run for run in runs}
        order = [known[method] for method in methods if method in known]
        plot_styles = canvas.distinct_styles(run.plot_style for run in order)
        styles = {
            run.method: _style(plot_style, run, number, run.method in self.lines)
            for number, (run, plot_style) in enumerate(zip(order, plot_styles, strict=True))
        }
        with canvas.use_style():
            figure, panels = canvas.panels(len(shown), self.x_label, self.label)
            for axes, (where, found) in zip(panels, shown.items(), strict=True):
                self.draw_panel(axes, found, styles)
                canvas.set_title(axes, self._heading(where))
            handles = [
                Line2D([], [], label=canvas.plot_label(run.label), **styles[run.method])
                for run in order
            ]
            canvas.legend(figure, handles)
            return (canvas.render_picture(self.name, self.title, figure, notes),)

    def draw_panel(
        self,
        axes: Axes,
        runs: Mapping[str, Sequence[DrawnRun]],
        styles: Mapping[str, dict[str, Any]],
    ) -> None:
        """Draw the curves and lines of one panel.

        Args:
            axes: The panel.
            runs: Runs by method.
            styles: Properties of lines by method, in drawing order.
        """
        for method, style in styles.items():
            own = runs.get(method, ())
            if own and method in self.lines:
                levels = [read_path(run.result, "headline.value") * self.scale for run in own]
                axes.axhline(statistics.fmean(levels), **style)
            elif own:
                _plot(axes, [self.curve(run) for run in own], style)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))

    def _heading(self, where: Sequence[Any]) -> str:
        if self.heading is None:
            return canvas.wrapped_conditions(self.panels, where, 40)
        values = {key: layout.label(value) for key, value in zip(self.panels, where, strict=True)}
        try:
            return self.heading.format(**values)
        except (KeyError, IndexError, ValueError):
            raise ConfigError(
                f"'{self.heading}' cannot be filled in",
                where=f"drawing {self.name}, heading",
                expected="conditions of 'panels' in braces: "
                + (", ".join(values) or "there are none"),
            ) from None


def _style(plot_style: PlotStyle, run: DrawnRun, number: int, is_line: bool) -> dict[str, Any]:
    """Return the properties of a method's curve or horizontal line.

    The dashes of each horizontal line are shifted by one dash, so that two lines at the
    same height both stay visible.
    """
    style = canvas.line_properties(plot_style, run.role)
    if is_line:
        return {
            **style,
            "linestyle": (_DASH * number, (_DASH, _DASH)),
            "linewidth": 1.3,
            "marker": "",
        }
    return {**style, "markersize": style["markersize"] - 1}


def _plot(axes: Axes, curves: Sequence[Curve], properties: Mapping[str, Any]) -> None:
    """Plot the mean over runs, a band of one standard deviation, and thin curves.

    There is no band for a single run.
    """
    colour = properties["color"]
    means = []
    for curve in curves:
        means.append(mean(curve.each))
        for points in curve.each if curve.thin else ():
            axes.plot(
                *zip(*sorted(points.items()), strict=True), color=colour, linewidth=0.6, alpha=0.45
            )
    centre, spread = mean(means), deviation(means)
    xs = sorted(centre)
    if any(spread.values()):
        low, high = ([centre[x] + sign * spread[x] for x in xs] for sign in (-1, 1))
        axes.fill_between(xs, low, high, color=colour, alpha=0.16, linewidth=0)
    # Offset and spacing of markers, as fractions of the diagonal of the axes.
    every = None if len(xs) <= _FEW else (0.06, 0.12)
    axes.plot(xs, [centre[x] for x in xs], markevery=every, markeredgewidth=0, **properties)


def mean(curves: Sequence[Points]) -> Points:
    """Return the mean at every x at which all curves have a finite value."""
    return {x: statistics.fmean(curve[x] for curve in curves) for x in _common(curves)}


def deviation(curves: Sequence[Points]) -> Points:
    """Return the sample standard deviation (n - 1) at every x of `mean`.

    It is 0 for a single curve.
    """
    if len(curves) < 2:
        return dict.fromkeys(_common(curves), 0.0)
    return {x: statistics.stdev(curve[x] for curve in curves) for x in _common(curves)}


def _common(curves: Sequence[Points]) -> list[float]:
    return [x for x in curves[0] if all(x in curve and math.isfinite(curve[x]) for curve in curves)]


def _condition_value(run: DrawnRun, key: str) -> Any:
    have = {**run.conditions, "method": run.label}
    if key not in have:
        raise ConfigError(
            f"no condition '{key}'", where="a drawing's panels", do=suggest(key, have)
        )
    return have[key]
