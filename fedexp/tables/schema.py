"""A paper's table as an object: ``conf/table/<paper>/<table>.yaml``, read and checked. Never part of a run's config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from fedexp.config.folders import conf_dir, user_conf_dir
from fedexp.config.yaml_files import read_yaml
from fedexp.core.build import build, require
from fedexp.core.errors import ConfigError, nearest, suggest
from fedexp.tables.checks import check_seeds, check_table, require_known
from fedexp.tables.plot_styles import read_plot_styles
from fedexp.tables.report.report import Method, PlotStyle, Role, Value, Variant
from fedexp.tables.tuning import load_tuning

Where = dict[str, Any]  # key -> value or list of values; `method` is a key, too


@dataclass(frozen=True)
class Tolerance:
    """How far a mean may lie from the paper's and still be `reproduced`.

    Args:
        within: in the table's unit; why: that much and no other.
    """

    within: float
    why: str

    def __post_init__(self) -> None:
        require(self.within >= 0, "tolerance.within must not be negative")


@dataclass(frozen=True)
class Equal:
    """A column whose numbers are another's by construction: the one is not counted beside the other.

    Args:
        column: the other; where: rows in which they are equal.
    """

    column: str
    where: Where = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """A hyper-parameter; a column has the best of its values in every draw.

    Args:
        over: its name; points: its values; of equally good ones the first counts.
        overrides: what makes a point's own run, with ``{point}`` in braces; none: a column's one run holds all points, and
            `value` says where each stands.
        by: what chooses, a path as `NumberSource.value`, with ``{point}`` in braces; None: the column's own numbers. What was
            measured on held-out data has ``val`` in its path; all else is test data, and makes the column an oracle.
        best: which of them is.
    """

    over: str
    points: tuple[str | int | float, ...]
    overrides: tuple[str, ...] = ()
    by: str | None = None
    best: Literal["highest", "lowest"] = "highest"

    def __post_init__(self) -> None:
        require(
            len({str(point) for point in self.points}) == len(self.points) > 0,
            "points: give some, each once",
        )

    @property
    def held_out(self) -> bool:
        """Whether no test data choose."""
        return self.by is not None and "val" in re.split(r"[./]", self.by)

    def filled(self, point: str | int | float) -> tuple[str, ...]:
        """The overrides of a point's run."""
        return tuple(override.format(point=point) for override in self.overrides)


@dataclass(frozen=True)
class Column:
    """A method of the table.

    Args:
        key, label: ours, and the paper's.
        overrides: what makes it, after the row's; None: it does not exist, for the reason `why`.
        role: see `fedexp.tables.report.report.Method`.
        where: rows that have this column; others have no such cell.
        value: what is read instead of the table's ``headline.value``; of a column with a grid, with ``{point}`` in braces.
        grid: whose best value it has.
        tolerance: instead of the table's.
        seeds: instead of the table's, in its full variant.
        reads: the column whose printed numbers this one is held against, too: another reading of what the paper leaves open. It
            is none of the paper's columns.
        equals: in which rows it is another column by construction.
        oracle: what is chosen or trained on test data (the best round, a proxy), for the reader; empty where nothing is, but a
            grid's best value.
        published: how the published file names it, where that is not ``{method: <key>}``.
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
    """Where a cell's number stands.

    Args:
        value: path in result.json, parts separated by dots (``headline.value``, ``metrics.test/global/acc``,
            ``seconds.aggregate``, ``rounds_to.0.38``, ``per_client.test/local/acc.0``), or of a traced round,
            ``trace.<round>.<iteration>.<name>``, where ``<name>=<number>`` is the iteration that has it (``lam=0.5``); the
            row's conditions are filled in: ``trace.1.{iteration}.mean_v/acc``.
        scale: factor that turns it into the table's unit.
        pooled_rounds: ``last_10.<metric>``, conditions filled in as above, where the paper's deviation is over the last ten
            rounds of all runs of a cell together: such a mean and deviation are reported, too, of columns without a `value` of
            their own.
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
                f"'{self.pooled_rounds}' is no list of a run's last rounds",
                where="headline.pooled_rounds",
                expected="last_10.<metric>, a list in result.json",
                do=suggest(self.pooled_rounds, [f"last_10.{metric or '<metric>'}"]),
            )


@dataclass(frozen=True)
class OverrideRule:
    """Overrides for some cells: those whose conditions (and ``method``) fit `where`. They come after the method's."""

    where: Where
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SmallerVariant:
    """A form that is smaller than the paper's: its cells are never `reproduced`.

    Args:
        what: what is smaller, for the reader.
        overrides: come after all of the table's; rules: for some of the cells, after these.
        conditions: overrides of these keys' values instead of the table's.
        grids, seeds: instead of the table's; points: of every column's grid.
    """

    what: str
    overrides: tuple[str, ...] = ()
    rules: tuple[OverrideRule, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)
    grids: tuple[dict[str, Any], ...] | None = None
    seeds: tuple[int, ...] | None = None
    points: tuple[str | int | float, ...] | None = None

    def __post_init__(self) -> None:
        check_seeds(self.seeds)


