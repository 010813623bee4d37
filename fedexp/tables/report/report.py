"""The report of a table as immutable data.

Everything that is printed, written or drawn depends only on these data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Value of a condition, such as clients=5.
Value = str | int | float | bool | None
Verdict = Literal[
    "reproduced", "close", "different", "undecided", "not run", "no reference", "not comparable"
]
# Verdicts of `fedexp.tables.verdicts.judge`.
Conclusion = Literal["reproduced", "close", "different", "undecided"]
# Whether our mean is higher or lower than the paper's number, for a cell that is
# `different`.
Direction = Literal["higher", "lower"]
Variant = Literal["full", "partial", "reduced", "smoke"]
Role = Literal["proposed", "baseline", "reference", "local", "ours"]
ClaimState = Literal[
    "supported",
    "contradicted",
    "supported in reduced form",
    "not supported in reduced form",
    "undecided",
    "superseded settings: no verdict",
]
RowState = Literal["yes", "no", "undecided"]
Colour = Literal["blue", "vermillion", "green", "pink", "ochre", "grey", "violet", "brick"]
# Names of matplotlib.
Marker = Literal["o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*"]
Dash = Literal["solid", "dashed", "dotted", "dashdot"]


@dataclass(frozen=True)
class PlotStyle:
    """The style of a method in pictures.

    Methods differ in marker and dash. They can therefore be distinguished without
    colours.
    """

    colour: Colour
    marker: Marker
    dash: Dash


@dataclass(frozen=True)
class Method:
    """A column of the report.

    Args:
        key: Name in fedexp.
        label: Name in the paper.
        tolerance: Tolerance that replaces the table's tolerance. None: the table's
            tolerance is used.
        role: ``proposed``: the paper proposes the method. ``baseline``: a baseline.
            ``reference``: a reference baseline (an ensemble, or training on the pooled
            data of all clients). ``local``: a local model. ``ours``: a column that the
            paper does not have.
        oracle: Text that tells what was chosen or trained on test data. Empty: nothing.
        plot_style: Style in pictures. None: a style that no other method of the report
            has.
    """

    key: str
    label: str
    tolerance: float | None = None
    role: Role = "baseline"
    oracle: str = ""
    plot_style: PlotStyle | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of one value of a cell.

    Args:
        run: Folder of the run, relative to the output root.
        command: Command that runs only this cell with this seed.
        config: Hash of the config.
        split: Hash of the data split.
        commit: Commit of the result, empty if it is not known.
        date: Date of the result, empty if it is not known.
    """

    run: str
    command: str
    config: str = ""
    split: str = ""
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Cell:
    """A judged cell of the table: the paper's number beside ours.

    Args:
        conditions: Conditions of the cell's row, by the table's keys and in their
            order.
        method: Key of the cell's column.
        paper: Published number in the table's unit, None if the paper prints none.
        paper_sd: Published standard deviation, None if the paper prints none.
        values: Our numbers, one per run, in the table's unit.
        seeds: Seed of each value.
        verdict: The verdict.
        direction: For the verdict ``different``, whether our mean is higher or lower
            than the paper's number. None for other verdicts.
        split_seeds: For each value, a text with the seed of its run and the run's
            conditions that do not identify the row. Runs that are compared with each
            other have the same text.
        last_10: Values of the last ten rounds of each run, or of all rounds if a run
            has fewer. Empty unless the table pools them and all runs have them.
        chosen: For each value, the best point of the column's hyper-parameter grid.
            Empty without a grid.
        reason: Reason in one sentence, if the verdict is not `reproduced`.
        interval: 95 % interval of our mean minus the paper's, None for fewer than two
            runs.
        settles: For the verdict ``undecided``, text that tells how many seeds would
            settle the verdict.
        deterministic: Whether several runs gave exactly the same number.
        same_as: Key of the column that this one equals by construction, empty if there
            is none. Such a cell is not counted again.
        runs: Folders of the cell's runs, relative to the output root.
        origins: Origin of each value.
        did_not_learn: Whether each value's run is at chance level. Empty: no run is.
        parts: Metrics of single classes and summaries over clients, as (name, number).
            All runs of the cell have them. Each number is the mean over the runs, in
            the table's unit.
        failed: Runs that failed, with the first line of their error.
        reduced: Text that tells what is smaller than in the paper, empty for the full
            variant.
    """

    conditions: dict[str, Value]
    method: str
    paper: float | None
    paper_sd: float | None
    values: tuple[float, ...]
    seeds: tuple[int, ...]
    verdict: Verdict
    direction: Direction | None = None
    split_seeds: tuple[str, ...] = ()
    last_10: tuple[tuple[float, ...], ...] = ()
    chosen: tuple[str, ...] = ()
    reason: str = ""
    interval: tuple[float, float] | None = None
    settles: str = ""
    deterministic: bool = False
    same_as: str = ""
    runs: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    did_not_learn: tuple[bool, ...] = ()
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
        """The sample standard deviation over seeds (n - 1).

        It is None for fewer than two runs, and if a value is infinite.
        """
        return _sample_sd(self.values)

    @property
    def pooled_mean(self) -> float | None:
        """The mean over the last ten rounds of all runs, None if none are pooled."""
        return _mean(sum(self.last_10, ()))

    @property
    def pooled_sd(self) -> float | None:
        """The sample standard deviation of the values of `pooled_mean`.

        It divides by n - 1, where n is the number of these values. It is None for fewer
        than two values, and if a value is infinite.
        """
        return _sample_sd(sum(self.last_10, ()))

    @property
    def delta(self) -> float | None:
        """Our mean minus the paper's number."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _sample_sd(values: Sequence[float]) -> float | None:
    mean, n = _mean(values), len(values)
    if mean is None or n < 2 or math.isinf(mean):
        return None
    # If a run diverged, its loss may be so large that a sum of squares would overflow.
    # `math.dist` does not overflow.
    return math.dist(values, (mean,) * n) / math.sqrt(n - 1)


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation between two orders of the methods in one row.

    One order is by the paper's numbers, and the other order is by our numbers. Methods
    whose numbers in the paper are close count as ties.

    Args:
        conditions: Conditions of the row.
        rho: Spearman's coefficient, None if fewer than two methods can be ranked.
        methods: Number of ranked methods.
    """

    conditions: dict[str, Value]
    rho: float | None
    methods: int


