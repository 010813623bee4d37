"""The jobs of a table, which are the runs that its cells need.

A cell is one column (a method) in one row. It needs one run for every seed and every
point of its hyper-parameter grid. A condition is a setting of the table, such as the
number of clients. Some conditions identify a row, and the others are pooled: the runs
of one cell may differ in them. Cells may share runs. Jobs that share most of their
computation are launched one after the other.
"""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fedexp.core.errors import ConfigError, nearest, suggest
from fedexp.tables.grouping import grouped
from fedexp.tables.report.layout import label
from fedexp.tables.report.report import Value, Variant
from fedexp.tables.schema import Column, OverrideRule, Table, fits

# Overrides of every column of a table with `server_data: reserved`. They reserve 2 % of
# the training data for the server, as in FedLAW's code. The methods with server data
# use the same share.
_RESERVED = ("proxy.source=train", "proxy.size=0.02")
# Keys that determine the samples which the server gets.
_RESERVING = ("proxy.source", "proxy.size", "proxy.dataset", "limit.proxy", "eval.held_out")


@dataclass(frozen=True)
class Job:
    """A run that a cell needs.

    Args:
        seed: Seed of the run.
        pooled: Conditions of the run that do not identify its row. Runs that differ
            only in these conditions are in one cell.
        declared: Overrides of the table, followed by the user's overrides of keys that
            the table leaves to the user.
        overrides: Overrides of the table, followed by all overrides of the user that
            apply to the cell. The run is started with them.
        point: Value from the column's hyper-parameter grid as text, empty if the column
            has no grid.
    """

    seed: int
    pooled: dict[str, Value]
    declared: tuple[str, ...]
    overrides: tuple[str, ...]
    point: str = ""


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the table with the jobs that it needs.

    A cell has no jobs if its method does not exist in fedexp.
    """

    conditions: dict[str, Value]
    method: str
    jobs: tuple[Job, ...]


def placeholders(planned: PlannedCell, job: Job) -> dict[str, Value]:
    """Return the values that fill the placeholders in the paths of a job's numbers.

    A path is the place in the job's result at which a number is read. A placeholder
    such as ``{clients}`` stands for a condition of the cell. ``{point}`` stands for the
    job's value from the hyper-parameter grid.
    """
    return {**planned.conditions, **({"point": job.point} if job.point else {})}


def planned_cells(
    table: Table,
    variant: Variant = "full",
    *,
    only: Mapping[str, Sequence[Value]] | None = None,
    seeds: Sequence[int] | None = None,
    extra: Sequence[str] = (),
) -> tuple[PlannedCell, ...]:
    """Return the cells of a variant of a table, row by row, with their jobs.

    Args:
        table: The table.
        variant: Variant of the table.
        only: Accepted values by key. A key is a condition or ``method``. None: all
            cells.
        seeds: Seeds that replace the table's seeds. None: the table's seeds are used.
        extra: Overrides of the user, which are applied last. If the key of an override
            is in `Table.given`, it is applied only to the cells that fit the conditions
            given there.

    Raises:
        ConfigError: The table has no such variant, or no cell fits `only`.
    """
    table.check(variant)
    wanted = {key: list(values) for key, values in (only or {}).items()}
    found: dict[tuple[tuple[Value, ...], str], list[Job]] = {}
    for full in _points(table, variant):
        for column in table.methods:
            if not all(fits(where, full, column.key) for where in (column.where, wanted)):
                continue
            place = table.row_key(full), column.key
            jobs = found.setdefault(place, [])
            if column.overrides is None or (variant != "smoke" and column.why_untuned(full)):
                continue
            fitting = [o for o in extra if fits(table.given.get(key_of(o), {}), full, column.key)]
            left = [override for override in fitting if key_of(override) in table.given]
            pooled = {key: value for key, value in full.items() if key not in table.keys}

            for seed, point in itertools.product(
                seeds or declared_seeds(table, variant, column),
                points_of(table, variant, column) or ("",),
            ):
                by_point = column.grid.filled(point) if column.grid else ()
                own = [*_overrides(table, variant, full, column.key, by_point), f"seed={seed}"]
                jobs.append(
                    Job(seed, pooled, _last([*own, *left]), _last([*own, *fitting]), str(point))
                )

    if table.server_data == "reserved":
        _check_reserved(table, found)
    if not found:
        clauses = [f"{key}={','.join(map(str, values))}" for key, values in wanted.items()]
        raise ConfigError("no cell of the table fits", where="--only", got=" ".join(clauses))
    return tuple(
        PlannedCell(dict(zip(table.keys, place, strict=True)), method, tuple(jobs))
        for (place, method), jobs in found.items()
    )


def planned_rows(table: Table, variant: Variant) -> list[dict[str, Value]]:
    """Return the conditions of a variant's rows, each once.

    They are those of `planned_cells`, which also lists the jobs and takes much longer.

    Raises:
        ConfigError: The table has no such variant.
    """
    table.check(variant)
    return [
        dict(zip(table.keys, place, strict=True))
        for place in dict.fromkeys(
            table.row_key(full)
            for full in _points(table, variant)
            if any(fits(column.where, full, column.key) for column in table.methods)
        )
    ]


def _check_reserved(
    table: Table, found: Mapping[tuple[tuple[Value, ...], str], Sequence[Job]]
) -> None:
    """Refuse columns that would reserve different samples for the server.

    Raises:
        ConfigError: The columns of one row and seed have different ``proxy`` settings.
    """
    reserved: dict[tuple[tuple[Value, ...], str], tuple[list[str], str]] = {}
    for (place, method), jobs in found.items():
        for job in jobs:
            own = sorted(o for o in job.overrides if key_of(o) in _RESERVING)
            key = place, f"seed={job.seed} {job.pooled}"
            first, column = reserved.setdefault(key, (own, method))
            if own != first:
                raise ConfigError(
                    f"columns '{column}' and '{method}' would reserve different server data",
                    where=f"table {table.name}, server_data: reserved",
                    expected=" ".join(first),
                    got=" ".join(own),
                    do="set proxy.* in conditions or in a rule for all columns",
                )


def check_rows_differ(table: Table, variant: Variant) -> None:
    """Refuse a variant with two rows that show the same numbers in all columns.

    The conditions of such rows do not change any run. A single column may have equal
    numbers in several rows, such as a baseline without the hyper-parameter of the rows.
    Rows may also share runs if they read different numbers of them.

    Raises:
        ConfigError: Two rows have the same runs and read the same numbers.
    """
    # One seed is enough, because all rows of a column have the same seeds.
    rows: dict[tuple[Value, ...], dict[str, frozenset[tuple[str, ...]]]] = {}
    for planned in planned_cells(table, variant, seeds=(0,)):
        if planned.jobs:
            place = table.row_key(planned.conditions)
            rows.setdefault(place, {})[planned.method] = _numbers_read(table, planned)

    # Only rows that are equal in some column are compared in all columns.
    equal = grouped(
        ((column, read), place) for place in rows for column, read in rows[place].items()
    )
    for places in equal.values():
        for one, other in itertools.combinations(places, 2):
            shared = rows[one].keys() & rows[other].keys()
            if all(rows[one][column] == rows[other][column] for column in shared):
                column = next(name for name in rows[one] if name in shared)
                raise _equal_rows(table, column, one, other)


def _numbers_read(table: Table, planned: PlannedCell) -> frozenset[tuple[str, ...]]:
    """Return the overrides of a cell's runs, each with the paths that are read."""
    column = table.columns[planned.method]
    by = None if column.grid is None else column.grid.by
    paths = [path for path in (table.value_path(column), by) if path is not None]
    return frozenset(
        (*job.overrides, *(path.format(**placeholders(planned, job)) for path in paths))
        for job in planned.jobs
    )


