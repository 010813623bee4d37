"""The cells of a report as its page shows them: numbers as text, anchors, and what opens behind each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Cell, Method, Origin, Report, Value

_NEGATIVE = re.compile(r"(?<![\w.])-(?=\d|inf)")


@dataclass(frozen=True)
class Links:
    """What a page may link to, as relative addresses.

    Args:
        runs: by a run's folder, its files by name (``folder`` is the folder itself); files: those beside the page.
        configs: resolved, by their hashes; they stand on the page.
    """

    runs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Sequence[str] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownRun:
    """One value of a cell: `at` is the point of a grid that it is the best of."""

    seed: str
    value: str
    delta: str
    at: str
    origin: Origin
    links: Mapping[str, str]


@dataclass(frozen=True)
class ShownCell:
    """A cell as text, empty where there is nothing.

    Args:
        anchor: its id on the page, which stays as long as conditions and method do; label: of its method.
        paper, ours, sd, delta, interval: numbers; published: the paper's with its deviation.
        parts: (metric, its numbers by class or by client), means over the runs.
        slug: of the verdict, for its colour; why: reason, failures, what is smaller; flags: what else stands in the cell.
    """

    cell: Cell
    anchor: str
    label: str
    title: str
    paper: str
    published: str
    ours: str
    sd: str
    delta: str
    interval: str
    best_paper: bool
    best_ours: bool
    mark: str
    word: str
    slug: str
    why: tuple[str, ...]
    flags: str
    same_as: str
    runs: tuple[ShownRun, ...]
    parts: tuple[tuple[str, str], ...]

    @property
    def n(self) -> int:
        return self.cell.n


def columns(report: Report) -> list[Method]:
    """The proposed method first, so that it is seen without scrolling; the others as `layout.by_role` has them."""
    return layout.by_role(report)


def shown(report: Report, links: Links) -> Iterator[tuple[layout.Row, dict[str, list[ShownCell]]]]:
    """Every row with its cells by method."""
    places, taken = layout.places(report), set[str]()
    for row in layout.rows(report):
        methods = {method.key: row.of(method.key) for method in columns(report)}
        tops = [
            layout.best(
                ((m, getattr(c[0], side)) for m, c in methods.items() if c),
                places,
                higher=report.higher_is_better,
            )
            for side in ("paper", "mean")
        ]
        yield (
            row,
            {
                key: [
                    _shown(
                        report,
                        cell,
                        places,
                        links,
                        _anchor(cell, taken),
                        *(key in top for top in tops),
                    )
                    for cell in cells
                ]
                for key, cells in methods.items()
            },
        )


def _shown(
    report: Report,
    cell: Cell,
    places: int | None,
    links: Links,
    anchor: str,
    best_paper: bool,
    best_ours: bool,
) -> ShownCell:
    names = layout.names(report)
    where = ", ".join(f"{key} {layout.label(value)}" for key, value in cell.conditions.items())
    label = names.get(cell.method, cell.method)
    same_as = names.get(cell.same_as, cell.same_as)
    why = [
        cell.reason,
        *(f"failed: {line}" for line in cell.failed),
        f"reduced: {cell.reduced}" if cell.reduced else "",
        f"equals {same_as} by construction" if same_as else "",
    ]
    flags = [
        f"⚠ {len(cell.failed)} failed" if cell.failed else "",
        "reduced" if cell.reduced else "",
        "deterministic" if cell.deterministic else "",
    ]
    paper = "" if cell.paper is None else minus(layout.published(cell.paper, places))
    spread = f" ± {_number(cell.paper_sd, places)}" if paper and cell.paper_sd is not None else ""
    return ShownCell(
        cell=cell,
        anchor=anchor,
        label=label,
        title=", ".join(filter(None, [label, where])),
        paper=paper,
        published=paper + spread,
        ours=_number(cell.mean, places),
        sd=_number(cell.sd, places),
        delta="" if cell.delta is None else minus(layout.signed(cell.delta, places)),
        interval=minus(texts.interval(cell.interval, places)),
        best_paper=best_paper,
        best_ours=best_ours,
        mark=texts.mark(cell),
        word=texts.word(cell),
        slug=cell.verdict.replace(" ", "-"),
        why=tuple(filter(None, why)),
        flags=", ".join(filter(None, flags)),
        same_as=same_as,
        runs=tuple(_runs(cell, places, links)),
        parts=tuple(_parts(cell, places)),
    )


def _parts(cell: Cell, places: int | None) -> Iterator[tuple[str, str]]:
    """``test/global/acc by class``: ``0: 91.20, 1: 85.00``; ``val/clients/acc``: ``mean: 88.00, worst 10 %: 71.00``."""
    found: dict[str, list[str]] = {}
    for name, value in cell.parts:
        metric, of_class, number = name.partition("_of_class_")
        if not of_class:
            metric, _, number = name.rpartition("_mean" if name.endswith("_mean") else "_worst_10")
            number = "mean" if name.endswith("_mean") else "worst 10 %"
        found.setdefault(metric + (" by class" if of_class else ""), []).append(
            f"{number}: {_number(value, places)}"
        )
    for metric, numbers in found.items():
        yield metric, ", ".join(numbers)


def _runs(cell: Cell, places: int | None, links: Links) -> Iterator[ShownRun]:
    known = [*cell.origins, *(Origin("", "") for _ in range(cell.n))]
    for at, (seed, value) in enumerate(zip(cell.seeds, cell.values, strict=True)):
        delta = "" if cell.paper is None else minus(layout.signed(value - cell.paper, places))
        point = cell.chosen[at] if cell.chosen else ""
        yield ShownRun(
            str(seed),
            _number(value, places),
            delta,
            point,
            known[at],
            links.runs.get(known[at].run, {}),
        )


def _anchor(cell: Cell, taken: set[str]) -> str:
    """``cell-init-diff-local_steps-20-ma_echo``: letters and digits alone; a second one of a name is numbered."""
    words = [word for key, value in cell.conditions.items() for word in (key, layout.label(value))]
    base = name = re.sub(r"[^\w.]+", "-", "-".join(["cell", *words, cell.method]))
    number = 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


def sortable(value: object) -> str | None:
    """What a column of numbers sorts by; empty for none, which stays last; None for words."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return "" if math.isnan(value) else repr(value).replace("inf", "Infinity")


def minus(text: str) -> str:
    """Hyphens before numbers as minus signs; those of exponents stay."""
    return _NEGATIVE.sub("−", text)


def condition(value: Value) -> str:
    return layout.label(value)


def _number(value: float | None, places: int | None) -> str:
    return "" if value is None else minus(layout.number(value, places))