@dataclass(frozen=True)
class Summary:
    """The mean difference of a method's numbers from the paper's, over rows and seeds.

    Args:
        method: Key of the method.
        rows: Number of rows that have runs and a number of the paper.
        n: Number of seeds that all of these rows have.
        mean: Mean of our numbers minus the paper's, over rows and seeds.
        interval: 95 % interval of this mean, None for fewer than two seeds.
    """

    method: str
    rows: int
    n: int
    mean: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ClaimRow:
    """The result of a claim in one row, or for a trend in one group of rows.

    Args:
        conditions: Conditions of the row.
        state: ``yes`` or ``no`` if a one-sided test shows that the claim holds or does
            not hold, and ``undecided`` otherwise.
        estimate: Mean of the paired differences, or their lower median if one of them
            is infinite. A positive value supports the claim. If the row has several
            tests, it is the value of the least favourable test. None without pairs.
        n: Number of pairs (seeds). If the row has several tests, it is the number of
            the least favourable test.
        in_favour: Number of pairs that are in favour of the claim. If the row has
            several tests, they must all be in favour for the seed of the pair.
        printed: Whether the paper's own numbers fit the claim, None if the paper prints
            too few.
        why_empty: Reason why there are no pairs, "" if there are some.
    """

    conditions: dict[str, Value]
    state: RowState
    estimate: float | None
    n: int
    in_favour: int
    printed: bool | None = None
    why_empty: str = ""


@dataclass(frozen=True)
class ClaimResult:
    """A claim about a table or figure, and its result.

    Args:
        id: Name of the claim.
        where: Place in the paper, or ``ours`` for our own expectation.
        says: The claim in our words.
        state: State of the claim, decided on the runs that `scope` names.
        scope: Name of these runs, such as ``full form``. For a smaller variant, it also
            tells what is smaller than in the paper.
        reason: Reason for the state.
        needed: Number of rows that must fit: ``all``, ``most`` or a number.
        rows: Result of the claim in each row.
        printed: Result on the paper's own numbers as text, empty if the paper prints
            too few.
        contradicted_in_print: Whether the paper's own numbers contradict the claim.
    """

    id: str
    where: str
    says: str
    state: ClaimState
    scope: str
    reason: str
    needed: str
    rows: tuple[ClaimRow, ...]
    printed: str = ""
    contradicted_in_print: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether the claim is our own expectation, and not the paper's."""
        return self.where == "ours"


@dataclass(frozen=True)
class Picture:
    """A picture of the report.

    Args:
        name: Part of the file's name.
        title: Title, and text for screen readers.
        svg: Standalone SVG document.
        png: The same picture for media without SVG.
    """

    name: str
    title: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Report:
    """A paper's table with our numbers in it.

    Args:
        name: ``<paper>/<table>``.
        paper: Citation of the paper.
        source: Name of the table in the paper.
        title: Title in our words.
        metric: Metric of the numbers.
        unit: Unit of the numbers.
        higher_is_better: Whether higher numbers are better.
        variant: Variant. ``partial`` means that the cells and runs are not exactly
            those of the full variant.
        keys: Names of the conditions that identify a row, in order.
        methods: Columns, in the paper's order.
        cells: Cells.
        agreement: Rank agreement of each row.
        tolerance: Largest difference from the paper's number that counts as
            `reproduced`, in the table's unit. None: only columns with their own
            tolerance are judged.
        assumptions: (what, why) of every assumption. Some assumptions are about details
            that the paper leaves open. Others affect verdicts. They are about
            hyper-parameter grids, tolerances and the paper's number of runs.
        warnings: Texts to read before trusting a number, for example about unequal
            numbers of runs, mixed splits, mixed code or missing runs.
        facts: (name, value) of facts such as cost, commit, hardware, split hashes and
            dates.
        command: Command that makes the report.
        claims: Claims, in the order of the table's file.
        summaries: Summaries of the methods for which the paper prints numbers.
        left_out: Texts that name cells and panels of the paper that this report lacks.
        pictures: Pictures.
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
        """Return the values of the report's keys, which identify a row."""
        return tuple(conditions.get(key) for key in self.keys)

    @property
    def paper_claims(self) -> list[ClaimResult]:
        """The claims of the paper, without our own expectations."""
        return [claim for claim in self.claims if not claim.is_ours]

    def tolerance_of(self, method: Method) -> float | None:
        """Return the tolerance of a column, by default the table's."""
        return self.tolerance if method.tolerance is None else method.tolerance
