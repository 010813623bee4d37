"""A picture with the curves of a run: its metrics over rounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of metrics, by the beginning of their names. Legends list the metrics in this
# order.
_COLOURS = {
    "test/global": "tab:blue",
    "test/ensemble": "tab:orange",
    "test/local": "tab:green",
    "test": "tab:purple",
    "val": "tab:red",
    "traced": "tab:pink",
    "train": "0.45",
    "synthesis": "tab:olive",
}
_MARKED = 25  # maximum number of points with markers. More markers would hide the line
# The loss axis is logarithmic if the largest loss is more than this many times the
# smallest loss.
_LOG_RATIO = 100
_LARGEST = 1e300  # size up to which a number is usable
_TITLE_WIDTH, _TITLE_LINES = 110, 2
_LINE_INCHES = 0.17  # height of one line of the title or of a legend


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw one PNG with scores (accuracies) on the left and losses on the right.

    The x axis shows rounds, or steps if a round has several steps. A single row is
    drawn as bars. A panel without metrics is left out.

    Args:
        rows: At least one row of metrics.jsonl. A row may lack metrics that were not
            measured in its round.
        path: File to write.
        title: Description of the run. A long title is wrapped, and cut after two lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axis = "round" if len({row["round"] for row in rows}) == len(rows) else "step"
    names = sorted({name for row in rows for name in row}, key=_rank)
    shown = [name for name in names if not name.endswith("_std") and "_of_class_" not in name]
    losses = [name for name in shown if "loss" in name.rpartition("/")[2]]
    scores = [
        name
        for name in shown
        if name.startswith(("test/", "val/", "traced/")) and name not in losses
    ]

    panels = [(label, group) for label, group in (("score", scores), ("loss", losses)) if group]
    lines = textwrap.wrap(title, _TITLE_WIDTH, max_lines=_TITLE_LINES, placeholder=" ...")
    legend_rows = max((math.ceil(len(group) / 2) for _, group in panels), default=0)
    above = _LINE_INCHES * (len(lines) + legend_rows + 0.7)
    height = max(3.8, above + 2)
    if len(rows) > 1:
        # The constrained layout draws every text twice. That takes 40 % of the time.
        figure = Figure(figsize=(9, height))
        figure.subplots_adjust(
            left=0.075, right=0.985, bottom=0.48 / height, top=1 - above / height, wspace=0.2
        )
    else:
        # The bars are labelled with the names of metrics, whose widths differ.
        figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(lines), y=1 - 0.06 / height, fontsize=9, parse_math=False)

    for position, (label, group) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), position)
        axes.spines[["top", "right"]].set_visible(False)
        points = {
            name: [(row[axis], float(row[name])) for row in rows if name in row] for name in group
        }
        if len(rows) == 1:
            _bars(axes, {name: values[0][1] for name, values in points.items()}, label)
        else:
            _lines(axes, points, label, axis)

    if not panels:
        figure.text(0.5, 0.5, "nothing was measured", ha="center")
    figure.savefig(path, dpi=110)


def is_usable(value: float) -> bool:
    """Return whether a number is finite and not huge.

    Means, intervals and the limits of axes overflow if they contain huge numbers.
    """
    return math.isfinite(value) and abs(value) <= _LARGEST


def _lines(axes: Axes, points: dict[str, list[tuple[int, float]]], label: str, axis: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, values in points.items():
        few = len(values) <= _MARKED
        axes.plot(
            [place for place, _ in values],
            [value if is_usable(value) else math.nan for _, value in values],
            color=_colour(name),
            linestyle=":" if name.endswith("_min") else "-",
            marker="o" if few else None,
            markersize=3,
            linewidth=1.4 if few else 1.0,
            label=f"{name}  {values[-1][1]:.4g}",
        )

    drawn = [value for values in points.values() for _, value in values if is_usable(value)]
    if label == "loss" and drawn and min(drawn) > 0 and max(drawn) / min(drawn) > _LOG_RATIO:
        axes.set_yscale("log")

    axes.set_xlabel(axis)
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(visible=True, alpha=0.25)
    # The legend is above the panel, so that it hides no curve. The numbers in it are
    # the last measured values.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        fontsize=7.5,
        frameon=False,
        borderaxespad=0.2,
    )


def _bars(axes: Axes, values: dict[str, float], label: str) -> None:
    lengths = [value if is_usable(value) else 0.0 for value in values.values()]
    bars = axes.barh(list(values), lengths, color=[_colour(name) for name in values], height=0.6)
    labels = [f"{value:.4g}" for value in values.values()]
    axes.bar_label(bars, labels=labels, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(max(len(values), 3) - 0.4, -0.6)  # bars are slim even if they are few
    axes.margins(x=0.15)
    axes.tick_params(axis="y", labelsize=8, length=0)
    axes.set_xlabel(f"{label} after one round")


def _kind(name: str) -> str:
    """Return the longest key of `_COLOURS` with which a metric's name begins.

    If it begins with no key, return the part of the name before the first slash.
    """
    fitting = [kind for kind in _COLOURS if name.startswith(f"{kind}/")]
    return max(fitting, key=len, default=name.partition("/")[0])


def _colour(name: str) -> str:
    return _COLOURS.get(_kind(name), "tab:brown")


def _rank(name: str) -> tuple[int, str]:
    ranks = {kind: rank for rank, kind in enumerate(_COLOURS)}
    return ranks.get(_kind(name), len(ranks)), name
