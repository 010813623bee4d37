"""What a table's report says, as a value. Everything that is printed, written or drawn is a function of it alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Value = str | int | float | bool | None  # of a condition, e.g. clients=5
Verdict = Literal[
    "reproduced", "higher", "lower", "inconclusive", "not run", "no reference", "not comparable"
]
Conclusion = Literal["reproduced", "higher", "lower", "inconclusive"]  # of `judge`
Variant = Literal["full", "partial", "reduced", "smoke"]
Role = Literal["proposed", "baseline", "reference", "local", "ours"]
ClaimState = Literal["held", "refuted", "open"]
RowState = Literal["yes", "no", "open"]
Colour = Literal["blue", "vermillion", "green", "pink", "ochre", "grey", "violet", "brick"]
Marker = Literal[
    "o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*"
]  # as matplotlib names them
Dash = Literal["solid", "dashed", "dotted", "dashdot"]


@dataclass(frozen=True)
class PlotStyle:
    """How a method is drawn. Marker and dash alone tell it from the others: in grey, and for those who see few colours."""

    colour: Colour
    marker: Marker
    dash: Dash


@dataclass(frozen=True)
class Method:
    """A column.

    Args:
        key, label: the framework's, and the paper's own name for it.
        tolerance: where that is not the table's.
        role: ``proposed`` by the paper, a ``baseline``, a ``reference`` point (an ensemble, pooled training), a ``local`` model,
            or ``ours``: no column of the paper's.
        oracle: what was chosen or trained on test data, empty where nothing was.
        plot_style: in pictures; None: one that no other method of the report has.
    """

    key: str
    label: str
    tolerance: float | None = None
    role: Role = "baseline"
    oracle: str = ""
    plot_style: PlotStyle | None = None


@dataclass(frozen=True)
class Origin:
    """Where one value of a cell came from.

    Args:
        run: its folder, relative to the output root; config: the hash of what it ran; split: of who held which samples.
        commit, date: of the result, empty where they are not known.
        command: what runs exactly this cell with this seed.
    """

    run: str
    command: str
    config: str = ""
    split: str = ""
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Cell:
    """One number of the table: the paper's beside ours.

    Args:
        conditions: the row it stands in, by the table's keys and in their order.
        paper: as published, in the table's unit; None where the paper prints none.
        paper_sd: as published.
        values: ours, one a run, in the table's unit; seeds: the seed of each.
        draws: of each value, what runs that are compared with it share: the seed and the conditions that make no row.
        last_10: of each value, those of the run's last ten rounds (fewer, if it has fewer), where the table pools them and all
            runs have them; else empty.
        chosen: of each value, the point of the column's grid that was best; empty without a grid.
        verdict, reason: the judgement and, where it is not `reproduced`, why, in one sentence.
        interval: of 95 % for ours less the paper's; None below two runs.
        near: of an inconclusive cell, whether the means lie within the tolerance of each other.
        settles: of an inconclusive cell, how many seeds would settle it.
        deterministic: several runs gave one and the same number.
        same_as: the column that this one equals by construction; such a cell is not counted again.
        runs: folders of the runs behind it, relative to the output root; origins: of each value.
        parts: metrics of classes and of clients that all runs have, means over the runs, times the table's scale.
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
    split_seeds: tuple[str, ...] = ()
    last_10: tuple[tuple[float, ...], ...] = ()
    chosen: tuple[str, ...] = ()
    reason: str = ""
    interval: tuple[float, float] | None = None
    near: bool | None = None
    settles: str = ""
    deterministic: bool = False
    same_as: str = ""
    runs: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    parts: tuple[tuple[str, float], ...] = ()
    failed: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return _mean(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None below two and where a value is infinite."""
        return _sample_sd(self.values)

    @property
    def pooled_mean(self) -> float | None:
        """Over the last ten rounds of all runs together; None where there are none to pool."""
        return _mean(sum(self.last_10, ()))

    @property
    def pooled_sd(self) -> float | None:
        """Sample standard deviation (n - 1, n being all rounds of all runs) of the same values; None as `sd`."""
        return _sample_sd(sum(self.last_10, ()))

    @property
    def delta(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sample_sd(values: Sequence[float]) -> float | None:
    mean, n = _mean(values), len(values)
    if mean is None or n < 2 or math.isinf(mean):
        return None
    return math.dist(values, (mean,) * n) / math.sqrt(n - 1)  # no overflow for a diverged loss


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
class Summary:
    """A method over its rows: the mean difference to the paper, by seed.

    Args:
        rows: with a number of the paper and runs; n: seeds that have all of them.
        mean: of ours less the paper's, over rows and seeds; interval: of 95 %, None below two seeds.
    """

    method: str
    rows: int
    n: int
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ClaimRow:
    """A claim in one row, or in one group of rows for a trend.

    Args:
        state: yes or no by a one-sided bound, else open.
        estimate: mean of the paired differences, signed so that the claim wants it large; None where there are none.
        n: pairs (seeds); in_favour: of these, those on the claim's side.
        printed: whether the paper's own numbers fit; None where it prints none.
    """

    conditions: dict[str, Value]
    state: RowState
    estimate: float | None
    n: int
    in_favour: int
    printed: bool | None = None


@dataclass(frozen=True)
class ClaimResult:
    """What the paper (or only we, where ``where`` is ``ours``) says of a table or figure, and what came of it.

    Args:
        state, reason: held, refuted or open, and why.
        rows: the claim row by row; needed: of how many it is meant, ``all``, ``most`` or a number.
        printed: what the paper's own numbers say of it, in words; empty where it prints none.
        contradicted: the paper's own numbers do not bear it out.
    """

    id: str
    where: str
    says: str
    state: ClaimState
    reason: str
    needed: str
    rows: tuple[ClaimRow, ...]
    printed: str = ""
    contradicted: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether the claim is our own expectation and not the paper's."""
        return self.where == "ours"


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
        form: ``partial``: a part of the full variant's cells or runs.
        keys: names of the conditions, in order; methods: the columns, in the paper's order.
        tolerance: how far, in the table's unit, a mean may lie from the paper's and still be `reproduced`; None:
            nothing is judged, but in columns with their own.
        claims: in the order of the table's file; summaries: of the methods that the paper has numbers of.
        left_out: cells and panels of the paper that this report does not have, in words.
        assumptions: (what, why) of all that the paper leaves open, and of what judges: tolerances, the paper's number of runs.
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
    variant: Variant
    keys: tuple[str, ...]
    methods: tuple[Method, ...]
    cells: tuple[Cell, ...]
    agreement: tuple[Agreement, ...]
    tolerance: float | None
    assumptions: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    command: str
    claims: tuple[ClaimResult, ...] = ()
    summaries: tuple[Summary, ...] = ()
    left_out: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def row_key(self, conditions: Mapping[str, Value]) -> tuple[Value, ...]:
        """Return the values of the report's keys, which tell its rows apart."""
        return tuple(conditions.get(key) for key in self.keys)

    @property
    def paper_claims(self) -> list[ClaimResult]:
        """The claims of the paper, without our own expectations."""
        return [claim for claim in self.claims if not claim.is_ours]

    def tolerance_of(self, method: Method) -> float | None:
        """Return the tolerance of a column, which is the table's unless it has its own."""
        return self.tolerance if method.tolerance is None else method.tolerance
