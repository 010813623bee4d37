"""Pictures of series in panels, as SVG, PNG and PDF."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from fedexp.analysis.groups import listed
from fedexp.analysis.series import PROGRESS, Labels, PlotData, Point
from fedexp.tables.plot_styles import read_method_styles
from fedexp.tables.report import canvas
from fedexp.tables.report.report import PlotStyle
from fedexp.tables.seeds import ROUNDING

_X_LABELS = {
    "round": "round",
    "step": "step",
    "bytes": "bytes sent and received",
    "seconds": "seconds of training and aggregation",
    "local_steps": "local steps",
}
# A curve of at most this many points has a marker at each point.
_FEW = 12
# The axis of a key is logarithmic if its values span more than this many decades.
_DECADES = 1.3
# If the axis of a key has at most this many values, each value has a tick.
_TICKED = 8
# Largest number of notes below the panels. The command prints all of them.
_NOTES = 6
# Bands may extend beyond the range of the values, on each side by at most this fraction
# of the width of the range.
_OVERHANG = 0.3
# Widths of figures with one and two columns of panels, in inches. A figure with more
# columns has `_PANEL_WIDTH` inches per column. Heights are in inches, too.
_WIDTHS = {1: 5.2, 2: 7.4}
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_HEIGHT = 2.7, 2.5, 0.7


def draw(data: PlotData, title: str) -> dict[str, bytes]:
    """Draw the panels.

    Args:
        data: The numbers.
        title: Title in the metadata of the files.

    Returns:
        The contents of the files, by their suffixes ``.png``, ``.svg`` and ``.pdf``.
    """
    rows, cols = (_ordered(place[at] for place in data.panels) for at in (0, 1))
    styles = series_styles(data.series, data.spec.by)
    with canvas.use_style():
        width = _WIDTHS.get(len(cols), _PANEL_WIDTH * len(cols))
        figure = canvas.figure(width, _PANEL_HEIGHT * len(rows) + _LEGEND_HEIGHT)
        for down, row in enumerate(rows):
            _draw_row(figure, data, row, (down, len(rows)), cols, styles)
        canvas.legend(
            figure,
            [
                Line2D([], [], label=canvas.plot_label(series_label(labels, data.spec.by)), **style)
                for labels, style in styles.items()
            ],
        )
        picture = canvas.render_picture("plot", title, figure, _notes(data))
        pdf = canvas.render_pdf(figure, title)
    return {".png": picture.png, ".svg": picture.svg.encode(), ".pdf": pdf}


def series_label(labels: Labels, by: Sequence[str]) -> str:
    """Return the label of a series in the legend.

    A method is named by its value. Other keys are named with their values, and keys
    that the series does not have are left out.
    """
    pairs = zip(by, labels, strict=True)
    texts = [text if key == "method" else f"{key}={text}" for key, text in pairs if text != "-"]
    return " ".join(texts) or f"no {by[0]}"


def series_styles(series: Sequence[Labels], by: Sequence[str]) -> dict[Labels, dict[str, Any]]:
    """Return the properties of the series' lines in matplotlib.

    If ``method`` is one of `by`, each series has the colour of its method. The colour
    of a method is the same in all pictures. Series of one method differ in marker and
    dash.

    Args:
        series: Values of the keys in `by`, for each series.
        by: Keys that distinguish the series.
    """
    if "method" not in by:
        found = canvas.distinct_styles([None] * len(series))
        return dict(zip(series, map(canvas.line_properties, found), strict=True))

    known = read_method_styles()
    methods = [labels[by.index("method")] for labels in series]
    own = [known.get(method) if methods.count(method) == 1 else None for method in methods]
    styles = [
        replace(style, colour=_method_colour(method, known))
        for method, style in zip(methods, canvas.distinct_styles(own), strict=True)
    ]
    return dict(zip(series, map(canvas.line_properties, styles), strict=True))


def _method_colour(method: str, known: Mapping[str, PlotStyle]) -> Any:
    """Return the colour of a method: its own, that of its family, or one by its name.

    A method belongs to the family of the longest known name with which its own name
    begins. Parts that replace parts of a preset follow the method's name after a space.
    """
    name = method.partition(" ")[0]
    family = [one for one in known if name == one or name.startswith(f"{one}_")]
    if family:
        return known[max(family, key=len)].colour
    colours = [colour for colour in canvas.COLOURS if colour != "grey"]
    return colours[crc32(name.encode()) % len(colours)]


def _ordered(labels: Iterable[Labels]) -> list[Labels]:
    return list(dict.fromkeys(labels))


def _draw_row(
    figure: Figure,
    data: PlotData,
    row: Labels,
    place: tuple[int, int],
    cols: Sequence[Labels],
    styles: Mapping[Labels, dict[str, Any]],
) -> None:
    """Draw the panels of one row, which share the vertical axis.

    Args:
        figure: The figure.
        data: The numbers.
        row: Values of the keys that identify the row.
        place: Number of the row from 0, and the number of rows.
        cols: Values of the keys that identify the columns.
        styles: Properties of lines by series.
    """
    spec = data.spec
    at, down = place
    first: Axes | None = None
    for across, col in enumerate(cols):
        axes = canvas.axes(figure, down, len(cols), at * len(cols) + across + 1, sharey=first)
        first = first or axes
        series = data.panels.get((row, col), {})
        _draw_panel(axes, series, spec.x, styles)
        keys, values = (*spec.rows, *spec.cols), (*row, *col)
        canvas.set_title(axes, canvas.wrapped_conditions(keys, values, 58 // min(len(cols), 3)))
        if at == down - 1:
            axes.set_xlabel(_X_LABELS.get(spec.x, spec.x), parse_math=False)
        if across == 0:
            axes.set_ylabel(data.metric, parse_math=False)
        else:
            axes.tick_params(axis="y", labelleft=False)
    assert first is not None
    shown = (data.panels.get((row, col), {}).values() for col in cols)
    first.set_ylim(*limits([point for panel in shown for points in panel for point in points]))


def _draw_panel(
    axes: Axes,
    series: Mapping[Labels, Sequence[Point]],
    x: str,
    styles: Mapping[Labels, dict[str, Any]],
) -> None:
    """Draw the curves of one panel and their bands.

    A series without the key of the horizontal axis is a horizontal line. The interval
    of a series of one point is a vertical line.
    """
    if not any(series.values()):
        axes.set_xticks([])
        axes.text(
            0.5,
            0.5,
            "no values",
            color=canvas.INK,
            ha="center",
            va="center",
            transform=axes.transAxes,
        )
        return
    for labels, style in styles.items():
        points = [point for point in series.get(labels, ()) if not math.isnan(point.x)]
        xs = [point.x for point in points]
        if len(points) == 1:
            # A band over one place would have no width.
            axes.vlines(xs, points[0].low, points[0].high, color=style["color"], alpha=0.5)
        elif any(point.low < point.high for point in points):
            low, high = [point.low for point in points], [point.high for point in points]
            axes.fill_between(xs, low, high, color=style["color"], alpha=0.16, linewidth=0)
        # Offset and spacing of markers, as fractions of the diagonal of the axes.
        every = None if len(xs) <= _FEW else (0.06, 0.12)
        axes.plot(xs, [point.mean for point in points], markevery=every, markeredgewidth=0, **style)

        for point in series.get(labels, ()):
            if math.isnan(point.x):
                axes.axhspan(point.low, point.high, color=style["color"], alpha=0.1, linewidth=0)
                axes.axhline(point.mean, **{**style, "marker": ""})
    _set_ticks(axes, x, [point.x for points in series.values() for point in points])


def _set_ticks(axes: Axes, x: str, places: Sequence[float]) -> None:
    if x in PROGRESS:
        if x == "bytes":
            axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        elif x == "local_steps":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(
            MaxNLocator(5, integer=x in ("round", "step"), steps=[1, 2, 5, 10])
        )
        return

    values = sorted({place for place in places if not math.isnan(place)})
    positive = [value for value in values if value > 0]
    if canvas.spans_decades(positive, _DECADES) and values[0] >= 0:
        if len(positive) == len(values):
            axes.set_xscale("log")
        else:
            # Zero has a place left of the smallest positive value.
            axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    if 0 < len(values) <= _TICKED:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(MaxNLocator(1, prune="both"))
        axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)


def limits(points: Sequence[Point]) -> tuple[float, float]:
    """Return limits of the vertical axis.

    They contain all single values. Bands are cut where they leave this range by more
    than a fraction of its width, because with two seeds a band can be many times wider
    than the curves.
    """
    values = [value for point in points for value in (*point.values, point.mean)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    # The mean of equal values may differ from them by rounding.
    rounding = ROUNDING * max(abs(low), abs(high))
    width = high - low if high - low > rounding else max(0.1 * abs(high), 1e-9)
    lowest = max(min(point.low for point in points), low - _OVERHANG * width)
    highest = min(max(point.high for point in points), high + _OVERHANG * width)
    shown = highest - lowest
    margin = 0.05 * (shown if shown > rounding else width)
    return lowest - margin, highest + margin


def _notes(data: PlotData) -> list[str]:
    """Return the notes below the panels."""
    counts = {
        len(point.values)
        for panel in data.panels.values()
        for points in panel.values()
        for point in points
    }
    fewest, most = min(counts, default=0), max(counts, default=0)
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    is_single = any(
        sum(not math.isnan(point.x) for point in points) == 1
        for panel in data.panels.values()
        for points in panel.values()
    )
    marks = "bands and vertical lines" if is_single else "bands"
    band = "" if most < 2 else f"; {marks} are 95 % intervals of the mean (Student's t)"
    runs = "One run each" if most < 2 else f"Means over {number} seeds"
    hidden = len(data.notes) - _NOTES
    more = [f"and {hidden} more notes"] if hidden > 0 else []
    without = {
        series_label(labels, data.spec.by): None
        for panel in data.panels.values()
        for labels, points in panel.items()
        if any(math.isnan(point.x) for point in points)
    }
    lines = [f"Horizontal lines: no {data.spec.x}: {listed(without)}."] if without else []
    return [f"{runs}{band}.", *lines, *data.notes[:_NOTES], *more]
