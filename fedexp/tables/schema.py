"""The schema of a paper's table, ``conf/table/<paper>/<table>.yaml``.

A table is never part of a run's config.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedexp.core.build import NOT_A_KEY, require
from fedexp.core.errors import ConfigError, suggest
from fedexp.tables.report.report import Method, PlotStyle, Role, Value, Variant

# Selects cells of a table. Each key is a condition (such as `clients`) or `method`. Its
# value is the accepted value or a list of accepted values (see `fits`).
Where = dict[str, Any]


@dataclass(frozen=True)
class Tolerance:
    """The largest difference from the paper's number that counts as `reproduced`.

    The confidence interval of the difference must be within the tolerance, see
    `fedexp.tables.verdicts`.

    Args:
        within: The largest difference in the table's unit.
        why: Reason for this tolerance.
    """

    within: float
    why: str

    def __post_init__(self) -> None:
        require(self.within >= 0, "tolerance.within must not be negative")


@dataclass(frozen=True)
class Equal:
    """A note that a column has the same numbers as another column by construction.

    Equal cells are counted once.

    Args:
        column: Key of the other column.
        where: Conditions of the rows in which the two columns are equal. Empty: all
            rows.
    """

    column: str
    where: Where = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A grid of hyper-parameter values that are tried for a column.

    A point is one value of the hyper-parameter. The best point is chosen separately for
    every combination of seed and pooled conditions (those that are not keys of a row).
    The column shows the number at the best point.

    Args:
        over: Name of the hyper-parameter.
        points: Values of the hyper-parameter. If several are equally good, the first
            one is chosen.
        overrides: Overrides of the run for a point, with the placeholder ``{point}``.
            Without overrides, one run measures all points. Then the paths at which
            numbers are read contain ``{point}``.
        by: Path of the number by which the best point is chosen. The syntax is that of
            `NumberSource.value`, and the path may contain ``{point}``. None: the
            column's own number. A number is measured on held-out data if its path has
            the part ``val``. A choice by any other number uses test data and makes the
            column an oracle.
        best: Whether the highest or the lowest number is the best.
    """

    over: str
    points: tuple[str | int | float, ...]
    overrides: tuple[str, ...] = ()
    by: str | None = None
    best: Literal["highest", "lowest"] = "highest"

    def __post_init__(self) -> None:
        require(
            len({str(point) for point in self.points}) == len(self.points) > 0,
            "points: give at least one, each once",
        )

    @property
    def held_out(self) -> bool:
        """Whether the choice uses no test data."""
        return self.by is not None and "val" in re.split(r"[./]", self.by)

    def filled(self, point: str | int | float) -> tuple[str, ...]:
        """Return the overrides of the run for a point."""
        return tuple(override.format(point=point) for override in self.overrides)


@dataclass(frozen=True)
class Untuned:
    """Rows of a column whose coefficients have not been chosen.

    Args:
        where: Conditions of the rows.
        why: The reason, with the command to enter.
    """

    where: Where
    why: str


@dataclass(frozen=True)
class Column:
    """A column of the table: a method.

    Args:
        key: Name in fedexp.
        label: Name in the paper.
        overrides: Overrides that select the method. They are applied after the row's
            overrides. None: the method does not exist in fedexp, and `why` has the
            reason.
        role: Role of the method, see `fedexp.tables.report.report.Method`.
        why: Reason why the method does not exist.
        where: Conditions of the rows that have this column. Other rows have no such
            cell.
        value: Path that replaces the table's ``headline.value``. In a column with a
            grid, the path may contain ``{point}``.
        grid: Grid whose best point the column shows.
        tolerance: Tolerance that replaces the table's tolerance.
        seeds: Seeds that replace the table's seeds in the full variant.
        reads: Key of another column. This column is compared with the paper's numbers
            for the other column. A column with `reads` does not exist in the paper. It
            is another interpretation of something that the paper leaves open.
        equals: Another column that this column equals by construction.
        oracle: Text that names what is chosen or trained on test data, such as the best
            round or a proxy. If the best point of `grid` is chosen on test data, this
            is added automatically. Empty: nothing else uses test data.
        published: Keys and values that identify the column's rows in the file of
            published numbers (`Table.published`). Empty: ``{method: <key>}``.
        untuned: Rows whose coefficients have not been chosen. In these rows, the column
            has runs only in the smoke variant.
    """

    key: str
    label: str
    overrides: tuple[str, ...] | None
    role: Role = "baseline"
    why: str = ""
    where: Where = field(default_factory=dict)
    value: str | None = None
    grid: Grid | None = None
    tolerance: Tolerance | None = None
    seeds: tuple[int, ...] | None = None
    reads: str | None = None
    equals: Equal | None = None
    oracle: str = ""
    published: dict[str, Any] = field(default_factory=dict)
    untuned: tuple[Untuned, ...] = field(default=(), metadata=NOT_A_KEY)

    def why_untuned(self, conditions: Mapping[str, Value]) -> str:
        """Return why a row's coefficients have not been chosen, "" if they have."""
        reasons = (one.why for one in self.untuned if fits(one.where, conditions, self.key))
        return next(reasons, "")

    def __post_init__(self) -> None:
        require(
            self.overrides is not None or bool(self.why),
            "overrides: null needs 'why': why is there no such method?",
        )
        require(
            self.reads is None or self.role == "ours",
            "a column that reads another's numbers has the role 'ours'",
        )
        check_seeds(self.seeds)

    @property
    def method(self) -> Method:
        within = None if self.tolerance is None else self.tolerance.within
        oracle = [self.oracle] if self.oracle else []
        if self.grid is not None and not self.grid.held_out:
            oracle.append(f"the best {self.grid.over} of a grid in every trial")
        return Method(self.key, self.label, within, self.role, ", ".join(oracle))


