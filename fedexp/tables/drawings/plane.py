"""A method's path through parameter space, drawn over the test loss.

Path and loss are shown on the plane through the method's first three iterates, which
are its parameter vectors after 0, 1 and 2 iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.trees import Tree
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.stored import by_row, passed, split_vector, vector_of
from fedexp.tables.report import canvas
from fedexp.tables.report.report import Picture

Loss = Callable[[Tree], float]

# Number of colour levels. All levels cover equal areas of the surface.
_LEVELS = 16
# Minimum distance between annotated points. Coordinates are divided by the width and
# height of the surface first.
_CLEAR = 0.045


@dataclass(frozen=True)
class Plane(Drawing):
    """A picture of the test loss in colours, with the path of a method as a line.

    An iterate g^t is the vector of all parameters after t iterations. The picture shows
    the plane through the first three iterates. The line joins the projections of the
    iterates onto this plane. Each point is annotated with its t, unless another
    annotated point is too close.

    Args:
        method: Column whose run is drawn. The run must store its models after 0, 1 and
            2 iterations, and may store more. The key ``trace.weights`` lists these
            iterations.
        series: Models of the run that are drawn: MA-Echo's fused model ``W``, or the
            mean ``mean_v`` of the clients' models.
        resolution: Number of points along each side of the surface. The loss is
            computed at resolution x resolution points.
        images: Number of test images for the loss. The first images are used.
        margin: Margin of the surface around the path, as a fraction of the path's
            extent.
    """

    method: str
    series: str = "W"
    resolution: int = 25
    images: int = 2000
    margin: float = 0.3

    def __post_init__(self) -> None:
        require(self.resolution >= 2, f"resolution must be at least 2, got {self.resolution}")
        require(self.images >= 1, f"images must be at least 1, got {self.images}")
        require(self.margin >= 0, f"margin must not be negative, got {self.margin}")

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        with canvas.use_style():
            return tuple(
                self._picture(where, group[self.method], notes)
                for where, group in by_row(runs)
                if self.method in group
            )

    def _picture(self, where: str, run: DrawnRun, notes: Sequence[str]) -> Picture:
        steps = {step: models[0] for step, models in passed(run, self.series).items()}

        if list(steps)[:3] != [0, 1, 2]:
            raise StorageError(
                "the plane needs iterations 0, 1 and 2, and not all of them are stored",
                where=str(run.folder / "trace"),
                got=list(steps),
                do="add them to trace.weights",
            )

        loss = test_loss(run.config, self.images)
        iterates = {step: vector_of(params) for step, params in steps.items()}
        origin, like = iterates[0], steps[0]

        basis = plane(origin, iterates[1], iterates[2])
        path = torch.stack([(g - origin) @ basis.T for g in iterates.values()])
        xs, ys = (around(path[:, axis], self.margin, self.resolution) for axis in (0, 1))
        surface = [
            [loss(split_vector(origin + x * basis[0] + y * basis[1], like)) for x in xs] for y in ys
        ]
        last = list(steps)[-1]
        real = [loss(steps[t]) for t in (0, last)]
        seen = [loss(split_vector(origin + path[i] @ basis, like)) for i in (0, -1)]

        title = (
            f"Test loss (first {self.images:,} images) on the plane of the first three "
            f"iterates of {self.series}, and their "
            f"path. Loss at t = 0: {real[0]:.3g}; at t = {last}: {real[1]:.3g}, and "
            f"{seen[1]:.3g} at its projection"
            f"{where and f' ({where})'}"
        )

        figure = _surface_figure(
            xs, ys, torch.tensor(surface, dtype=torch.float64), path, list(steps)
        )

        return canvas.render_picture(canvas.picture_name("plane", where), title, figure, notes)


def plane(g0: Tensor, g1: Tensor, g2: Tensor) -> Tensor:
    """Return an orthonormal basis (2, n) of the plane through the points g0, g1, g2.

    Each point has shape (n,). The first basis vector is along g1 - g0. The second one
    is along the part of g2 - g0 that is orthogonal to the first.
    """
    u, v = g1 - g0, g2 - g0
    first = u.norm()
    if first == 0 or (v - (v @ u) / first**2 * u).norm() <= 1e-9 * v.norm():
        raise StorageError("the first three iterates are on a line, so they span no plane")
    u = u / first
    v = v - (v @ u) * u
    return torch.stack([u, v / v.norm()])


def around(values: Tensor, margin: float, count: int) -> list[float]:
    """Return equidistant numbers that cover the range of values and a margin.

    Args:
        values: The values.
        margin: The margin on each side, as a fraction of the range.
        count: Number of returned numbers, at least 2.
    """
    low, high = float(values.min()), float(values.max())
    beyond = margin * (high - low)
    return [
        float(v) for v in torch.linspace(low - beyond, high + beyond, count, dtype=torch.float64)
    ]


def test_loss(config: ResolvedConfig, images: int) -> Loss:
    """Return a function that computes the loss on the first test images.

    The function takes parameters of the model in the config. The test images are from
    the data set in the config.
    """
    from fedexp.core.data import Samples
    from fedexp.core.outcome import Outcome
    from fedexp.core.weights import Weights
    from fedexp.evaluation.evaluate import Evaluator
    from fedexp.running.experiment import Experiment

    experiment = Experiment.of(config)
    spec = experiment.specs.server
    cpu = torch.device("cpu")
    test = experiment.prepare(experiment.load(cpu), lambda text: None).test
    part = Samples(test.x[:images], test.y[:images], test.mean, test.std, dtype=test.dtype)
    evaluator = Evaluator(experiment.task, experiment.config.eval.batch_size)
    if Weights.init(spec, 0, cpu, part.dtype).buffers:
        raise StorageError(
            "the model has buffers, and a trace stores only parameters", where=spec.arch
        )

    def loss(params: Tree) -> float:
        return evaluator(Outcome((Weights(spec, params, {}),), "global"), part, "test")[
            "test/global/loss"
        ]

    return loss


def _surface_figure(
    xs: Sequence[float], ys: Sequence[float], surface: Tensor, path: Tensor, steps: Sequence[int]
) -> Figure:
    figure = canvas.figure(6.0, 4.8)
    axes = canvas.axes(figure, 1, 1, 1)
    levels = sorted(
        set(
            surface.flatten()
            .quantile(torch.linspace(0, 1, _LEVELS + 1, dtype=surface.dtype))
            .tolist()
        )
    )
    if len(levels) < 2:
        raise StorageError("the test loss is the same on the whole plane")
    colours: dict[str, Any] = {"cmap": "viridis", "norm": BoundaryNorm(levels, 256)}
    filled = axes.contourf(xs, ys, surface.numpy(), levels=levels, **colours)
    # Without this, browsers show seams between the colours.
    filled.set_edgecolor("face")
    axes.grid(visible=False)
    bar = figure.colorbar(
        filled,
        ax=axes,
        label="test loss (nats)",
        spacing="uniform",
        ticks=levels[::2],
        format=FuncFormatter(lambda v, _: f"{v:.3g}"),
    )
    bar.ax.tick_params(colors=canvas.INK, labelsize=8.5)
    bar.ax.yaxis.label.set_color(canvas.INK)
    axes.plot(
        path[:, 0],
        path[:, 1],
        color="white",
        linewidth=1.4,
        marker="o",
        markersize=4,
        markeredgecolor="black",
    )
    for at in _apart(path / torch.tensor([xs[-1] - xs[0], ys[-1] - ys[0]]), _CLEAR):
        axes.annotate(
            f"{steps[at]}",
            (float(path[at, 0]), float(path[at, 1])),
            xytext=(4, 4),
            textcoords="offset points",
            color="white",
            fontsize=8,
        )
    axes.set_xlabel("along g¹ - g⁰")
    axes.set_ylabel("orthogonal to it, in the plane with g² - g⁰")
    return figure


def _apart(points: Tensor, least: float) -> list[int]:
    """Choose points that are at least `least` apart, and return their indices.

    The last point is chosen first. Then the others are tried from first to last.
    """
    chosen = [len(points) - 1]
    for at in range(len(points) - 1):
        if min(float((points[at] - points[other]).norm()) for other in chosen) >= least:
            chosen.append(at)
    return chosen
