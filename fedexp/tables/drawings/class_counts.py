"""Heat maps of the number of samples per class and client.

FedSyn's Figures 4 and 5 are such maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from fedexp.core.errors import StorageError
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.report import canvas
from fedexp.tables.report.report import Picture


@dataclass(frozen=True)
class ClassCountsDrawing(Drawing):
    """The class counts of each client, with one panel per row of the table.

    A panel shows the data split of the row's lowest seed as a grid. The grid has one
    line per class and one column per client. Each field shows how many samples of the
    class the client has. The darkness of the field grows with the square root of this
    number.

    Args:
        title: Title of the picture.
        name: Part of the picture's file name.
    """

    title: str
    name: str = "class_counts"

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        # All methods of a row have the same split for the same seed.
        rows: dict[tuple[Any, ...], DrawnRun] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            rows.setdefault(tuple(run.conditions.items()), run)
        if not rows:
            return ()

        with canvas.use_style():
            shown = [
                (run, split_class_counts(run))
                for run in sorted(rows.values(), key=lambda run: list(run.conditions.values()))
            ]
            clients, classes = (max(table.shape[axis] for _, table in shown) for axis in (0, 1))
            figure = canvas.figure(
                len(shown) * max(2.4, 0.42 * clients + 0.8), max(2.0, 0.24 * classes + 0.9)
            )

            for at, (run, table) in enumerate(shown):
                axes = canvas.axes(figure, 1, len(shown), at + 1)
                _map(axes, table)
                where = canvas.wrapped_conditions(
                    list(run.conditions), list(run.conditions.values()), 40
                )
                canvas.set_title(axes, f"{where}\nseed {run.seed}")

            return (canvas.render_picture(self.name, self.title, figure, notes),)


def split_class_counts(run: DrawnRun) -> np.ndarray:
    """Return the class counts of a run's split.

    The split is sampled again and compared with the stored one.

    Returns:
        Counts of shape (clients, classes), int64.

    Raises:
        StorageError: The sampled split differs from the stored one.
    """
    from fedexp.running.experiment import load_data

    data = load_data(run.config)
    stored = run.result["partition"]["sha256"]
    if data.partition.sha256 != stored:
        raise StorageError(
            "the split that is sampled now is not the run's",
            where=str(run.folder / "partition.safetensors"),
            expected=stored,
            got=data.partition.sha256,
            do="run it again",
        )
    return data.class_counts()


def _map(axes: Axes, table: np.ndarray) -> None:
    root = np.sqrt(table.T)
    axes.imshow(root, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    for (k, client), share in np.ndenumerate(root / max(1.0, root.max())):
        if share:
            colour = "white" if share > 0.6 else "black"
            axes.text(
                client, k, f"{table[client, k]}", ha="center", va="center", fontsize=7, color=colour
            )
    axes.set_xticks(range(table.shape[0]))
    axes.set_yticks(range(table.shape[1]))
    axes.set_xlabel("client")
    axes.set_ylabel("class")
