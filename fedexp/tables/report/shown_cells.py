"""The cells of a report as texts, which all output formats print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Cell, Method, Origin, Report


@dataclass(frozen=True)
class ShownRun:
    """One value of a cell, as text.

    Args:
        seed: Seed of the run.
        value: Number of the run.
        delta: Our number minus the paper's, empty if the paper prints none.
        point: Best point of the column's hyper-parameter grid, empty without a grid.
        origin: Origin of the value.
    """

    seed: str
    value: str
    delta: str
    point: str
    origin: Origin


@dataclass(frozen=True)
class ShownCell:
    """A cell of the report as text. A number that does not exist is an empty text.

    Args:
        cell: The cell.
        method: Column of the cell.
        label: Label of the column, as in `layout.marked_labels`.
        conditions: Values of the row's conditions, by key.
        anchor: Identifier on an HTML page. It depends only on conditions and method.
        paper: The paper's number.
        paper_sd: The standard deviation that the paper prints.
        ours: Mean of our runs.
        sd: Sample standard deviation of our runs.
        delta: Our mean minus the paper's number.
        interval: 95 % interval of the difference.
        best_paper: Whether the paper's number is the best of its row.
        best_ours: Whether our mean is the best of its row.
        same_as: Label of another column whose numbers are equal by construction.
        runs: The values behind the mean.
        parts: (metric, numbers) as text. The numbers are those of each class, or the
            mean and the worst 10 % of the clients. Each is a mean over the runs.
    """

    cell: Cell
    method: Method
    label: str
    conditions: Mapping[str, str]
    anchor: str
    paper: str
    paper_sd: str
    ours: str
    sd: str
    delta: str
    interval: str
    best_paper: bool
    best_ours: bool
    same_as: str
    runs: tuple[ShownRun, ...]
    parts: tuple[tuple[str, str], ...]

    @property
    def n(self) -> int:
        """The number of runs."""
        return self.cell.n

    @property
    def published(self) -> str:
        """The paper's number with its standard deviation: ``81.30 ± 0.20``."""
        return f"{self.paper} ± {self.paper_sd}" if self.paper and self.paper_sd else self.paper

    @property
    def measured(self) -> str:
        """Our number: ``mean ± sd (n)``."""
        if not self.ours:
            return ""
        return f"{self.ours} ± {self.sd} ({self.n})" if self.sd else f"{self.ours} ({self.n})"

    @property
    def mark(self) -> str:
        """The sign of the verdict."""
        return texts.verdict_mark(self.cell)

    @property
    def verdict_name(self) -> str:
        """The name of the verdict."""
        return texts.verdict_name(self.cell)

    @property
    def verdict_class(self) -> str:
        """The name of the verdict as a CSS class."""
        return self.cell.verdict.replace(" ", "-")

    @property
    def title(self) -> str:
        """The label, and the conditions with their keys."""
        where = ", ".join(f"{key} {value}" for key, value in self.conditions.items())
        return ", ".join(filter(None, [self.label, where]))

    @property
    def why(self) -> list[str]:
        """The lines that explain the verdict.

        They are the verdict's reason, failed runs, what is smaller than in the paper,
        and the column that this one equals by construction.
        """
        lines = [
            self.cell.reason,
            *(f"failed: {line}" for line in self.cell.failed),
            f"reduced: {self.cell.reduced}" if self.cell.reduced not in self.cell.reason else "",
            f"equals {self.same_as} by construction" if self.same_as else "",
        ]
        return [line for line in lines if line]

    @property
    def flags(self) -> str:
        """The remarks that a reader sees inside the cell."""
        flags = [
            f"⚠ {len(self.cell.failed)} failed" if self.cell.failed else "",
            "reduced" if self.cell.reduced else "",
            "deterministic" if self.cell.deterministic else "",
        ]
        return ", ".join(filter(None, flags))


@dataclass(frozen=True)
class ShownRow:
    """A row of the report as text.

    Args:
        row: The row.
        conditions: Values of the report's keys.
        cells: Cells by method. A method without a cell in this row has an empty tuple.
    """

    row: layout.Row
    conditions: list[str]
    cells: Mapping[str, tuple[ShownCell, ...]]

    def first(self, method: str) -> ShownCell | None:
        """Return the cell of a method, or None if the table has no such cell."""
        return next(iter(self.cells.get(method, ())), None)

    @property
    def rho(self) -> str:
        """Spearman's rank correlation of the row, empty if there is none."""
        agreement = self.row.agreement
        return "" if agreement is None or agreement.rho is None else f"{agreement.rho:.2f}"