def _equal_rows(
    table: Table, column: str, one: tuple[Value, ...], other: tuple[Value, ...]
) -> ConfigError:
    """Return the error for two rows that show the same numbers."""
    differing = [key for key, a, b in zip(table.keys, one, other, strict=True) if a != b]
    names = [
        " ".join(f"{key}={label(value)}" for key, value in zip(table.keys, place, strict=True))
        for place in (one, other)
    ]
    return ConfigError(
        f"column '{column}' has the same runs in two rows, as all other columns have",
        where=f"table {table.name}, conditions.{differing[0]}",
        expected=f"overrides that differ between the values of {' or '.join(differing)}",
        got=" and ".join(names),
        do=f"write the placeholder {{{differing[0]}}} into conditions.{differing[0]}, or into "
        "the value of a column",
    )


def declared_seeds(table: Table, variant: Variant, column: Column) -> tuple[int, ...]:
    """Return the seeds of a column in a variant if the user gives no other seeds."""
    smaller = table.smaller(variant)
    if smaller is not None:
        return smaller.seeds or table.seeds
    return column.seeds or table.seeds


def points_of(table: Table, variant: Variant, column: Column) -> tuple[str | int | float, ...]:
    """Return the points of a column's grid in a variant, empty without a grid."""
    smaller = table.smaller(variant)
    return () if column.grid is None else (smaller and smaller.points) or column.grid.points


