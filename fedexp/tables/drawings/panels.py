"""The common part of figures of curves: grouping of runs, and panels of curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedexp.core.build import require
from fedexp.core.errors import ConfigError, suggest
from fedexp.tables.drawing import DrawnRun
from fedexp.tables.lookup import read_path
from fedexp.tables.report import canvas, layout
from fedexp.tables.report.report import Picture, PlotStyle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Length of a dash in points.
_DASH = 5
# Curves of at most this many points have a marker at each point. Longer curves have
# markers at some of their points.
_FEW = 12

# y by x, of one run or of one model of a run.
Points = dict[float, float]


@dataclass(frozen=True)
class Curve:
    """The curves of one run: one, or several that are drawn thin beside their mean.

    Args:
        each: The curves, each as y by x, in the units of the axes.
        thin: Whether each curve is drawn thin beside the mean of all.
    """

    each: tuple[Points, ...]
    thin: bool = False


def check_methods(curves: Sequence[str], lines: Sequence[str]) -> None:
    """Refuse a drawing without curves, and a method that is both a curve and a line."""
    require(len(curves) > 0, "curves: name at least one method")
    require(not set(curves) & set(lines), "a method is either one of 'curves' or one of 'lines'")


def headline_value(run: DrawnRun, scale: float) -> float:
    """Return the headline of a run times a factor."""
    return read_path(run.result, "headline.value") * scale


@dataclass(frozen=True)
class Panels:
    """Panels over an axis, with one series per method.

    Args:
        name: Name of the picture.
        title: Title of the picture.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        by: Conditions, or ``method``, that distinguish panels. In a panel, all runs of
            a method are pooled.
        heading: Heading of a panel, with the keys in `by` as placeholders
            (``"{init}-init {clients}-MLPs"``). None: the keys and values are listed.
        logarithmic: Whether the vertical axis is logarithmic.
    """

    name: str
    title: str
    x: str
    y: str
    by: tuple[str, ...] = ()
    heading: str | None = None
    logarithmic: bool = False

    def draw(
        self,
        runs: Sequence[DrawnRun],
        methods: Sequence[str],
        curve: Callable[[DrawnRun], Curve],
        level: Callable[[DrawnRun], float],
        lines: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> tuple[Picture, ...]:
        """Draw the picture, none without a run of `methods`.

        Args:
            runs: Runs of the table.
            methods: Methods drawn as curves.
            curve: Returns the curves of a run.
            level: Returns the height of a run's line.
            lines: Methods drawn as horizontal lines at the mean `level` of their runs.
            notes: Lines below the panels.
        """
        places: dict[tuple[Any, ...], dict[str, list[DrawnRun]]] = {}
        for run in runs:
            if run.method in (*methods, *lines):
                where = tuple(_condition_value(run, key) for key in self.by)
                same = places.setdefault(where, {}).setdefault(run.method, [])
                # Rows may read several numbers from one run.
                if all(run.folder != other.folder for other in same):
                    same.append(run)
        shown = {
            where: found
            for where, found in places.items()
            if any(method in found for method in methods)
        }
        if not shown:
            return ()
        known = {run.method: run for run in runs}
        order = [known[method] for method in (*methods, *lines) if method in known]
        styles = {
            run.method: _style(plot_style, run, number, run.method in lines)
            for number, (run, plot_style) in enumerate(
                zip(order, canvas.distinct_styles(run.plot_style for run in order), strict=True)
            )
        }
        with canvas.use_style():
            return (self._picture(shown, order, styles, set(lines), curve, level, notes),)

    def _picture(
        self,
        shown: Mapping[tuple[Any, ...], Mapping[str, Sequence[DrawnRun]]],
        order: Sequence[DrawnRun],
        styles: Mapping[str, dict[str, Any]],
        lines: set[str],
        curve: Callable[[DrawnRun], Curve],
        level: Callable[[DrawnRun], float],
        notes: Sequence[str],
    ) -> Picture:
        from matplotlib.ticker import MaxNLocator

        figure, down, across = canvas.panels(len(shown))
        first: Axes | None = None
        for at, (where, found) in enumerate(shown.items()):
            axes = canvas.axes(figure, down, across, at + 1, sharey=first)
            first = first or axes
            for method, style in styles.items():
                if method in lines and method in found:
                    value = statistics.fmean(level(run) for run in found[method])
                    axes.axhline(value, **style)
                elif method in found:
                    _plot(axes, [curve(run) for run in found[method]], style)
            canvas.set_title(axes, self._heading(where))
            if self.logarithmic:
                axes.set_yscale("log")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            if at >= len(shown) - across:
                axes.set_xlabel(self.x, parse_math=False)
            if at % across == 0:
                axes.set_ylabel(self.y, parse_math=False)
        canvas.legend(figure, _handles(order, styles))
        return canvas.render_picture(self.name, self.title, figure, notes)

    def _heading(self, where: Sequence[Any]) -> str:
        if self.heading is None:
            return canvas.wrapped_conditions(self.by, where, 40)
        values = {key: layout.label(value) for key, value in zip(self.by, where, strict=True)}
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
    """Return the style of a method.

    Horizontal lines that coincide stay visible, since their dashes take turns.
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
    # Offset and spacing of markers, as parts of the diagonal of the axes.
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


def _handles(order: Sequence[DrawnRun], styles: Mapping[str, dict[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], label=canvas.plot_label(run.label), **styles[run.method]) for run in order
    ]


def _condition_value(run: DrawnRun, key: str) -> Any:
    have = {**run.conditions, "method": run.label}
    if key not in have:
        raise ConfigError(
            f"no condition '{key}'", where="a drawing's panels", do=suggest(key, have)
        )
    return have[key]