def shown_rows(report: Report) -> list[ShownRow]:
    """Return every row of a report as text."""
    places, names = layout.places(report), layout.marked_labels(report)
    methods = layout.by_role(report)
    anchors: set[str] = set()
    shown = []
    for row in layout.rows(report):
        columns = [(method, row.cells_of(method.key)) for method in methods]
        best_paper, best_ours = (
            layout.best(
                ((method.key, getattr(cells[0], side)) for method, cells in columns if cells),
                places,
                higher=report.higher_is_better,
            )
            for side in ("paper", "mean")
        )
        cells = {
            method.key: tuple(
                ShownCell(
                    cell=cell,
                    method=method,
                    label=names.get(method.key, method.key),
                    conditions={key: layout.label(value) for key, value in cell.conditions.items()},
                    anchor=_anchor(cell, anchors),
                    paper="" if cell.paper is None else layout.published(cell.paper, places),
                    paper_sd=_number(cell.paper_sd, places),
                    ours=_number(cell.mean, places),
                    sd=_number(cell.sd, places),
                    delta=_difference(cell.delta, places),
                    interval=texts.interval(cell.interval, places),
                    best_paper=method.key in best_paper,
                    best_ours=method.key in best_ours,
                    same_as=names.get(cell.same_as, cell.same_as),
                    runs=tuple(_shown_runs(cell, places)),
                    parts=tuple(_shown_parts(cell, places)),
                )
                for cell in own
            )
            for method, own in columns
        }
        shown.append(ShownRow(row, texts.conditions(row, report), cells))

    return shown


def shown_cells(report: Report) -> list[ShownCell]:
    """Return every cell of a report as text, in the report's order."""
    shown = {
        id(shown.cell): shown
        for row in shown_rows(report)
        for cells in row.cells.values()
        for shown in cells
    }
    return [shown[id(cell)] for cell in report.cells]


def _shown_runs(cell: Cell, places: int | None) -> Iterator[ShownRun]:
    origins = [*cell.origins, *(Origin("", "") for _ in range(cell.n))]
    for number, (seed, value) in enumerate(zip(cell.seeds, cell.values, strict=True)):
        delta = None if cell.paper is None else value - cell.paper
        point = cell.chosen[number] if cell.chosen else ""
        yield ShownRun(
            str(seed),
            _number(value, places),
            _difference(delta, places),
            point,
            origins[number],
        )


def _shown_parts(cell: Cell, places: int | None) -> Iterator[tuple[str, str]]:
    """Yield metrics of single classes and summaries over clients, with their numbers.

    Examples: ``test/global/acc by class`` with ``0: 91.20, 1: 85.00``, and
    ``val/clients/acc`` with ``mean: 88.00, worst 10 %: 71.00``.
    """
    numbers: dict[str, list[str]] = {}
    for name, value in cell.parts:
        metric, of_class, part = name.partition("_of_class_")
        if not of_class:
            metric, _, part = name.rpartition("_mean" if name.endswith("_mean") else "_worst_10")
            part = "mean" if name.endswith("_mean") else "worst 10 %"
        numbers.setdefault(metric + (" by class" if of_class else ""), []).append(
            f"{part}: {_number(value, places)}"
        )
    for metric, listed in numbers.items():
        yield metric, ", ".join(listed)


def _anchor(cell: Cell, taken: set[str]) -> str:
    """Return an anchor such as ``cell-init-diff-local_steps-20-ma_echo``.

    Repeated names are numbered.
    """
    words = [word for key, value in cell.conditions.items() for word in (key, layout.label(value))]
    base = name = re.sub(r"[^\w.]+", "-", "-".join(["cell", *words, cell.method]))
    number = 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def _number(value: float | None, places: int | None) -> str:
    return "" if value is None else layout.number(value, places)


def _difference(value: float | None, places: int | None) -> str:
    return "" if value is None else layout.signed(value, places)