@dataclass(frozen=True)
class NumberSource:
    """The place of a cell's number in a run's results.

    Args:
        value: Path in ``result.json`` or in a traced round. In ``result.json``, dots
            separate the parts: ``headline.value``, ``metrics.test/global/acc``,
            ``seconds.aggregate``, ``rounds_to.0.38``, ``per_client.test/local/acc.0``.
            A traced round is a round whose iterations are stored. The path of a number
            in it is ``trace.<round>.<iteration>.<name>``. Instead of ``<iteration>``,
            the path may have ``<name>=<number>``, such as ``lam=0.5``. This selects the
            iteration in which the named value is this number. Placeholders are filled
            with conditions of the row: ``trace.1.{iteration}.mean_v/acc``.
        scale: Factor that converts the number into the table's unit.
        pooled_rounds: Path ``last_10.<metric>``, with placeholders as in `value`. Some
            papers print a standard deviation over the last ten rounds of all runs of a
            cell. With this path, the report also has this standard deviation, and the
            mean over the same values. Both are left out for columns with their own
            `value`. None: no rounds are pooled.
    """

    value: str = "headline.value"
    scale: float = 1.0
    pooled_rounds: str | None = None

    def __post_init__(self) -> None:
        if self.pooled_rounds is not None and not re.fullmatch(
            r"last_10\.[^.]+", self.pooled_rounds
        ):
            metric = self.pooled_rounds.partition(".")[2].partition(".")[0]
            raise ConfigError(
                f"'{self.pooled_rounds}' is not a list of a run's last rounds",
                where="headline.pooled_rounds",
                expected="last_10.<metric>, a list in result.json",
                do=suggest(self.pooled_rounds, [f"last_10.{metric or '<metric>'}"]),
            )


@dataclass(frozen=True)
class OverrideRule:
    """Overrides for the cells whose conditions and column fit `where`.

    The overrides are applied after those of the method and the grid point.
    """

    where: Where
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Superseded:
    """A note that the runs of a variant do not test what the paper claims.

    Claims get no verdict on these runs until the variant is run with new settings.

    Args:
        why: Reason in one sentence.
        methods: Columns whose runs are superseded. Empty: all columns.
    """

    why: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class SmallerVariant:
    """A variant that is smaller than the paper's table.

    Its cells are never `reproduced`.

    Args:
        what: Text that tells readers what is smaller.
        overrides: Overrides that are applied after all overrides of the table.
        rules: Overrides for some of the cells, applied after `overrides`.
        conditions: Overrides by condition, as in `Table.conditions`. They replace the
            table's overrides of these conditions.
        grids: Grids of conditions that replace the table's grids.
        seeds: Seeds that replace the table's seeds.
        points: Points that replace the points of every column's hyper-parameter grid.
        superseded: Note that the settings of these runs will be replaced. None: the
            settings stay.
    """

    what: str
    overrides: tuple[str, ...] = ()
    rules: tuple[OverrideRule, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)
    grids: tuple[dict[str, Any], ...] | None = None
    seeds: tuple[int, ...] | None = None
    points: tuple[str | int | float, ...] | None = None
    superseded: Superseded | None = None

    def __post_init__(self) -> None:
        check_seeds(self.seeds)


