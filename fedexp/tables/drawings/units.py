"""A picture of the clients' weights of one layer, embedded in two dimensions by t-SNE.

Each point is one row of the layer's weight matrix in one model. The picture shows
whether rows with the same number in different models are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import StorageError
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.drawings.stored import by_row, evaluated, passed
from fedexp.tables.report import canvas
from fedexp.tables.report.report import Picture

# Sizes of hollow markers. They differ so that coinciding markers stay visible.
_SIZES = (4.2, 5.6, 7.2)


@dataclass(frozen=True)
class Units(Drawing):
    """A picture of the rows of a weight matrix, with one panel per method.

    A panel shows the clients' models V_i after the last stored iteration. A row of one
    model is called met by another model if the nearest row of that model has the same
    number. The second line of a panel's title has the share of met rows (`met`). If the
    accuracy of each V_i on its own client's training data was traced, this line also
    has the mean of these accuracies.

    Args:
        layer: Name of the weight whose rows are drawn.
        perplexity: Perplexity of t-SNE (van der Maaten & Hinton 2008). It is reduced to
            at most a third of the number of rows.
        random_state: Seed of t-SNE.
    """

    layer: str
    perplexity: float = 30.0
    random_state: int = 0

    def __post_init__(self) -> None:
        require(self.perplexity > 0, f"perplexity must be positive, got {self.perplexity}")

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        with canvas.use_style():
            return tuple(
                self._picture(where, list(group.values()), notes) for where, group in by_row(runs)
            )

    def _picture(self, where: str, runs: Sequence[DrawnRun], notes: Sequence[str]) -> Picture:
        across = min(len(runs), 2)
        down = -(-len(runs) // across)
        figure = canvas.figure(3.7 * across, 3.6 * down + 0.3)
        clients = 0
        for at, run in enumerate(runs):
            step, models = list(passed(run, "V", [self.layer]).items())[-1]
            rows = torch.stack([model[self.layer].flatten(1).double() for model in models])
            clients = max(clients, len(rows))
            axes = canvas.axes(figure, down, across, at + 1)
            self._panel(axes, rows)
            own = evaluated(run, step).get("V/train/acc")
            facts = [f"own training data {100 * sum(own) / len(own):.1f} %"] if own else []
            facts.append(f"rows met {100 * met(rows):.0f} %")
            title = f"({chr(ord('a') + at)}) {canvas.plot_label(run.label)}\n{', '.join(facts)}"
            axes.set_title(title, fontsize=9, loc="left", color=canvas.INK)

        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "none", "markersize": 5.5}
        handles = [
            Line2D([], [], label=f"local model {i + 1}", **hollow, **_dot(i))
            for i in range(clients)
        ]
        canvas.legend(figure, handles)
        title = (
            f"t-SNE of the rows of {self.layer}, one marker per row. Own training data: the "
            f"models' mean accuracy on it. Rows met: "
            f"those whose nearest row in another model has their own "
            f"number{where and f' ({where})'}"
        )
        return canvas.render_picture(canvas.picture_name("units", where), title, figure, notes)

    def _panel(self, axes: Axes, rows: Tensor) -> None:
        for at, points in enumerate(self.embed(rows)):
            axes.plot(
                points[:, 0],
                points[:, 1],
                linestyle="none",
                markerfacecolor="none",
                markeredgewidth=0.9,
                markersize=_SIZES[at % len(_SIZES)],
                **_dot(at),
            )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(canvas.FAINT)

    def embed(self, rows: Tensor) -> Tensor:
        """Embed all rows of all models together.

        Args:
            rows: Rows of shape (models, n, d), with n rows of d weights per model.

        Returns:
            Points of shape (models, n, 2).
        """
        from sklearn.manifold import TSNE

        models, n, d = rows.shape
        if models * n < 4:
            raise StorageError("t-SNE needs at least four rows", where=self.layer, got=models * n)
        perplexity = min(self.perplexity, (models * n - 1) / 3)
        made = TSNE(
            n_components=2, perplexity=perplexity, init="pca", random_state=self.random_state
        )
        points: Tensor = torch.from_numpy(made.fit_transform(rows.reshape(-1, d).numpy()))
        return points.reshape(models, n, 2)


def met(rows: Tensor) -> float:
    """Return the share of rows whose nearest row in another model has the same number.

    The share is the mean over all ordered pairs of models. Distances are Euclidean.

    Args:
        rows: Rows of shape (models, n, d), with n rows of d weights per model. There
            are at least two models.
    """
    number = torch.arange(rows.shape[1])
    hits = [
        (torch.cdist(a, b).argmin(1) == number).double().mean()
        for i, a in enumerate(rows)
        for j, b in enumerate(rows)
        if i != j
    ]
    return float(torch.stack(hits).mean())


def _dot(at: int) -> dict[str, Any]:
    plot_style = canvas.default_style(at)
    return {"color": canvas.COLOURS[plot_style.colour], "marker": plot_style.marker}
