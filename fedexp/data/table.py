"""A table for the terminal: the number of samples of each client and class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

MAX_ROWS, MAX_CLASSES = 40, 20
_EDGE = 5  # number of clients shown at each end of a long list


def partition_table(counts: np.ndarray) -> Table:
    """Build the table of each client's samples per class, with sizes and totals.

    With more than 40 clients, the table has the first and last five clients, and
    quantiles over all clients. With more than 20 classes, the table has one column with
    each client's largest classes, instead of one column per class.

    Args:
        counts: Class counts of shape (clients, classes), int64.
    """
    from rich import box
    from rich.table import Table

    clients, classes = counts.shape
    sizes, held = counts.sum(axis=1), (counts > 0).sum(axis=1)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", justify="right")
    table.add_column("size", justify="right", style="bold")
    table.add_column("classes", justify="right")

    wide = classes <= MAX_CLASSES
    for k in range(classes) if wide else ():
        table.add_column(str(k), justify="right")
    if not wide:
        table.add_column("largest classes (class: samples)")

    def add(name: str, values: np.ndarray, size: int, distinct: int) -> None:
        if wide:
            cells = [_cell(value) for value in values]
        else:
            most = [k for k in np.argsort(-values, kind="stable")[:6] if values[k]]
            cells = [
                ", ".join(f"{k}: {values[k]:,}" for k in most)
                + (", ..." if distinct > len(most) else "")
            ]
        table.add_row(name, f"{size:,}", str(distinct), *cells)

    def add_clients(which: range) -> None:
        for client in which:
            add(str(client), counts[client], int(sizes[client]), int(held[client]))

    if clients <= MAX_ROWS:
        add_clients(range(clients))
    else:
        add_clients(range(_EDGE))
        table.add_row("...", "", "", *([""] * (classes if wide else 1)))
        add_clients(range(clients - _EDGE, clients))

        table.add_section()
        for name, share in (
            ("min", 0.0),
            ("25 %", 0.25),
            ("median", 0.5),
            ("75 %", 0.75),
            ("max", 1.0),
        ):
            quantile = np.quantile(counts, share, axis=0, method="nearest") if wide else None
            cells = [_cell(value) for value in quantile] if quantile is not None else [""]
            size, distinct = (
                np.quantile(values, share, method="nearest") for values in (sizes, held)
            )
            table.add_row(name, f"{int(size):,}", str(int(distinct)), *cells)

    table.add_section()
    total = counts.sum(axis=0)
    add("total", total, int(sizes.sum()), int((total > 0).sum()))
    return table


def _cell(value: int) -> str:
    return f"{int(value):,}" if value else "[dim]·[/dim]"
