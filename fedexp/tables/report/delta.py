"""A picture of our numbers minus the paper's, one row per cell.

Each row shows the 95 % interval of the difference beside the tolerance. The interval is
within the tolerance, beyond it, or across its edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedexp.tables.grouping import grouped
from fedexp.tables.report import canvas, layout, texts
from fedexp.tables.report.report import Cell, Colour, Method, Report
from fedexp.tables.report.shown_cells import ShownCell, shown_rows

BARS = "95 % intervals"
Group = tuple[Method, Sequence[ShownCell]]
# Heights of a cell's row and of a method's heading. The unit is the height of a row.
_ROW, _HEAD = 1.0, 1.35
# Height of a row in inches.
_INCHES = 0.165
# Largest height of one column of the picture, in rows. A longer picture gets another
# column, unless it has `_COLUMNS` columns already.
_TALLEST = 45.0
_COLUMNS = 2
_DECADES = 1.5
# Colour and marker by the name of the verdict, and whether the marker is filled.
# No two verdicts have the same combination of marker and filling.
VERDICT_STYLES: dict[str, tuple[Colour, str, bool]] = {
    "reproduced": ("blue", "o", True),
    "close": ("green", "D", True),
    "different (higher)": ("vermillion", "^", True),
    "different (lower)": ("vermillion", "v", True),
    "undecided": ("ochre", "D", False),
    "no reference": ("grey", "s", False),
    "not comparable": ("grey", "X", True),
}


def drawable(report: Report) -> bool:
    """Return whether any cell has a difference to draw."""
    return any(map(_has_delta, report.cells))


def difference_figure(report: Report) -> Figure:
    """Draw the cells grouped by method, the proposed method first.

    A long picture is split into columns to stay readable. The axis limits include every
    bar.
    """
    groups = _groups(report)
    columns = _packed(groups)
    tallest = max(sum(map(_height, column)) for column in columns)
    made = canvas.figure(max(5.6, 3.7 * len(columns)), 1.0 + _INCHES * tallest)
    ends = _ends(report, groups)
    margin = 0.04 * (ends[1] - ends[0]) or 1.0
    keys = differing(report)
    sizes = [abs(_delta(cell)) for cell in report.cells if _has_delta(cell) and _delta(cell)]

    for at, column in enumerate(columns):
        axes = canvas.axes(made, 1, len(columns), at + 1)
        _column(axes, report, column, keys)
        axes.set_ylim(tallest, 0)
        if canvas.has_log_scale(report, sizes, _DECADES):
            axes.set_xscale("symlog", linthresh=min(sizes))
            axes.set_xlim(ends[0] * 1.3, ends[1] * 1.3)
        else:
            axes.set_xlim(ends[0] - margin, ends[1] + margin)
        axes.set_xlabel(
            f"ours minus the paper's ({layout.difference_unit(report.unit)})", parse_math=False
        )

    _draw_legend(made, report)

    return made


def note(report: Report) -> str:
    """Return a note that explains rows and bars of the picture.

    The note also counts cells without an interval, and cells without a finite
    difference.
    """
    drawn = [cell for cell in report.cells if _has_delta(cell)]
    bare = sum(cell.interval is None for cell in drawn)
    endless = sum(cell.delta is not None and not _has_delta(cell) for cell in report.cells)
    rows = ", ".join(differing(report))

    return " ".join(
        filter(
            None,
            [
                f"Rows: {rows}." if rows else "",
                f"Bars: {BARS}" + (f"; {texts.count(bare, 'cell')} without one." if bare else "."),
                f"{texts.count(endless, 'cell')} without a finite difference not drawn."
                if endless
                else "",
            ],
        )
    )


def differing(report: Report) -> list[str]:
    """Return the keys whose values differ between rows."""
    return [
        key
        for key in report.keys
        if len({repr(cell.conditions.get(key)) for cell in report.cells}) > 1
    ]


def _column(axes: Axes, report: Report, groups: Sequence[Group], keys: Sequence[str]) -> None:
    axes.axvline(0, color=canvas.INK, linewidth=0.8, alpha=0.7)
    ticks, named = [], []
    y = 0.0
    for method, cells in groups:
        y += _HEAD
        head = y - _ROW / 2
        axes.axhline(head - 0.75, color=canvas.FAINT, linewidth=0.6)
        axes.annotate(
            canvas.plot_label(cells[0].label),
            (0, head),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=canvas.INK,
            weight="bold" if method.role == "proposed" else "normal",
        )
        tolerance = report.tolerance_of(method)

        if tolerance is not None:
            band = [y, y + len(cells) * _ROW]
            axes.fill_betweenx(
                band, -tolerance, tolerance, color=canvas.INK, alpha=0.08, linewidth=0
            )

        for shown in cells:
            _point(axes, shown, y + _ROW / 2)
            ticks.append(y + _ROW / 2)
            named.append(", ".join(shown.conditions[key] for key in keys))
            y += _ROW

    axes.set_yticks(ticks, list(map(canvas.cut, named)), parse_math=False)
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.grid(visible=False, axis="y")


def _point(axes: Axes, shown: ShownCell, y: float) -> None:
    delta = _delta(shown.cell)
    properties = _marker_properties(shown.verdict_name)
    low, high = shown.cell.interval or (delta, delta)
    # Rounding may make the length of a bar slightly negative.
    bars = [
        [max(0.0, delta - low)],
        [max(0.0, high - delta)],
    ]
    axes.errorbar([delta], [y], xerr=bars, linestyle="none", elinewidth=1.1, **properties)


def _marker_properties(verdict_name: str) -> dict[str, Any]:
    colour, marker, filled = VERDICT_STYLES[verdict_name]
    fill = {} if filled else {"markerfacecolor": "none"}
    return {
        "color": canvas.COLOURS[colour],
        "marker": marker,
        "markersize": 4.5,
        "markeredgewidth": 1.0,
        **fill,
    }


def _draw_legend(figure: Figure, report: Report) -> None:
    drawn = {texts.verdict_name(cell) for cell in report.cells if _has_delta(cell)}
    handles = [
        Line2D([], [], linestyle="none", label=name, **_marker_properties(name))
        for name in texts.verdict_marks(report)
        if name in drawn
    ]
    canvas.legend(figure, handles)


def _groups(report: Report) -> list[Group]:
    """Group the cells that have a difference by method, the proposed method first."""
    cells = grouped(
        (shown.method.key, shown)
        for row in shown_rows(report)
        for own in row.cells.values()
        for shown in own
        if _has_delta(shown.cell)
    )
    methods = layout.by_role(report)
    return [(method, cells[method.key]) for method in methods if method.key in cells]


def _packed(groups: Sequence[Group]) -> list[list[Group]]:
    """Pack groups in order into columns.

    There are as few columns as possible with a mean height of at most `_TALLEST` rows,
    but never more than `_COLUMNS`. All columns have about the same height.
    """
    total = sum(map(_height, groups))
    number = min(_COLUMNS, len(groups), max(1, math.ceil(total / _TALLEST)))
    columns: list[list[Group]] = [[]]
    for group in groups:
        full = sum(map(_height, columns[-1])) + _height(group) / 2 > total / number
        if columns[-1] and full and len(columns) < number:
            columns.append([])
        columns[-1].append(group)
    return columns


def _height(group: Group) -> float:
    return _HEAD + len(group[1]) * _ROW


def _ends(report: Report, groups: Sequence[Group]) -> tuple[float, float]:
    """Return the smallest and largest of all points, intervals and tolerances."""
    values = [0.0]
    for method, cells in groups:
        tolerance = report.tolerance_of(method)
        values += [] if tolerance is None else [-tolerance, tolerance]
        for shown in cells:
            values += [_delta(shown.cell), *(shown.cell.interval or ())]
    return min(values), max(values)


def _has_delta(cell: Cell) -> bool:
    return cell.delta is not None and math.isfinite(cell.delta)


def _delta(cell: Cell) -> float:
    assert cell.delta is not None
    return cell.delta
