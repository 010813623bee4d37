"""A picture of a partition: the number of samples of each client and class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Colormap

# Largest number of clients in the picture. If there are more, evenly spaced clients are
# shown
MAX_ROWS = 200
_INK, _MUTED, _BAR = "#1f2933", "#66727f", "#4a6fa5"


def draw_partition(counts: np.ndarray, path: Path, title: str = "") -> None:
    """Write a PNG with a map of the clients' class counts and bars of their sizes.

    Cells show their counts if they are large enough to read. Colour follows the square
    root of the count, so that small shares remain visible. White means a count of 0.

    Args:
        counts: Class counts of shape (clients, classes), int64.
        path: Path of the PNG. Its folder is created.
        title: One line above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = np.arange(0, len(counts), max(1, -(-len(counts) // MAX_ROWS)))
    shown = counts[rows]
    clients, classes = shown.shape

    cell_height = 0.42 if clients <= 12 else 0.26 if clients <= 30 else max(0.085, 8.5 / clients)
    cell_width = 0.62 if classes <= 12 else 0.4 if classes <= 26 else max(0.09, 10.5 / classes)

    map_width = min(max(cell_width * classes, 3.2), 14.0)
    map_height = min(max(cell_height * clients, 1.6), 16.0)

    left, right, bar, gap, bottom, top = 0.85, 1.25, 1.6, 0.15, 0.62, 0.9
    width, height = left + map_width + gap + bar + right, bottom + map_height + top

    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)

    image_axes = figure.add_axes(
        (left / width, bottom / height, map_width / width, map_height / height)
    )

    draw_map(image_axes, shown, rows, counts, cell=(map_width / classes, map_height / clients))

    bar_axes = figure.add_axes(
        ((left + map_width + gap) / width, bottom / height, bar / width, map_height / height),
        sharey=image_axes,
    )
    _draw_sizes(bar_axes, shown.sum(axis=1), labelled=map_height / clients >= 0.2)

    scale = min(map_height, 2.6)
    scale_axes = figure.add_axes(
        (
            (width - 0.85) / width,
            (bottom + map_height - scale) / height,
            0.13 / width,
            scale / height,
        )
    )
    _draw_scale(figure.colorbar(image_axes.images[0], cax=scale_axes), int(max(1, counts.max())))

    figure.text(
        left / width,
        1 - 0.2 / height,
        title,
        ha="left",
        va="top",
        fontsize=11,
        color=_INK,
        weight="bold",
    )
    figure.text(
        left / width,
        1 - 0.48 / height,
        _summary(counts, clients),
        ha="left",
        va="top",
        fontsize=9,
        color=_MUTED,
    )

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _summary(counts: np.ndarray, shown: int) -> str:
    sizes = counts.sum(axis=1)
    held = (counts > 0).sum(axis=1)
    text = (
        f"{len(counts):,} clients, {int(sizes.sum()):,} samples; {_span(sizes)} samples "
        f"(median {int(np.median(sizes)):,}) and {_span(held)} of {counts.shape[1]} classes each"
    )
    return text + (f"; {shown} clients drawn" if shown < len(counts) else "")


def _span(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _ticks(n: int, length: float) -> np.ndarray:
    """Return positions from 0 to n - 1 at round steps, at most one per 0.24 inches.

    `length` is the length of the axis in inches.
    """
    steps = (1, 2, 5, 10, 20, 25, 50, 100, 200, 500)
    return np.arange(0, n, next((step for step in steps if n / step * 0.24 <= length), steps[-1]))


def draw_map(
    axes: Axes, shown: np.ndarray, rows: np.ndarray, counts: np.ndarray, cell: tuple[float, float]
) -> None:
    """Draw class counts as a map.

    Args:
        axes: Axes of the map.
        shown: Class counts of the shown clients, (rows, classes), int64.
        rows: Indices of the shown clients.
        counts: Class counts of all clients. The largest one has the darkest colour.
        cell: Width and height of a cell in inches.
    """
    classes = shown.shape[1]
    root = np.sqrt(shown)
    top = float(np.sqrt(max(1, counts.max())))
    axes.imshow(
        np.where(shown > 0, root, np.nan),
        cmap=_colours(),
        vmin=0,
        vmax=top,
        aspect="auto",
        interpolation="nearest",
    )

    for axis, name, labels, length in (
        (axes.xaxis, "class", [str(k) for k in range(classes)], cell[0]),
        (axes.yaxis, "client", [f"{row:,}" for row in rows], cell[1]),
    ):
        ticks = _ticks(len(labels), length * len(labels))
        axis.set_ticks(ticks, [labels[t] for t in ticks])
        axis.set_label_text(name, color=_INK, fontsize=9)
        if length >= 0.08:  # thin white lines between rows and columns of cells
            axis.set_ticks(np.arange(-0.5, len(labels)), minor=True)
            axis.grid(which="minor", color="#e6eaee", linewidth=min(0.6, 4 * length))

    axes.tick_params(length=0, labelsize=8, labelcolor=_INK)

    for spine in axes.spines.values():
        spine.set_color("#c5ccd3")

    axes.tick_params(which="minor", length=0)

    digits = len(str(int(counts.max())))
    if cell[1] < 0.2 or cell[0] < 0.09 * digits + 0.08:
        return

    for i, j in zip(*np.nonzero(shown), strict=True):
        axes.text(
            j,
            i,
            str(shown[i, j]),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if root[i, j] > 0.55 * top else _INK,
        )


def _draw_sizes(axes: Axes, sizes: np.ndarray, labelled: bool) -> None:
    axes.barh(
        np.arange(len(sizes)),
        sizes,
        height=0.72 if len(sizes) <= 60 else 1.0,
        color=_BAR,
        linewidth=0,
    )

    most = int(max(1, sizes.max()))
    axes.set_xlim(0, most * (1.42 if labelled else 1.05))
    axes.set_xticks([0, most], ["0", f"{most:,}"])
    axes.set_xlabel("samples", color=_INK, fontsize=9)
    axes.tick_params(length=0, labelsize=8, labelcolor=_INK, labelleft=False)
    axes.tick_params(which="minor", length=0)

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c5ccd3")

    if labelled:
        for i, size in enumerate(sizes):
            axes.text(size + most * 0.03, i, f"{size:,}", va="center", fontsize=8, color=_INK)


def _draw_scale(scale: Colorbar, most: int) -> None:
    values = {1, most}
    # Round numbers in between
    for share in (0.1, 0.4):
        unit = 10 ** (len(str(max(1, int(most * share)))) - 1)
        values.add(max(1, round(most * share / unit) * unit))

    scale.set_ticks(
        np.sqrt(sorted(values)).tolist(), labels=[f"{value:,}" for value in sorted(values)]
    )
    scale.outline.set_edgecolor("#c5ccd3")
    scale.ax.tick_params(length=2, labelsize=7, color="#c5ccd3", labelcolor=_INK)
    scale.ax.set_title("count", fontsize=7.5, color=_MUTED, pad=7, loc="left")


def _colours() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(
        "counts", ["#e4f0f5", "#7fb6cf", "#2f7da8", "#0d4270"]
    ).with_extremes(bad="white")