def launch_order(cells: Sequence[PlannedCell]) -> list[Job]:
    """Return all jobs in the order of their launch, each once.

    The jobs are sorted by row, pooled conditions, seed and method, so jobs that train
    the same clients are next to each other.
    """
    rows = grouped(
        (repr((cell.conditions, job.pooled)), job) for cell in cells for job in cell.jobs
    )
    ordered = [job for jobs in rows.values() for job in sorted(jobs, key=lambda job: job.seed)]
    return list({job.overrides: job for job in ordered}.values())


def parse_only(table: Table, clauses: Sequence[str]) -> dict[str, list[Value]]:
    """Parse clauses of the command line such as ``clients=5`` and ``beta=0.01,0.1``.

    ``method=NAME`` selects the column whose key is NAME. If no column has this key, it
    selects all columns that run the method NAME.
    """
    only: dict[str, list[Value]] = {}
    points = [
        point for variant in ("full", "reduced", "smoke") for point in _points(table, variant)
    ]
    for clause in clauses:
        key, equals, text = clause.partition("=")
        if not equals:
            raise ConfigError(f"'{clause}' is not key=value", where="--only")
        if key not in (options := ["method", *table.conditions]):
            raise ConfigError(f"unknown key '{key}'", where="--only", do=suggest(key, options))
        values = _scalars(text)
        known = (
            list(table.columns)
            if key == "method"
            else list(dict.fromkeys(point[key] for point in points))
        )

        columns = _columns_by_method(table) if key == "method" else {}
        names = list(dict.fromkeys(map(str, [*known, *columns])))
        if not values:
            raise ConfigError(
                f"no cell has {key}={text}",
                where="--only",
                expected=", ".join(names),
                do=f"write {key}={','.join(names[:2])}",
            )
        for value in values:
            if value not in known and value not in columns:
                raise ConfigError(
                    f"no cell has {key}={value}",
                    where="--only",
                    expected=", ".join(names),
                    do=suggest(str(value), names),
                )
            chosen = [value] if value in known else columns[value]
            only.setdefault(key, []).extend(chosen)

    return only


def _scalars(text: str) -> list[Value]:
    """Return the values of a text such as ``0.1,0.5``.

    The text is read as the inside of a YAML list, so a comma in quotes is part of a
    value. The result is empty if a value is a list, a mapping or not valid YAML.
    """
    try:
        values = yaml.safe_load(f"[{text}]")
    except (yaml.YAMLError, ValueError):  # YAML raises ValueError for the date 2020-13-01
        return []
    return values if all(isinstance(value, Hashable) for value in values) else []


def _columns_by_method(table: Table) -> dict[Value, list[Value]]:
    """Return the keys of the columns that run each method."""
    columns: dict[Value, list[Value]] = {}
    for column in table.methods:
        for override in column.overrides or ():
            key, _, method = override.partition("=")
            if key == "method":
                columns.setdefault(method, []).append(column.key)
    return columns


