"""Picture of a leaderboard: the accuracy of the methods against their costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import BboxBase

from fedexp.analysis.leaderboard import Entry, Leaderboard
from fedexp.tables.report import canvas
from fedexp.tables.report.report import Picture
from fedexp.tracking.terminal import size_text

_WIDTH, _HEIGHT = 7.4, 3.6
_NOTE = (
    "Points are means over the rows that count in ranks. Costs are means over those of these rows "
    "in which they are known. Named methods are not beaten: every other method has a higher cost "
    "or a worse mean. The other methods are grey points."
)

# A point of the picture: cost, mean over the rows, label.
Point = tuple[float, float, str]
# By the label of the axis: a field of `RowResult` that is a cost, and a function that
# formats it.
_COSTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "bytes of a run": ("num_bytes", size_text),
    "seconds of a round": ("round_seconds", "{:g}".format),
}


def picture(board: Leaderboard) -> Picture | None:
    """Draw the accuracy against bytes and, if rounds were timed, against seconds.

    Means are over the rows that count. Methods without results in all of these rows, or
    without the cost, are left out.

    Returns:
        The picture, or None if no method has a cost.
    """
    panels = {
        label: points
        for label, (cost, _) in _COSTS.items()
        if (points := [one for entry in board.entries if (one := _point(board, entry, cost))])
    }
    if not panels:
        return None
    title = f"{board.table.metric.capitalize()} against costs"
    with canvas.use_style():
        figure = canvas.figure(_WIDTH, _HEIGHT)
        higher_is_better = board.table.higher_is_better
        named = []
        for at, (label, points) in enumerate(panels.items()):
            axes = figure.add_subplot(1, len(panels), at + 1)
            axes.set(xlabel=label, ylabel=f"{board.table.metric}, {board.table.unit}")
            _set_cost_axis(axes, points, _COSTS[label][1])
            best = front(points, higher_is_better=higher_is_better)
            _draw(axes, points, best)
            named.append((axes, best))
        figure.draw_without_rendering()  # sets the limits and sizes of the axes
        for axes, best in named:
            name_points(axes, best, higher_is_better=higher_is_better)
        return canvas.render_picture("costs", title, figure, [_NOTE])


def _set_cost_axis(axes: Axes, points: Sequence[Point], text: Callable[[float], str]) -> None:
    """Set the scale and the ticks of the horizontal axis."""
    if canvas.spans_decades([cost for cost, *_ in points], 1):
        canvas.set_log_scale(axes, "x")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def front(points: Sequence[Point], *, higher_is_better: bool) -> list[Point]:
    """Return the points that no other point beats, by ascending cost.

    A point beats another if its cost is not higher, its number is not worse, and one of
    both is better.
    """
    sign = 1 if higher_is_better else -1

    def beats(one: Point, other: Point) -> bool:
        cheaper, better = other[0] - one[0], sign * (one[1] - other[1])
        return cheaper >= 0 and better >= 0 and cheaper + better > 0

    return sorted(point for point in points if not any(beats(other, point) for other in points))


def _point(board: Leaderboard, entry: Entry, cost: str) -> Point | None:
    """Return the point of a method, or None if its cost is not known or 0."""
    mean = board.mean_over_rows(entry, cost)
    return (mean, entry.aggregate.mean.value, entry.label) if mean and entry.aggregate else None


def _draw(axes: Axes, points: Sequence[Point], best: Sequence[Point]) -> None:
    """Draw all points, and a line through the best."""
    for cost, number, label in points:
        named = (cost, number, label) in best
        colour = canvas.COLOURS["blue" if named else "grey"]
        axes.plot(cost, number, "o", markersize=5, color=colour, zorder=3 if named else 2)
    axes.plot(*zip(*[one[:2] for one in best], strict=True), color=canvas.FAINT, zorder=1)
    axes.margins(x=0.1, y=0.1)


def name_points(axes: Axes, points: Sequence[Point], *, higher_is_better: bool) -> None:
    """Write the labels of unbeaten points on their side where no method has a point.

    This is the upper left if higher is better, and the lower left if lower is better. A
    label is at the right of its point if it does not fit into the axes. A label that
    overlaps another one is moved down if higher is better, and otherwise up.
    """
    up = 1 if higher_is_better else -1

    # Make room at the left of all points
    to_data = axes.transAxes + axes.transData.inverted()
    axes.set_xlim(left=max(to_data.transform((-0.4, 0))[0], 0))

    taken: list[BboxBase] = []
    for cost, number, label in sorted(points, key=lambda point: -up * point[1]):
        text = axes.annotate(
            canvas.plot_label(label),
            (cost, number),
            xytext=(-4, 4 * up),
            textcoords="offset points",
            horizontalalignment="right",
            verticalalignment="baseline" if higher_is_better else "top",
            fontsize=8,
            color=canvas.INK,
        )
        if text.get_window_extent().x0 < axes.bbox.x0:
            text.xyann = (4, 4 * up)
            text.set_horizontalalignment("left")
        while any(text.get_window_extent().overlaps(box) for box in taken):
            text.xyann = (text.xyann[0], text.xyann[1] - up)
        taken.append(text.get_window_extent())
