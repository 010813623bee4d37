"""The report's pictures: the paper's numbers against ours, and each method over the table's last key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedexp.tables.report import canvas, layout, texts
from fedexp.tables.report.layout import Row
from fedexp.tables.report.report import Cell, Picture, Report, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESERVED = ("agreement", "curves", "rows")  # names of its pictures
_DECADES = 1.5  # values that span more are drawn on a logarithmic axis
_TICKED = 8  # up to so many values of the axis each get a tick of their own


def pictures(report: Report) -> tuple[Picture, ...]:
    """What can be drawn of a report; empty where nothing has been measured.

    `agreement`: every cell that has both numbers, the paper's on x and ours on y. `curves`: over the last key where that is a
    number, one panel a block of the table; `rows` otherwise. All name the form. The same report
    gives the same bytes.
    """
    if not any(cell.mean is not None and math.isfinite(cell.mean) for cell in report.cells):
        return ()
    with canvas.drawing():
        return tuple(_drawn(report))


def _drawn(report: Report) -> Iterator[Picture]:
    source = f"{report.source}{texts.named_form(report)}"
    if any(_both(cell) for cell in report.cells):
        title = f"{source}: our means (± standard deviation over seeds) against the paper's"
        title += "; the band is the tolerance" if report.tolerance else ""
        yield _picture("agreement", title, _agreement(report), report)
    theirs = "the paper hollow, " if layout.referenced(report) else ""
    if report.keys and any(_curves(block) for block in _blocks(report).values()):
        title = f"{source}: over {report.keys[-1]}; {theirs}our runs solid with standard deviations over seeds"
        yield _picture("curves", title, _over_last_key(report), report)
    else:
        title = f"{source}: row by row; {theirs}our runs filled with standard deviations over seeds"
        yield _picture("rows", title, _row_by_row(report), report)


def _picture(name: str, title: str, figure: Figure, report: Report) -> Picture:
    """With what must not be lost where the picture is shown without the report."""
    return canvas.picture(name, title, figure, filter(None, [texts.form(report), texts.oracles(report)]))


# --- what is drawn


def _agreement(report: Report) -> Figure:
    cells = [cell for cell in report.cells if _both(cell)]
    figure = canvas.figure(5.2, 5.5)
    axes = canvas.axes(figure, 1, 1, 1)
    ends = [v for c in cells for v in (_finite(c.paper), _finite(c.mean))]
    log = _is_log_scale(report)
    low, high = min(ends), max(ends)
    if log:
        low, high = low / 1.5, high * 1.5
    else:
        margin = 0.06 * (high - low) or max(abs(high) * 0.1, 1.0)
        low, high = low - margin, high + margin
    line = [low * (high / low) ** (i / 100) if log else low + (high - low) * i / 100 for i in range(101)]
    if tolerance := report.tolerance:
        below = [v - tolerance for v in line]
        axes.fill_between(line, below, [v + tolerance for v in line], color=canvas.INK, alpha=0.08, linewidth=0)
    axes.plot(line, line, color=canvas.INK, linewidth=0.8, alpha=0.7)
    for at, (key, _) in enumerate(_methods(report)):
        mine = [cell for cell in cells if cell.method == key]
        if mine:
            axes.errorbar(
                [_finite(c.paper) for c in mine],
                [_finite(c.mean) for c in mine],
                yerr=[_spread(c) for c in mine],
                linestyle="none",
                **canvas.look(at),
                markersize=5.5,
                markeredgewidth=0,
                alpha=0.9,
                elinewidth=0.9,
            )
    if log:
        canvas.log(axes, "x")
        canvas.log(axes, "y")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.set_xlabel(f"paper: {_measure(report)}", parse_math=False)
    axes.set_ylabel(f"our runs: {_measure(report)}", parse_math=False)
    _legend(figure, report, [key for key, _ in _methods(report) if any(cell.method == key for cell in cells)])
    return figure


def _over_last_key(report: Report) -> Figure:
    blocks = _blocks(report)
    across = min(len(blocks), 2 if len(blocks) <= 4 else 3)
    down = -(-len(blocks) // across)
    figure = canvas.figure(7.4 if across > 1 else 5.2, 2.7 * down + 0.6)
    log = _is_log_scale(report)
    first: Axes | None = None
    for at, (conditions, rows) in enumerate(blocks.items()):
        axes = canvas.axes(figure, down, across, at + 1, sharey=first)
        first = first or axes
        _lines(axes, report, rows)
        if log:
            canvas.log(axes, "y")
        axes.set_title(
            canvas.named(report.keys[:-1], conditions, 58 // across),
            fontsize=9,
            loc="left",
            parse_math=False,
            color=canvas.INK,
        )
        if at >= len(blocks) - across:
            axes.set_xlabel(report.keys[-1], parse_math=False)
        if at % across == 0:
            axes.set_ylabel(_measure(report), parse_math=False)
    _legend(figure, report)
    return figure


def _lines(axes: Axes, report: Report, rows: Sequence[Row]) -> None:
    keyed = sorted((row for row in rows if _number(row.conditions.get(report.keys[-1]))), key=lambda r: _x(report, r))
    xs = [_x(report, row) for row in keyed]
    ticked = len(xs) <= _TICKED
    methods = _methods(report)
    for at, (key, _) in enumerate(methods):
        # few points stand side by side, so that equal numbers of two methods are both seen; they share one tick
        shift = 0.05 * (at - (len(methods) - 1) / 2) if ticked else 0.0
        where = [i + shift if ticked else x for i, x in enumerate(xs)]
        cells = [(next(iter(row.of(key)), None)) for row in keyed]
        look: dict[str, Any] = {**canvas.look(at), "markersize": 4.5}
        for run in _runs(where, [None if c is None else c.paper for c in cells]):
            axes.plot(*run, linestyle=(0, (4, 2)), linewidth=0.9, markerfacecolor="none", markeredgewidth=0.9, **look)
        spreads = dict(zip(where, (_spread(c) for c in cells), strict=True))
        for x, y in _runs(where, [None if c is None else c.mean for c in cells]):
            axes.errorbar(
                x,
                y,
                yerr=[spreads[v] for v in x],
                linestyle=canvas.dashes(at),
                linewidth=1.4,
                elinewidth=0.9,
                markeredgewidth=0,
                **look,
            )
    if ticked:
        axes.set_xticks(range(len(xs)), [layout.label(row.conditions[report.keys[-1]]) for row in keyed])
        axes.set_xlim(-0.5, len(xs) - 0.5)
    elif _is_log(xs):
        canvas.log(axes, "x")


def _row_by_row(report: Report) -> Figure:
    rows, methods = layout.rows(report), _methods(report)
    step = 0.8 / max(len(methods), 1)
    differing = [key for key in report.keys if len({row.conditions.get(key) for row in rows}) > 1]
    figure = canvas.figure(7.4, 0.9 + len(rows) * max(0.34, 0.13 * len(methods), 0.16 * len(differing)))
    axes = canvas.axes(figure, 1, 1, 1)
    for at, (key, _) in enumerate(methods):
        look: dict[str, Any] = {**canvas.look(at), "markersize": 5}
        for i, row in enumerate(rows):
            y = i + step * (at - (len(methods) - 1) / 2)
            for cell in row.of(key):
                paper, mean = _finite(cell.paper), _finite(cell.mean)
                axes.plot([paper, mean], [y, y], color=look["color"], linewidth=0.9, alpha=0.5)
                axes.plot([paper], [y], linestyle="none", markerfacecolor="none", markeredgewidth=0.9, **look)
                if not math.isnan(mean):
                    axes.errorbar(
                        [mean], [y], xerr=[_spread(cell)], linestyle="none", elinewidth=0.9, markeredgewidth=0, **look
                    )
    for i in range(1, len(rows)):
        axes.axhline(i - 0.5, color=canvas.FAINT, linewidth=0.6)
    named = [canvas.named(differing, [row.conditions.get(key) for key in differing], 1) for row in rows]
    axes.set_yticks(range(len(rows)), named, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    if _is_log_scale(report):
        canvas.log(axes, "x")
    axes.set_xlabel(_measure(report), parse_math=False)
    _legend(figure, report)
    return figure


def _legend(figure: Figure, report: Report, dots: Sequence[str] = ()) -> None:
    """All methods and what is filled or hollow, above the panels; with `dots`, those methods alone, without lines."""
    from matplotlib.lines import Line2D

    handles = []
    for at, (key, name) in enumerate(_methods(report)):
        if not dots or key in dots:
            look = canvas.look(at)
            line: Any = "none" if dots else canvas.dashes(at)
            handles.append(Line2D([], [], linestyle=line, markersize=5, label=canvas.plain(name), **look))
    if not dots and any(cell.paper is not None for cell in report.cells):
        hollow: dict[str, Any] = {"linestyle": (0, (4, 2)), "markerfacecolor": "none"}
        handles.append(Line2D([], [], color=canvas.INK, marker="o", markersize=5, label="our runs"))
        handles.append(Line2D([], [], color=canvas.INK, marker="o", markersize=5, label="paper", **hollow))
    canvas.legend(figure, handles)


# --- the report's numbers as points


def _blocks(report: Report) -> dict[tuple[Value, ...], list[Row]]:
    """Rows by all conditions but the last."""
    blocks: dict[tuple[Value, ...], list[Row]] = {}
    for row in layout.rows(report):
        blocks.setdefault(tuple(row.conditions.get(key) for key in report.keys[:-1]), []).append(row)
    return blocks


def _curves(rows: Sequence[Row]) -> bool:
    return layout.numeric([list(row.conditions.values())[-1] for row in rows])


def _x(report: Report, row: Row) -> float:
    value = row.conditions[report.keys[-1]]
    assert isinstance(value, int | float)
    return float(value)


def _number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _runs(xs: Sequence[float], ys: Sequence[float | None]) -> Iterator[tuple[list[float], list[float]]]:
    """Stretches without a hole: a line never bridges a number that is missing or not finite."""
    x_run: list[float] = []
    y_run: list[float] = []
    for x, y in zip(xs, ys, strict=True):
        if y is not None and math.isfinite(y):
            x_run.append(x)
            y_run.append(y)
        elif x_run:
            yield x_run, y_run
            x_run, y_run = [], []
    if x_run:
        yield x_run, y_run


def _both(cell: Cell) -> bool:
    return not any(math.isnan(_finite(v)) for v in (cell.paper, cell.mean))


def _finite(value: float | None) -> float:
    """What can be drawn; nan, which leaves a hole, for what cannot."""
    return value if value is not None and math.isfinite(value) else math.nan


def _spread(cell: Cell | None) -> float:
    return cell.sd if cell is not None and cell.sd is not None and math.isfinite(cell.sd) else 0.0


def _is_log(values: Sequence[float]) -> bool:
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > _DECADES


def _is_log_scale(report: Report) -> bool:
    """Percentages are never drawn logarithmically: their differences count, not their ratios."""
    return report.unit != "percent" and _is_log([_finite(v) for cell in report.cells for v in (cell.paper, cell.mean)])


def _methods(report: Report) -> list[tuple[str, str]]:
    """(key, label) of all that have a number to draw."""
    used = {cell.method for cell in report.cells if cell.paper is not None or cell.values}
    labels = layout.names(report)
    return [(key, labels.get(key, key)) for key in dict.fromkeys([*labels, *sorted(used)]) if key in used]


def _measure(report: Report) -> str:
    return f"{report.metric.replace('_', ' ')} ({layout.unit(report)})"