def command(
    table: Table,
    variant: Variant,
    extra: Sequence[str],
    conditions: Mapping[str, Value],
    method: str,
    seed: int,
) -> str:
    """Return the shell command that runs one cell with one seed.

    `parse_only` reads the conditions back from the ``--only`` clauses of the command.
    """
    flag = [] if variant in ("full", "partial") else [f"--{variant}"]
    clauses = [f"{key}={_typed(value)}" for key, value in {**conditions, "method": method}.items()]
    return shlex.join(
        ["fedexp-table", "run", table.name, *extra, *flag, "--only", *clauses, "--seeds", str(seed)]
    )


@functools.lru_cache(maxsize=1024, typed=True)
def _typed(value: Value) -> str:
    """Return a value as a text that `_scalars` reads back as the same value."""
    # YAML reads 1e-05 and inf, which are the labels of floats, as texts.
    text = yaml.safe_dump(value).split()[0] if isinstance(value, float) else label(value)
    return text if _scalars(text) == [value] else json.dumps(value)


def split_only(table: Table, clauses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of ``--only`` into clauses of the table and overrides.

    An argument is a clause if its key is ``method`` or a condition of the table. It is
    also a clause if its key resembles one of them, since it is probably misspelled.
    Every other argument is an override.
    """
    keys = ["method", *table.conditions]
    mine = [c for c in clauses if (k := c.partition("=")[0]) in keys or nearest(k, keys)]
    return mine, [clause for clause in clauses if clause not in mine]


def _points(table: Table, variant: Variant) -> Iterator[dict[str, Value]]:
    """Yield every combination of condition values in the variant's grids, each once."""
    smaller = table.smaller(variant)
    seen = set()
    for grid in (smaller and smaller.grids) or table.grids:
        axes = [
            value if isinstance(value, list) else [value]
            for value in (grid[key] for key in table.conditions)
        ]
        for values in itertools.product(*axes):
            if values not in seen:
                seen.add(values)
                yield dict(zip(table.conditions, values, strict=True))


def _overrides(
    table: Table, variant: Variant, full: dict[str, Value], method: str, by_point: tuple[str, ...]
) -> list[str]:
    """Return the overrides of a run in the order in which they apply.

    The order is: experiment, row, reserved server data, method, grid point, rules,
    variant, rules of the variant.
    """
    smaller = table.smaller(variant)
    found = [f"experiment={table.experiment}"] if table.experiment else []
    conditions = table.conditions | (smaller.conditions if smaller else {})
    for key, value in full.items():
        templates = _templates(table, key, value, conditions[key])
        found += [_filled(table, key, template, full) for template in templates]
    if table.server_data == "reserved":
        found += _RESERVED
    found += [*(table.columns[method].overrides or ()), *by_point]
    found += _ruled(table.rules, full, method)
    if smaller is not None:
        found += [*smaller.overrides, *_ruled(smaller.rules, full, method)]
    return found


def _ruled(rules: Sequence[OverrideRule], full: dict[str, Value], method: str) -> list[str]:
    return [
        override for rule in rules if fits(rule.where, full, method) for override in rule.overrides
    ]


def _last(overrides: Sequence[str]) -> tuple[str, ...]:
    """Keep the last override of each key."""
    return tuple({key_of(override): override for override in overrides}.values())


def key_of(override: str) -> str:
    """Return the key that an override sets or removes.

    An override is ``key=value``, ``+key=value``, ``++key=value`` or ``~key``.
    """
    return override.partition("=")[0].lstrip("+~")


def _templates(table: Table, key: str, value: Value, node: Any) -> list[str]:
    if isinstance(node, dict):
        if value not in node:
            raise ConfigError(
                f"value {value!r} of '{key}' has no overrides",
                where=f"table {table.name}, conditions.{key}",
                expected=", ".join(map(str, node)),
            )
        node = node[value]
    return [node] if isinstance(node, str) else list(node or ())


def _filled(table: Table, key: str, template: str, full: dict[str, Value]) -> str:
    try:
        return template.format(**full)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"'{template}' cannot be filled in",
            where=f"table {table.name}, conditions.{key}",
            expected="conditions in braces, e.g. clients={clients}: " + ", ".join(full),
            do=suggest(str(error.args[0]), full) if isinstance(error, KeyError) else None,
        ) from None