@dataclass(frozen=True)
class Cost:
    """A measured cost of a variant.

    Args:
        hours: Sum of the runs' times in hours, as if they had run one after another.
        runs: Number of runs that were measured.
        hardware: Hardware of these runs.
    """

    hours: float
    runs: int
    hardware: str

    def __post_init__(self) -> None:
        require(self.hours >= 0, f"cost.hours must not be negative, got {self.hours}")
        require(self.runs > 0, f"cost.runs must be positive, got {self.runs}")


@dataclass(frozen=True)
class Assumption:
    """An assumption about something that the paper leaves open.

    Args:
        what: The assumption.
        why: The reason for it.
    """

    what: str
    why: str


@dataclass(frozen=True)
class Target:
    """A value that a curve must reach.

    Args:
        share: Share of a final value. If higher is better, the target is the final
            value times the share. If lower is better, the target is the final value
            divided by the share.
        of: The final value that is used: the worse final value of curves a and b
            (``lower_final``), the final value of curve a (``a_final``), or the final
            value of curve b (``b_final``).
        value: The target in the table's unit, instead of `share` and `of`.
    """

    share: float | None = None
    of: Literal["lower_final", "a_final", "b_final"] = "lower_final"
    value: float | None = None

    def __post_init__(self) -> None:
        require((self.share is None) != (self.value is None), "target: give a share or a value")