@dataclass(frozen=True)
class Cost:
    """A measured cost of a variant.

    Args:
        hours: Sum of the runs' times, as if they had run one after another.
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
    what: str
    why: str


@dataclass(frozen=True)
class Target:
    """What a curve must reach.

    Args:
        share: of the final value named by `of`: the ``lower_final`` of the two curves' or one's own, ``a_final``, ``b_final``.
            Where lower is better, the worse one of the two counts, too, and is divided by the share.
        value: instead of both, in the table's unit.
    """

    share: float | None = None
    of: Literal["lower_final", "a_final", "b_final"] = "lower_final"
    value: float | None = None

    def __post_init__(self) -> None:
        require((self.share is None) != (self.value is None), "target: give a share or a value")


@dataclass(frozen=True)
class Claim:
    """What the paper says of the table or figure, as a test on differences paired by seed.

    Args:
        id: for reference; where: ``text``, ``caption``, ... or ``ours`` for what only we expect; says: in our words.
        test: ``above`` (a is better than b, or than the number `than`, by more than `by`), ``within`` (a and b differ by less
            than `x`), ``trend`` (a gets better, ``up``, or worse, ``down``, with every step along a condition, within `slack`)
            or ``sooner`` (a's curve reaches the target before b's).
        a, b: columns, all of which are meant, or one at least of those in `any_of`.
        rows: how many rows (for a trend: groups of rows that differ in `along` alone) must fit.
        only: rows that the claim is about.
        along: a condition, or several that change together, of which the first has the order: numbers ascend, words stay in the
            table's. slack: how far a step may go the other way; negative: how far it must go.
        curve: of ``sooner``, a series of the traced iterations or a metric of the rounds; axis: which of the two.
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
        require(len(self.a) > 0, f"claim {self.id}: a names no column")
        alone = self.test == "trend" or self.than is not None
        require(
            alone != bool(self.b),
            f"claim {self.id}: b goes with every test but trend, and than instead of it",
        )
        require(
            self.than is None or self.test == "above", f"claim {self.id}: than goes with test=above"
        )
        require(
            (self.test == "within") == (self.x is not None),
            f"claim {self.id}: x goes with test=within",
        )
        require(
            (self.test == "trend") == (self.along is not None),
            f"claim {self.id}: along goes with test=trend",
        )
        curve = self.curve is not None and self.target is not None
        require(
            (self.test == "sooner") == curve,
            f"claim {self.id}: curve and target go with test=sooner",
        )
        alternatives = self.any_of is None or self.test in ("above", "sooner")
        require(alternatives, f"claim {self.id}: any_of goes with test=above and sooner")
        require(self.x is None or self.x > 0, f"claim {self.id}: x must be positive")
        require(
            not isinstance(self.rows, int) or self.rows > 0,
            f"claim {self.id}: rows must be positive",
        )

    @property
    def keys_along(self) -> tuple[str, ...]:
        return (self.along,) if isinstance(self.along, str) else self.along or ()


@dataclass(frozen=True)
class Table:
    """What is run, what is read off, what the paper prints.

    Args:
        experiment: option of the group ``experiment``, the base of every cell; None: the defaults of conf/config.yaml.
        paper, source, title: how it is cited, what the table is called there, what it shows.
        metric, unit, higher_is_better: of the numbers.
        keys: conditions that make a row. Grids may have more: runs that differ in those alone are pooled in one cell.
        conditions: key -> override template(s), ``"clients={clients}"``, or value -> overrides (``{same: [init=same]}``).
        grids: products of values (a value or a list of them for every condition); a table may need several.
        seeds: ``seed``, and with it ``seed_data``.
        tolerance: in the table's unit; None: nothing is judged.
        paper_runs: of how many runs the paper's numbers are means; None: it does not say, and one is assumed.
        claims: what the paper says of its numbers. omits: panels and the like that no row of ours stands for, in words.
        tie: the paper's methods that lie closer than this count as tied, in the table's unit.
        reference: rows ``{<conditions>, method, value, sd?}``, generated by ``scripts/make_tables.py``.
        published: ``{file, table}``, where those rows came from.
        given: keys that are left to the user (a local file's path, say) and the cells that have them: overrides of these do not
            make the runs others than the table's.
        tuned: a file of ``conf/tuned``, whose methods have a second column each (`with_tuned`).
        drawings: figures made from the runs (`fedexp.tables.drawing.Drawing`), each a node with a ``_target_``.
        flop: floating-point operations of the local training of all runs, the full variant's; a SAM step counts twice.
        data: options of ``dataset`` that the full variant needs.
        cost: measured cost of the variants that have been run; ``partial`` is a part of the full one.
        plot_styles: of methods in pictures, by column; they are the paper's, and stand in its `fedexp.tables.plot_styles` file.
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
    published: dict[str, str] = field(default_factory=dict)
    given: dict[str, Where] = field(default_factory=dict)
    tuned: str | None = None
    drawings: tuple[dict[str, Any], ...] = ()
    flop: float | None = None
    data: tuple[str, ...] = ()
    cost: dict[Variant, Cost] = field(default_factory=dict)
    plot_styles: dict[str, PlotStyle] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        check_table(self)

    @property
    def columns(self) -> dict[str, Column]:
        return {column.key: column for column in self.methods}

    def row_key(self, conditions: Mapping[str, Value]) -> tuple[Value, ...]:
        """Return the values of the table's keys, which tell its rows apart."""
        return tuple(conditions[key] for key in self.keys)

    def value_path(self, column: Column) -> str:
        """Return the path of a column's numbers in a run's results, with names in braces."""
        return column.value or self.headline.value

    def method(self, column: Column) -> Method:
        """A column as the report has it."""
        return replace(column.method, plot_style=self.plot_styles.get(column.key))

    def smaller(self, variant: Variant) -> SmallerVariant | None:
        """What makes a variant smaller; None for the full one, and for one that the table does not have."""
        return {"full": None, "partial": None, "reduced": self.reduced, "smoke": self.smoke}[
            variant
        ]

    def check(self, variant: Variant) -> None:
        """Refuse a variant that the table does not have."""
        if variant != "full" and self.smaller(variant) is None:
            has = [name for name in ("smoke", "reduced") if self.smaller(name)]
            raise ConfigError(
                f"table {self.name} has no {variant} variant",
                expected=" or ".join(f"--{name}" for name in has)
                or "no flag: it has the full variant alone",
            )

    def printed(
        self, conditions: Mapping[str, Value], method: str
    ) -> tuple[float | None, float | None]:
        """The paper's number that a column is held against, and its deviation; None where it prints none."""
        printed = self.columns[method].reads or method
        for row in self.reference:
            if row["method"] == printed and all(
                row.get(key) == conditions[key] for key in self.keys
            ):
                value, sd = row.get("value"), row.get("sd")
                return None if value is None else float(value), None if sd is None else float(sd)
        return None, None


