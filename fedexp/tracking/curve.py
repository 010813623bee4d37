"""The curve picture of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """One PNG: what is compared (accuracies) on the left, losses on the right, over rounds.

    Args:
        rows: at least one row of metrics.jsonl.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = sorted({name for row in rows for name in row})
    losses = [name for name in names if name.endswith("/loss") or name.endswith("/loss_mean")]
    scores = [
        name for name in names if name.startswith(("test/", "val/")) and "loss" not in name and "_std" not in name
    ]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title if len(title) < 110 else title[:107] + "...", fontsize=10)
    for position, (group, label) in enumerate(((scores, "score"), (losses, "loss")), start=1):
        axes = figure.add_subplot(1, 2, position)
        for name in group:
            points = [(row["round"], row[name]) for row in rows if name in row]
            axes.plot(
                *zip(*points, strict=True),
                marker="o" if len(points) <= 25 else None,
                markersize=3,
                linewidth=1.4,
                label=name,
            )
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if group:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
