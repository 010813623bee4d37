"""A picture of the trials of a study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedexp.tuning.objective import Objective
from fedexp.tuning.space import Choice, Range
from fedexp.tuning.study import TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, which colour-blind readers can distinguish. States also
# differ in their markers.
_STYLES = {
    "done": ("#0072B2", "o"),
    "stopped": ("#999999", "v"),
    "failed": ("#D55E00", "x"),
}
_BEST = "#E69F00"
_COLUMNS = 3


def draw_trials(
    rows: Sequence[TrialRow],
    best: TrialRow | None,
    space: Sequence[Range],
    objective: Objective,
    path: Path,
    title: str,
) -> None:
    """Draw one PNG with a panel per key, and a panel with the trials in their order.

    Args:
        rows: Trials of the study.
        best: Best trial, or None.
        space: Ranges of the study.
        objective: Number on the vertical axes.
        path: File to write.
        title: Description of the study.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.state in _STYLES]
    count = len(space) + 1
    lines, columns = math.ceil(count / _COLUMNS), min(count, _COLUMNS)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10, parse_math=False, wrap=True)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()

    for axes, one in zip(panels, [*space, None], strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25)
        _draw_points(axes, shown, best, one)
        if one is None:
            _draw_best_so_far(axes, shown, objective)
        else:
            _scale(axes, one)
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in figure.axes[::columns]:
        axes.set_ylabel(objective.text, parse_math=False)

    handles, labels = figure.axes[count - 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=110, format="png")


def _draw_points(
    axes: Axes, rows: Sequence[TrialRow], best: TrialRow | None, one: Range | None
) -> None:
    """Draw the trials over the values of a key, or over their numbers."""

    def position(row: TrialRow) -> float:
        return row.number if one is None else one.position(row.point[one.key])

    for state, (colour, marker) in _STYLES.items():
        found = [row for row in rows if row.state == state]
        # A failed trial has no value. It is drawn at the lower edge of the panel.
        failed = state == "failed"
        if found:
            axes.scatter(
                [position(row) for row in found],
                [0.03 if row.value is None else row.value for row in found],
                transform=axes.get_xaxis_transform() if failed else axes.transData,
                color=colour,
                marker=marker,
                s=34,
                label=state,
                zorder=3,
                clip_on=False,
            )
    if best is not None and best.value is not None:
        axes.scatter(
            [position(best)],
            [best.value],
            facecolors="none",
            edgecolors=_BEST,
            linewidths=2,
            s=130,
            label="best",
            zorder=4,
        )


def _scale(axes: Axes, one: Range) -> None:
    """Set the scale, ticks and label of a key's axis."""
    axes.set_xlabel(one.key, parse_math=False)
    if not isinstance(one, Choice):
        if one.log:
            axes.set_xscale("log")
        pad = (one.high / one.low) ** 0.04 if one.log else 0.04 * (one.high - one.low)
        low, high = (one.low / pad, one.high * pad) if one.log else (one.low - pad, one.high + pad)
        axes.set_xlim(low, high)
        for edge in (one.low, one.high):
            axes.axvline(edge, color="0.6", linewidth=0.8, linestyle=":")
        return

    numbers = one.numbers
    if numbers is not None and min(numbers) > 0 and max(numbers) / min(numbers) > 10:
        axes.set_xscale("log")
    axes.minorticks_off()
    axes.margins(x=0.12)
    axes.set_xticks([one.position(value) for value in one.values], one.values)


def _draw_best_so_far(axes: Axes, rows: Sequence[TrialRow], objective: Objective) -> None:
    choose = max if objective.higher_is_better else min
    best: float | None = None
    steps: list[tuple[int, float]] = []
    for row in rows:
        if row.state == "done" and row.value is not None:
            best = row.value if best is None else choose(best, row.value)
        if best is not None:
            steps.append((row.number, best))
    if steps:
        axes.step(
            *zip(*steps, strict=True), where="post", color="0.3", linewidth=1.2, label="best so far"
        )
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("trial")