# Tests that a claim's keys belong to. Other tests would ignore these keys.
_TESTS_BY_KEY: Mapping[str, tuple[str, ...]] = {
    "by": ("above",),
    "than": ("above",),
    "any_of": ("above", "sooner"),
    "x": ("within",),
    "along": ("trend",),
    "direction": ("trend",),
    "slack": ("trend",),
    "curve": ("sooner",),
    "axis": ("sooner",),
    "target": ("sooner",),
}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about a table or figure.

    The claim is tested on differences between runs with the same seed.

    Args:
        id: Name of the claim.
        where: Place in the paper (``text``, ``caption``, ...), or ``ours`` for an
            expectation of our own.
        says: The claim in our words.
        test: One of four tests. ``above``: `a` is better than `b`, or than the number
            `than`, by more than `by`. ``within``: `a` and `b` differ by less than `x`.
            ``trend``: `a` gets better (``up``) or worse (``down``) with every step from
            one value of the condition `along` to the next, except for `slack`.
            ``sooner``: the curve of `a` reaches the target before the curve of `b`.
        a: Columns. The claim must hold for all of them. If `any_of` is ``a``, one of
            them is enough.
        b: Columns that `a` is compared with. The claim must hold against all of them.
            If `any_of` is ``b``, one of them is enough.
        any_of: ``a`` or ``b`` if one of these columns is enough. None: the claim must
            hold for all columns of both.
        than: Number in the table's unit that replaces `b`.
        by: For ``above``, the margin. `a` must be better by more than this margin.
        x: For ``within``, the bound of the difference.
        along: For ``trend``, one condition, or several conditions that change together.
            The first one determines the order of the steps: numbers ascend, and texts
            keep the table's order.
        direction: For ``trend``, the claimed direction.
        slack: For ``trend``, how far a step may go against the claimed direction. If it
            is negative, every step must go at least this far in the claimed direction.
        rows: How many rows must fit the claim: ``all``, ``most`` (more than half) or a
            number. For ``trend``, a row is a group of the table's rows that differ only
            in `along`.
        only: Conditions of the rows that the claim is about. Empty: all rows.
        curve: For ``sooner``, the name of the curve. It is a value of the traced
            iterations or a metric of the rounds, depending on `axis`.
        axis: Whether `curve` is over iterations or rounds.
        target: For ``sooner``, the value that the curves must reach.
    """

    id: str
    where: str
    says: str
    test: Literal["above", "within", "trend", "sooner"]
    a: tuple[str, ...]
    b: tuple[str, ...] = ()
    any_of: Literal["a", "b"] | None = None
    than: float | None = None
    by: float = 0.0
    x: float | None = None
    along: str | tuple[str, ...] | None = None
    direction: Literal["up", "down"] = "up"
    slack: float = 0.0
    rows: Literal["all", "most"] | int = "all"
    only: Where = field(default_factory=dict)
    curve: str | None = None
    axis: Literal["iteration", "round"] = "iteration"
    target: Target | None = None

    def __post_init__(self) -> None:
        for key, tests in _TESTS_BY_KEY.items():
            is_default = getattr(self, key) == type(self).__dataclass_fields__[key].default
            require(
                is_default or self.test in tests,
                f"claim {self.id}: {key} goes with test={' and '.join(tests)}, "
                f"got test={self.test}",
            )

        for column, count in Counter((*self.a, *self.b)).items():
            require(
                count == 1,
                f"claim {self.id}: column '{column}' is named {count} times in a and b, "
                f"name it once",
            )

        has_b = self.test != "trend" and self.than is None
        has_curve = self.curve is not None and self.target is not None
        checks = {
            "a names no column": len(self.a) > 0,
            "b goes with every test except trend, unless than replaces it": has_b == bool(self.b),
            "test=within needs x": self.test != "within" or self.x is not None,
            "test=trend needs along": self.test != "trend" or self.along is not None,
            "test=sooner needs curve and target": self.test != "sooner" or has_curve,
            "x must be positive": self.x is None or self.x > 0,
            "rows must be positive": not isinstance(self.rows, int) or self.rows > 0,
        }
        for message, holds in checks.items():
            require(holds, f"claim {self.id}: {message}")

    @property
    def is_about_an_amount(self) -> bool:
        """Whether the claim is about the size of a number or of a difference.

        Other claims are only about an order. Runs that are smaller than the paper's may
        show the same order, but they do not show the same sizes.
        """
        return bool(self.by or self.than is not None or self.x is not None or self.slack)

    @property
    def keys_along(self) -> tuple[str, ...]:
        return (self.along,) if isinstance(self.along, str) else self.along or ()


@dataclass(frozen=True)
class Table:
    """A table of a paper: its runs, the numbers that are read, and the paper's numbers.

    Args:
        title: Title, which tells what the table shows.
        paper: Citation of the paper.
        source: Name of the table in the paper.
        metric: Metric of the numbers.
        unit: Unit of the numbers.
        higher_is_better: Whether higher numbers are better.
        keys: Conditions that identify a row. Runs that differ only in other conditions
            are pooled in one cell.
        methods: Columns.
        conditions: Overrides by condition: templates (``"clients={clients}"``), or a
            mapping from values to overrides (``{same: [init=same]}``).
        grids: Grids of conditions. Each grid has a value or a list of values for every
            condition, and contains all their combinations. A table may need several
            grids.
        seeds: Values of ``seed``. By default, they are also the values of
            ``seed_data``.
        experiment: Option of the group ``experiment``, the base of every cell. None:
            the defaults of conf/config.yaml.
        headline: Place of the numbers in a run's results.
        tolerance: Tolerance in the table's unit. None: only columns with their own
            tolerance are judged.
        paper_runs: Number of runs behind each mean of the paper. None: the paper does
            not state it, and one run is assumed.
        claims: Claims of the paper about its numbers.
        omits: Texts that name parts of the paper's results, such as panels, that no row
            of this table has.
        tie: Distance in the table's unit. If the paper's numbers of two methods differ
            by less, the methods count as tied when they are ranked.
        rules: Overrides for some of the cells.
        assumptions: Assumptions where the paper is silent.
        smoke: Variant that runs in under a minute.
        reduced: Variant for a small machine.
        reference: The paper's numbers, as rows ``{<conditions>, method, value, sd?}``
            generated by ``scripts/make_tables.py``.
        published: ``{file, table}`` from which `reference` is generated, and optionally
            ``only: {key: value}``, which selects rows of the published table.
        given: Config keys that are left to the user, such as the path of a local file,
            each with conditions. The user's override of a key applies only to cells
            that fit the key's conditions. Runs with such overrides still count as runs
            of the table.
        tuned: Name of a file in ``conf/tuned``. For each method in this file, the table
            has a second column with a tuned coefficient
            (`fedexp.tables.load.with_tuned`).
        equal_tuning: Names of files in ``conf/tuned``. Each chooses the coefficients of
            all methods with equally many runs. The chosen values apply to the columns
            themselves, in the rows that the file names
            (`fedexp.tables.load.with_equal_tuning`).
        drawings: Figures made from the runs. The ``_target_`` of each node is a
            `fedexp.tables.drawing.Drawing`.
        flop: Floating-point operations of the local training of all runs of the full
            variant. A SAM step counts twice.
        data: Options of ``dataset`` that the full variant needs.
        cost: Measured cost of the variants that have been run. ``partial`` stands for a
            part of the full variant.
        server_data: ``own``: the server's data of a method are removed only from the
            training data of this method. A method without server data then trains on
            more samples. ``reserved``: the same samples are removed from the training
            data of every column, even if its method has no server data.
        plot_styles: Styles of methods in pictures, by column. All tables of a paper use
            the same styles (`fedexp.tables.plot_styles`).
        next_commands: Commands that are printed after a complete run of the table.
        name: ``<paper>/<table>``.
    """

    title: str
    paper: str
    source: str
    metric: str
    unit: str
    higher_is_better: bool
    keys: tuple[str, ...]
    methods: tuple[Column, ...]
    conditions: dict[str, Any]
    grids: tuple[dict[str, Any], ...]
    seeds: tuple[int, ...]
    experiment: str | None = None
    headline: NumberSource = NumberSource()
    tolerance: Tolerance | None = None
    paper_runs: int | None = None
    claims: tuple[Claim, ...] = ()
    omits: tuple[str, ...] = ()
    tie: float = 0.0
    rules: tuple[OverrideRule, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    smoke: SmallerVariant | None = None
    reduced: SmallerVariant | None = None
    reference: tuple[dict[str, Any], ...] = ()
    published: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Where] = field(default_factory=dict)
    tuned: str | None = None
    equal_tuning: tuple[str, ...] = ()
    drawings: tuple[dict[str, Any], ...] = ()
    flop: float | None = None
    data: tuple[str, ...] = ()
    cost: dict[Variant, Cost] = field(default_factory=dict)
    server_data: Literal["own", "reserved"] = "own"
    plot_styles: dict[str, PlotStyle] = field(default_factory=dict)
    next_commands: tuple[str, ...] = ()
    name: str = ""

    @property
    def columns(self) -> dict[str, Column]:
        return {column.key: column for column in self.methods}

    def row_key(self, conditions: Mapping[str, Value]) -> tuple[Value, ...]:
        """Return the values of the table's keys, which identify a row."""
        return tuple(conditions[key] for key in self.keys)

    def value_path(self, column: Column) -> str:
        """Return the path of a column's numbers, with its placeholders."""
        return column.value or self.headline.value

    def method(self, column: Column) -> Method:
        """Return the report's description of a column, with its plot style."""
        return replace(column.method, plot_style=self.plot_styles.get(column.key))

    def smaller(self, variant: Variant) -> SmallerVariant | None:
        """Return the definition of a smaller variant, or None.

        The result is None for the full or partial variant, and for a variant that the
        table does not have.
        """
        return {"reduced": self.reduced, "smoke": self.smoke}.get(variant)

    def check(self, variant: Variant) -> None:
        """Refuse a variant that the table does not have."""
        if variant != "full" and self.smaller(variant) is None:
            has = [name for name in ("smoke", "reduced") if self.smaller(name)]
            raise ConfigError(
                f"table {self.name} has no {variant} variant",
                expected=" or ".join(f"--{name}" for name in has)
                or "no flag: it has only the full variant",
            )

    def printed(
        self, conditions: Mapping[str, Value], method: str
    ) -> tuple[float | None, float | None]:
        """Return the paper's number for a cell, and its standard deviation.

        If the column has `Column.reads`, they are the numbers of the column that it
        names. A number that the paper does not print is None.
        """
        printed = self.columns[method].reads or method
        for row in self.reference:
            if row["method"] == printed and all(
                row.get(key) == conditions[key] for key in self.keys
            ):
                value, sd = row.get("value"), row.get("sd")
                return None if value is None else float(value), None if sd is None else float(sd)
        return None, None


def fits(where: Where, conditions: Mapping[str, Value], method: str) -> bool:
    """Return whether a cell fits `where`.

    A cell fits if it has an accepted value for every key of `where`. A list in `where`
    contains several accepted values.
    """
    cell = {**conditions, "method": method}
    return all(
        cell[key] in value if isinstance(value, list) else cell[key] == value
        for key, value in where.items()
    )


def check_seeds(seeds: tuple[int, ...] | None) -> None:
    """Refuse an empty list of seeds, and a seed that is listed twice."""
    require(
        seeds is None or len(set(seeds)) == len(seeds) > 0, "seeds: give at least one, each once"
    )


def require_known(
    names: Iterable[Any], options: Collection[Any], where: str, kind: str = "key"
) -> None:
    """Refuse names that are not among the options, and suggest the nearest option."""
    for name in names:
        if name not in options:
            do = suggest(str(name), [*map(str, options)])
            raise ConfigError(f"unknown {kind} '{name}'", where=where, do=do)
