"""Pictures of each method's numbers over the table's last key, or row by row.

A key is a condition that identifies a row of the table, such as the number of clients.
If the values of the last key are numbers, this key is the horizontal axis. Otherwise
the rows are drawn below each other. Each picture has the paper's numbers and ours. A
block is a group of rows that differ only in the last key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation

from fedexp.storage.selection import is_number
from fedexp.tables.grouping import grouped
from fedexp.tables.report import canvas, layout
from fedexp.tables.report.layout import Row
from fedexp.tables.report.report import Cell, Method, Report, Value

# An axis is logarithmic if its numbers span more than this many decades.
_DECADES = 1.3
# If the axis has at most this many values, each value has a tick.
_TICKED = 8
# At each value of the axis, the markers of the methods are side by side. Their total
# width is this many points (72 per inch).
_SPREAD = 8.0
# Minimum gap between the labels of two ticks, as a fraction of the axis.
_CLOSE = 0.035


def has_axis(report: Report) -> bool:
    """Return whether the last key can be the horizontal axis.

    It can if, in more than half of the blocks, its values are numbers and at least two
    of them differ.
    """
    if not report.keys:
        return False
    numeric = [
        layout.is_axis([list(row.conditions.values())[-1] for row in rows])
        for rows in _blocks(report).values()
    ]
    return 2 * sum(numeric) > len(numeric)


def over_last_key(report: Report) -> Figure:
    """Draw one panel per block of the table, with the last key as the horizontal axis.

    Ticks are at the values of the key.
    """
    blocks = _blocks(report)
    figure, panels = canvas.panels(len(blocks), report.keys[-1], _measure(report))
    width = 58 // canvas.panels_across(len(blocks))
    log = _has_log_scale(report)
    for axes, (conditions, rows) in zip(panels, blocks.items(), strict=True):
        _draw_lines(axes, report, rows)
        if log:
            canvas.set_log_scale(axes, "y")
        # Matplotlib's automatic limits ignore the points that are moved sideways.
        axes.set_ylim(*_y_limits(report, log=log))
        canvas.set_title(axes, canvas.wrapped_conditions(report.keys[:-1], conditions, width))
    _draw_legend(figure, report)
    return figure


def row_by_row(report: Report) -> Figure:
    """Draw the table's rows below each other, with markers for every method.

    A line joins the marker of the paper's number to the marker of ours.
    """
    rows, styles = layout.rows(report), _styles(report)
    step = 0.8 / max(len(styles), 1)
    differing = [key for key in report.keys if len({row.conditions.get(key) for row in rows}) > 1]
    figure = canvas.figure(
        7.4, 0.9 + len(rows) * max(0.34, 0.13 * len(styles), 0.16 * len(differing))
    )
    axes = canvas.axes(figure, 1, 1, 1)

    for at, (method, style) in enumerate(styles):
        markers = {**style, "linestyle": "none"}

        for i, row in enumerate(rows):
            y = i + step * (at - (len(styles) - 1) / 2)

            for cell in row.cells_of(method.key):
                paper, mean = _finite(cell.paper), _finite(cell.mean)
                axes.plot([paper, mean], [y, y], color=style["color"], linewidth=0.9, alpha=0.5)
                axes.plot([paper], [y], markerfacecolor="none", markeredgewidth=0.9, **markers)
                if not math.isnan(mean):
                    axes.errorbar(
                        [mean],
                        [y],
                        xerr=[_spread(cell)],
                        elinewidth=0.9,
                        markeredgewidth=0,
                        **markers,
                    )

    for i in range(1, len(rows)):
        axes.axhline(i - 0.5, color=canvas.FAINT, linewidth=0.6)
    named = [
        canvas.wrapped_conditions(differing, [row.conditions.get(key) for key in differing], 1)
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), named, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    if _has_log_scale(report):
        canvas.set_log_scale(axes, "x")
    axes.set_xlabel(_measure(report), parse_math=False)
    _draw_legend(figure, report)

    return figure


def _draw_lines(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    keyed = sorted(
        (row for row in rows if is_number(row.conditions.get(report.keys[-1]))),
        key=lambda r: _x(report, r),
    )
    xs = [_x(report, row) for row in keyed]
    _scale_x_axis(axes, xs, [layout.label(row.conditions[report.keys[-1]]) for row in keyed])
    styles = _styles(report)

    for at, (method, style) in enumerate(styles):
        # The markers of each method are moved sideways by a different distance, so that
        # methods with equal numbers stay visible.
        apart = len(styles) > 1 and len(xs) <= _TICKED
        points = _SPREAD * (at / max(len(styles) - 1, 1) - 0.5) if apart else 0.0
        inches = ScaledTranslation(points / 72, 0, axes.get_figure().dpi_scale_trans)  # type: ignore[union-attr]
        beside = axes.transData + inches
        cells = [(next(iter(row.cells_of(method.key)), None)) for row in keyed]
        hollow = {
            **style,
            "markerfacecolor": "none",
            "linestyle": ":",
            "linewidth": 0.7,
            "alpha": 0.7,
        }
        for run in _stretches(xs, [None if c is None else c.paper for c in cells]):
            axes.plot(*run, markeredgewidth=0.9, transform=beside, **hollow)
        spreads = dict(zip(xs, (_spread(c) for c in cells), strict=True))

        for x, y in _stretches(xs, [None if c is None else c.mean for c in cells]):
            axes.errorbar(
                x,
                y,
                yerr=[spreads[v] for v in x],
                elinewidth=0.9,
                markeredgewidth=0,
                transform=beside,
                **style,
            )


def _scale_x_axis(axes: Axes, xs: Sequence[float], labels: Sequence[str]) -> None:
    """Set the limits of the axis around all values.

    The axis is logarithmic if the values span more than 1.3 decades. If there are at
    most 8 values, each one has a tick. Labels that would overlap are left out.
    """
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    log = canvas.spans_decades(xs, _DECADES)
    if log:
        canvas.set_log_scale(axes, "x")
        axes.set_xticks([], minor=True)
        reach = (high / low) ** 0.08
        axes.set_xlim(low / reach, high * reach)
    else:
        reach = 0.08 * (high - low) or 1.0
        axes.set_xlim(low - reach, high + reach)
    if len(xs) > _TICKED:
        return
    ends = axes.get_xlim()

    def place(x: float) -> float:
        return (
            math.log(x / ends[0]) / math.log(ends[1] / ends[0])
            if log
            else (x - ends[0]) / (ends[1] - ends[0])
        )

    shown: list[int] = []
    for at, x in enumerate(xs):
        room = _CLOSE + 0.012 * len(labels[at])
        if not shown or place(x) - place(xs[shown[-1]]) > room:
            shown.append(at)
    axes.set_xticks([xs[at] for at in shown], [labels[at] for at in shown])
    axes.set_xticks(xs, minor=True)
    axes.tick_params(axis="x", which="minor", labelbottom=False)


def _y_limits(report: Report, *, log: bool) -> tuple[float, float]:
    """Return limits of the vertical axis around all numbers and their error bars."""
    ends = [_finite(cell.paper) for cell in report.cells]
    ends += [_finite(cell.mean) + sign * _spread(cell) for cell in report.cells for sign in (-1, 1)]
    known = [end for end in ends if not math.isnan(end) and (end > 0 or not log)]
    low, high = min(known), max(known)
    if log:
        return low / 1.3, high * 1.3
    margin = 0.05 * (high - low) or max(0.1 * abs(high), 1e-9)
    return low - margin, high + margin


def _draw_legend(figure: Figure, report: Report) -> None:
    """Draw a legend that explains the methods, then filled and hollow markers."""
    names = layout.marked_labels(report)
    handles = [
        Line2D([], [], label=canvas.plot_label(names.get(method.key, method.key)), **style)
        for method, style in _styles(report)
    ]
    if any(cell.paper is not None for cell in report.cells):
        plain: dict[str, Any] = {
            "color": canvas.INK,
            "marker": "o",
            "markersize": 5,
            "linestyle": "none",
        }
        handles += [
            Line2D([], [], label="our runs", **plain),
            Line2D([], [], label="paper", markerfacecolor="none", **plain),
        ]
    canvas.legend(figure, handles)


def _styles(report: Report) -> list[tuple[Method, dict[str, Any]]]:
    """Return the line properties of every method that has a number.

    The proposed method is first in the legend and on top in the panels.
    """
    used = {cell.method for cell in report.cells if cell.paper is not None or cell.values}
    methods = [method for method in layout.by_role(report) if method.key in used]
    found = canvas.distinct_styles(method.plot_style for method in methods)
    return [
        (method, canvas.line_properties(plot_style, method.role))
        for method, plot_style in zip(methods, found, strict=True)
    ]


# --- the report's numbers as points


def _blocks(report: Report) -> dict[tuple[Value, ...], list[Row]]:
    """Group rows by all conditions except the last."""
    return grouped(
        (tuple(row.conditions.get(key) for key in report.keys[:-1]), row)
        for row in layout.rows(report)
    )


def _x(report: Report, row: Row) -> float:
    value = row.conditions[report.keys[-1]]
    assert isinstance(value, int | float)
    return float(value)


def _stretches(
    xs: Sequence[float], ys: Sequence[float | None]
) -> Iterator[Iterable[tuple[Any, ...]]]:
    """Yield the parts of a curve between its gaps, each as a pair of all x and all y.

    A gap is a number that is missing or not finite. No line is drawn across a gap.
    """
    points = zip(xs, ys, strict=True)
    for known, run in itertools.groupby(points, lambda point: not math.isnan(_finite(point[1]))):
        if known:
            yield zip(*run, strict=True)


def _finite(value: float | None) -> float:
    """Return a finite number as it is, and NaN otherwise. NaN is not drawn."""
    return value if value is not None and math.isfinite(value) else math.nan


def _spread(cell: Cell | None) -> float:
    return cell.sd if cell is not None and cell.sd is not None and math.isfinite(cell.sd) else 0.0


def _has_log_scale(report: Report) -> bool:
    values = [_finite(value) for cell in report.cells for value in (cell.paper, cell.mean)]
    return canvas.has_log_scale(report, values, _DECADES)


def _measure(report: Report) -> str:
    return f"{report.metric.replace('_', ' ')} ({layout.unit(report)})"
