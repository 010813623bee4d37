"""What a table's report says, as a value. Everything that is printed, written or drawn is a function of it alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Value = str | int | float | bool | None  # of a condition, e.g. clients=5
Verdict = Literal["reproduced", "deviates", "not run", "no reference", "not comparable"]
Form = Literal["full", "reduced", "smoke"]


@dataclass(frozen=True)
class Method:
    """A column: the framework's key, the paper's own name for it, its tolerance where that is not the table's."""

    key: str
    label: str
    tolerance: float | None = None


@dataclass(frozen=True)
class Cell:
    """One number of the table: the paper's beside ours.

    Args:
        conditions: the row it stands in, by the table's keys and in their order.
        paper: as published, in the table's unit; None where the paper prints none.
        paper_sd: as published.
        values: ours, one a seed, in the table's unit; seeds: the seed of each.
        verdict, reason: the judgement and, where it is not `reproduced`, why, in one sentence.
        runs: folders of the runs behind it, relative to the output root.
        failed: runs that failed, with their error's first line.
        reduced: what was smaller than the paper's, empty for a full run.
    """

    conditions: dict[str, Value]
    method: str
    paper: float | None
    paper_sd: float | None
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    verdict: Verdict
    reason: str = ""
    runs: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return sum(self.values) / self.n if self.values else None

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None below two."""
        if self.mean is None or self.n < 2:
            return None
        return math.dist(self.values, (self.mean,) * self.n) / math.sqrt(self.n - 1)  # no overflow for a diverged loss

    @property
    def delta(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Agreement:
    """Rank agreement of the methods' order in one row (Spearman), methods that the paper separates by little counted as ties.

    Args:
        rho: None where fewer than two methods can be ranked.
        methods: how many were ranked.
    """

    conditions: dict[str, Value]
    rho: float | None
    methods: int


@dataclass(frozen=True)
class Picture:
    """A drawing that belongs to the report, as a standalone SVG document (and PNG bytes for where SVG cannot go)."""

    name: str
    title: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Report:
    """A paper's table with our numbers in it.

    Args:
        name: ``<paper>/<table>``; paper: how it is cited; source: what the table is called there; title: in our words.
        keys: names of the conditions, in order; methods: the columns, in the paper's order.
        tolerance: how far, in the table's unit, a mean may lie from the paper's and still be `reproduced`; None:
            nothing is judged, but in columns with their own.
        assumptions: (what, why) of all that the paper leaves open.
        warnings: what a reader must know before believing a number: unequal n, mixed splits, mixed code, missing cells.
        facts: (name, value) of cost, commit, hardware, split hashes, dates.
        command: what was typed, or would have to be, to make it.
    """

    name: str
    paper: str
    source: str
    title: str
    metric: str
    unit: str
    higher_is_better: bool
    form: Form
    keys: tuple[str, ...]
    methods: tuple[Method, ...]
    cells: tuple[Cell, ...]
    agreement: tuple[Agreement, ...]
    tolerance: float | None
    assumptions: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    command: str
    pictures: tuple[Picture, ...] = ()
