"""Functions for pictures: colours, panels, legends, and rendering as SVG and PNG.

The same figure is always rendered to the same bytes.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from fedexp.tables.report import layout
from fedexp.tables.report.picture_sizes import SMALLEST_FONT, with_sizes
from fedexp.tables.report.report import (
    Colour,
    Dash,
    Marker,
    Picture,
    PlotStyle,
    Report,
    Role,
    Value,
)

# Mid-tones with a contrast of at least 3:1 on white and on the page's dark background.
# Series also differ in their markers, so colour-blind readers can distinguish them.
COLOURS: Mapping[Colour, str] = {
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009473",
    "pink": "#bf5f96",
    "ochre": "#a37800",
    "grey": "#7f7f7f",
    "violet": "#8b5fd6",
    "brick": "#b5483c",
}
DASHES: Mapping[Dash, Any] = {
    "solid": "-",
    "dashed": (0, (5, 1.5)),
    "dotted": (0, (1.2, 1)),
    "dashdot": (0, (6, 1.5, 1.2, 1.5)),
}
# Colours of text and lines in the PNG. In the SVG, both are replaced by the colour of
# the text around the picture. The picture then follows the page's theme.
INK, FAINT = "#1b1f26", "#c4c9d1"
_FAINTNESS = 0.2
_SALT = "fedexp"
_DPI = 160
# Largest number of letters in a label.
_LONGEST = 32
# Number of different pairs of marker and dash. If there are more series, pairs repeat.
_DISTINCT_STYLES = 48


@contextmanager
def use_style() -> Iterator[None]:
    """Use fedexp's settings of matplotlib instead of the user's matplotlibrc."""
    settings: dict[Any, Any] = {
        "svg.hashsalt": _SALT,
        "svg.fonttype": "path",
        # TrueType fonts. Publishers refuse Type 3 fonts, matplotlib's default.
        "pdf.fonttype": 42,
        # With hinting, the width of a text depends on the resolution. A text would then
        # need more space in a picture than in the layout.
        "text.hinting": "none",
        "font.size": 9.0,
        "legend.fontsize": 9.0,
    }
    with style.context("default"), mpl.rc_context(settings):
        yield


def default_style(at: int) -> PlotStyle:
    """Return the style of a series for which no style is declared.

    Marker and dash are enough to distinguish 48 series.

    Args:
        at: Number of the series among those without a style.
    """
    markers, dashes = get_args(Marker), get_args(Dash)
    turn = at // len(markers)
    return PlotStyle(
        list(COLOURS)[at % len(COLOURS)],
        markers[at % len(markers)],
        dashes[(at + turn) % len(dashes)],
    )


def distinct_styles(own: Iterable[PlotStyle | None]) -> list[PlotStyle]:
    """Give every series without a style a style that no other series has.

    If there are more than 48 series, styles repeat.
    """
    given = list(own)
    taken = {(plot_style.marker, plot_style.dash) for plot_style in given if plot_style is not None}
    free = (
        new
        for at in itertools.count()
        if ((new := default_style(at)).marker, new.dash) not in taken or at >= _DISTINCT_STYLES
    )
    return [next(free) if one is None else one for one in given]


def line_properties(plot_style: PlotStyle, role: Role = "baseline") -> dict[str, Any]:
    """Return the properties of a line in matplotlib.

    The proposed method has a thicker line. Reference baselines and local models have
    thinner, paler lines.
    """
    width, size, alpha = {
        "proposed": (2.4, 6.0, 1.0),
        "reference": (1.0, 4.0, 0.6),
        "local": (1.0, 4.0, 0.6),
    }.get(role, (1.4, 4.5, 0.9))
    return {
        "color": COLOURS[plot_style.colour],
        "marker": plot_style.marker,
        "linestyle": DASHES[plot_style.dash],
        "linewidth": width,
        "markersize": size,
        "alpha": alpha,
        "zorder": {"proposed": 4, "reference": 2, "local": 2}.get(role, 3),
    }


def picture_name(kind: str, where: str) -> str:
    """Return the name of a picture, which can be part of a file name.

    The name is the picture's kind. If `where` is not empty, it is appended. It tells
    which runs the picture shows.
    """
    return "-".join(filter(None, [kind, re.sub(r"[^\w.]+", "-", where).strip("-")]))


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def axes(figure: Figure, down: int, across: int, at: int, sharey: Axes | None = None) -> Axes:
    """Add panel `at`, counted from 1, to a figure of `down` x `across` panels."""
    axes = figure.add_subplot(down, across, at, sharey=sharey)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=8.5)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    return axes


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with labels 0.1, 1, 10 instead of powers of ten."""
    axes.set(**{f"{which}scale": "log"})
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def spans_decades(values: Iterable[float], decades: float) -> bool:
    """Return whether positive values span more than a number of decades."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite) / min(finite)) > decades


def has_log_scale(report: Report, values: Iterable[float], decades: float) -> bool:
    """Return whether numbers of a report are drawn on a logarithmic axis.

    They are if they are positive and span more than a number of decades. Percentages
    are always on a linear axis, because readers compare their differences, not their
    ratios.
    """
    return report.unit != "percent" and spans_decades(values, decades)


def panels(count: int, x_label: str, y_label: str) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels that share their vertical axis.

    Only the lowest panels name the horizontal axis, and only the leftmost panels name
    the vertical axis.

    Args:
        count: Number of panels, at least one.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
    """
    across = panels_across(count)
    down = -(-count // across)
    made = figure(7.4 if across > 1 else 5.2, 2.7 * down + 0.6)
    found: list[Axes] = []
    for at in range(count):
        found.append(axes(made, down, across, at + 1, sharey=found[0] if found else None))
        if at >= count - across:
            found[at].set_xlabel(x_label, parse_math=False)
        if at % across == 0:
            found[at].set_ylabel(y_label, parse_math=False)
    return made, found


def panels_across(count: int) -> int:
    """Return how many of a figure's panels are beside each other."""
    return min(count, 2 if count <= 4 else 3)


def set_title(axes: Axes, text: str) -> None:
    """Write a title at the left above a panel."""
    axes.set_title(text, fontsize=9, loc="left", parse_math=False, color=INK)


def render_picture(name: str, title: str, figure: Figure, notes: Iterable[str] = ()) -> Picture:
    """Render a figure as SVG and PNG, with notes in small letters below its panels."""
    # An inch has 72 points, and a letter of the notes is about 3.9 points wide.
    letters = int(figure.get_figwidth() * 72 / 3.9)
    wrapped = [part for line in notes for part in textwrap.wrap(line, letters)]
    if wrapped:
        small: dict[str, Any] = {"ha": "left", "fontsize": 7, "color": INK, "parse_math": False}
        _grow(figure, 0.13 * (len(wrapped) - 1))
        figure.supxlabel("\n".join(wrapped), x=0.01, **small)
    engine = figure.get_layout_engine()
    # The layout of a square panel beside a legend is final after the second pass.
    for _ in range(2):
        engine.execute(figure)  # type: ignore[union-attr]
    # The layout is final, and computing it again takes longer than drawing.
    figure.set_layout_engine("none")
    text, data = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # The SVG is transparent. The PNG has a white background.
    size = smallest_font(figure)
    metadata = {"Software": None, SMALLEST_FONT: f"{size:g}"}
    figure.savefig(data, format="png", dpi=_DPI, facecolor="white", metadata=metadata)
    faint = f"stroke: currentColor; stroke-opacity: {_FAINTNESS}"
    svg = text.getvalue().replace(f"stroke: {FAINT}", faint).replace(INK, "currentColor")
    return Picture(name, title, with_sizes(svg, size, 72 * figure.get_figwidth()), data.getvalue())


def render_pdf(figure: Figure, title: str) -> bytes:
    """Render a figure, after `render_picture` has fixed its layout, as PDF."""
    data = io.BytesIO()
    metadata = {"Title": title, "CreationDate": None, "Creator": None, "Producer": None}
    figure.savefig(data, format="pdf", metadata=metadata)
    return data.getvalue()


def smallest_font(figure: Figure) -> float:
    """Return the size in points of the smallest text of a figure."""
    return min(
        (
            float(text.get_fontsize())
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip()
        ),
        default=0.0,
    )


def _grow(figure: Figure, inches: float) -> None:
    figure.set_figheight(figure.get_figheight() + max(0.0, inches))


def wrapped_conditions(keys: Sequence[str], values: Sequence[Value], width: int) -> str:
    """Return conditions in lines of at most `width` letters.

    A condition that is longer than `width` has its own line. Every condition is cut at
    32 letters.
    """
    lines: list[str] = []
    for key, value in zip(keys, values, strict=True):
        text = cut(f"{key} {layout.label(value)}")
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
    return "\n".join(lines)


def plot_label(name: str) -> str:
    """Return a label that matplotlib prints as it is.

    Matplotlib hides labels with a leading underscore, so a zero-width space is put
    before the underscore. Matplotlib typesets text between dollar signs as a formula,
    so dollar signs are escaped. Long labels are cut.
    """
    # The sign of a method that has seen test data (an oracle) is never cut off.
    sign = layout.ORACLE if name.endswith(layout.ORACLE) else ""
    name = name.removesuffix(sign)
    short = (cut(name) + sign).replace("$", r"\$")
    return f"\u200b{short}" if short.startswith("_") else short


def cut(text: str) -> str:
    """Cut a label to at most 32 letters."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Draw a legend above the panels in as many columns as fit.

    The figure grows if the legend has more than two lines, so the panels keep their
    size.
    """
    widest = max(len(str(handle.get_label())) for handle in handles)
    # An entry needs 5.2 points per letter, and 52 points for its line and the gap.
    fitting = int(figure.get_figwidth() * 72 / (5.2 * widest + 52))
    columns = max(1, min(len(handles), fitting))
    _grow(figure, 0.21 * (-(-len(handles) // columns) - 2))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        labelcolor=INK,
        handlelength=3.2,
    )