def fits(where: Where, conditions: Mapping[str, Value], method: str) -> bool:
    """Whether a cell is meant: every key of `where` has the cell's value, or lists it."""
    cell = {**conditions, "method": method}
    return all(
        cell[key] in value if isinstance(value, list) else cell[key] == value
        for key, value in where.items()
    )


def with_tuned(table: Table) -> Table:
    """The table with a column of ours beside every method that its tuning sweeps, with the coefficient that was chosen.

    One that is not chosen yet has no runs, and says so.
    """
    if table.tuned is None:
        return table
    tuning, columns = load_tuning(table.tuned), list(table.methods)
    for key in tuning.sweeps:
        require_known(key, table.columns, f"conf/tuned/{table.tuned}.yaml, sweeps")
        base, setting = table.columns[key], tuning.setting(key)
        rules = [
            rule
            for one in (table, table.reduced)
            if one
            for rule in one.rules
            if "method" in rule.where
        ]
        own = [
            override
            for rule in rules
            if fits(rule.where, tuning.cell, key)
            for override in rule.overrides
        ]
        column = replace(
            base,
            key=f"{key}_tuned",
            label=f"{base.label}, tuned" + (f" ({setting[0]})" if setting else ""),
            role="ours",
            overrides=setting and (*(base.overrides or ()), *own, *setting),
            why=""
            if setting
            else f"not chosen yet: scripts/tune.py {table.tuned} {key} writes conf/tuned",
            where={**base.where, **tuning.where},
            equals=None,
        )
        columns.append(column)
    return replace(table, methods=tuple(columns))


def table_names() -> dict[str, Path]:
    """``<paper>/<table>`` of every table, built in or in ``./conf/table``, and its file."""
    found = {}
    for folder in (conf_dir(), user_conf_dir()):
        for path in sorted((folder / "table").rglob("*.yaml")) if folder is not None else ():
            if not path.name.startswith("_"):  # what a paper's tables share
                found[path.relative_to(folder / "table").with_suffix("").as_posix()] = path  # type: ignore[operator]
    return found


def load_table(name: str) -> Table:
    """The table called `name`; `ConfigError` with the nearest name, or with what is wrong in its file."""
    known = table_names()
    if name not in known:
        ends = [full for full in known if full.rpartition("/")[2] == name]
        near = next(iter(ends), nearest(name, known))
        raise ConfigError(
            f"unknown table '{name}'",
            expected=", ".join(known) or "a file in conf/table",
            do=f"did you mean '{near}'?" if near else "fedexp-table list shows what there is",
        )
    return read_table(known[name], name)


def read_table(path: Path, name: str) -> Table:
    """The table in `path`."""
    try:
        node = read_yaml(path)
    except yaml.YAMLError as error:
        why = " ".join(str(error).replace("<unicode string>", path.name).split())
        raise ConfigError(
            "a table's file is not YAML", where=str(path), got=why, do="mend the file"
        ) from None
    if not isinstance(node, dict):
        raise ConfigError(
            "a table's file must be a mapping", where=str(path), got=type(node).__name__
        )
    try:
        return replace(
            with_tuned(build(Table, {**node, "name": name}, "")),
            plot_styles=read_plot_styles(path.parent),
        )
    except ConfigError as error:
        inside = error.facts.get("where")
        error.facts["where"] = f"{path}" + (f", {inside}" if inside and inside != "config" else "")
        raise
