"""Jobs of a table: one run for every row, method and seed.

Jobs that share most of their computation are next to each other.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fedexp.core.errors import ConfigError, nearest, suggest
from fedexp.tables.report.report import Value, Variant
from fedexp.tables.schema import Column, OverrideRule, Table, fits


@dataclass(frozen=True)
class Job:
    """A run that a cell needs.

    Args:
        seed: Seed of the run.
        pooled: Conditions of the run that are not conditions of the row.
        declared: Overrides of the table, then the user's overrides of keys that the
            table leaves to the user.
        overrides: Overrides of the table, then all of the user's that apply to the
            cell.
        point: Point of the column's grid as text, empty without a grid.
    """

    seed: int
    pooled: dict[str, Value]
    declared: tuple[str, ...]
    overrides: tuple[str, ...]
    point: str = ""


@dataclass(frozen=True)
class PlannedCell:
    """A cell of the table with the jobs that it needs.

    A cell has no jobs if its method does not exist.
    """

    conditions: dict[str, Value]
    method: str
    jobs: tuple[Job, ...]


def placeholders(planned: PlannedCell, job: Job) -> dict[str, Value]:
    """Return the values for the placeholders in the paths of a job's numbers.

    The numbers are read from the job's result at these paths. Placeholders such as
    ``{point}`` are filled with the cell's conditions and, in a grid, the point.
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
        only: Accepted values of conditions (or ``method``) by key. None: all cells.
        seeds: Seeds that replace the table's. None: the table's.
        extra: Overrides of the user, which are applied last. An override of a key in
            `Table.given` is applied only to the cells that are listed there.

    Raises:
        ConfigError: The table has no such variant, or no cell fits `only`.
    """
    table.check(variant)
    found: dict[tuple[tuple[Value, ...], str], list[Job]] = {}
    for full in _points(table, variant):
        for column in table.methods:
            if not fits(column.where, full, column.key) or not _wanted(
                only or {}, {**full, "method": column.key}
            ):
                continue
            place = table.row_key(full), column.key
            jobs = found.setdefault(place, [])
            if column.overrides is None:
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

    if not found:
        raise ConfigError("no cell of the table fits", where="--only", got=_only_text(only or {}))
    return tuple(
        PlannedCell(dict(zip(table.keys, place, strict=True)), method, tuple(jobs))
        for (place, method), jobs in found.items()
    )


def declared_seeds(table: Table, variant: Variant, column: Column) -> tuple[int, ...]:
    """Return the seeds that a column has in a variant if the user gives no others."""
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
    keyed: list[tuple[int, int, int, Job]] = []
    rows: dict[str, int] = {}
    for cell in cells:
        for job in cell.jobs:
            row = rows.setdefault(repr((cell.conditions, job.pooled)), len(rows))
            keyed.append((row, job.seed, len(keyed), job))
    return list(
        {job.overrides: job for *_, job in sorted(keyed, key=lambda item: item[:3])}.values()
    )


def parse_only(table: Table, clauses: Sequence[str]) -> dict[str, list[Value]]:
    """Parse clauses of the command line such as ``clients=5`` and ``beta=0.01,0.1``.

    ``method=NAME`` names the column of this key, or else all columns of this method.
    """
    only: dict[str, list[Value]] = {}
    for clause in clauses:
        key, equals, text = clause.partition("=")
        if not equals:
            raise ConfigError(f"'{clause}' is not key=value", where="--only")
        if key not in (options := ["method", *table.conditions]):
            raise ConfigError(f"unknown key '{key}'", where="--only", do=suggest(key, options))
        values = [yaml.safe_load(part) for part in text.split(",")]
        known = (
            list(table.columns)
            if key == "method"
            else list(dict.fromkeys(p[key] for p in _all_points(table)))
        )

        columns = _columns_by_method(table) if key == "method" else {}
        for value in values:
            if value not in known and value not in columns:
                expected = list(dict.fromkeys(map(str, [*known, *columns])))
                raise ConfigError(
                    f"no cell has {key}={value}",
                    where="--only",
                    expected=", ".join(expected),
                    do=suggest(str(value), expected),
                )
            chosen = [value] if value in known else columns[value]
            only.setdefault(key, []).extend(chosen)

    return only


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


def _typed(value: Value) -> str:
    """Return a value as a text that YAML reads back as the same value."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    # YAML reads 1e-05 as text.
    if isinstance(value, float) and "." not in text:
        text = text.replace("e", ".0e")
    return text if yaml.safe_load(text) == value else json.dumps(value)


def split_only(table: Table, clauses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of ``--only`` into clauses of the table and overrides.

    An argument is a clause if its key is a key of the table, or resembles such a key
    and is probably misspelled. Every other argument is an override.
    """
    keys = ["method", *table.conditions]
    mine = [c for c in clauses if (k := c.partition("=")[0]) in keys or nearest(k, keys)]
    return mine, [clause for clause in clauses if clause not in mine]


def _points(table: Table, variant: Variant) -> Iterator[dict[str, Value]]:
    """Yield all combinations of the conditions' values, grid by grid, each once."""
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


def _all_points(table: Table) -> Iterator[dict[str, Value]]:
    for variant in ("full", "reduced", "smoke"):
        yield from _points(table, variant)


def _wanted(only: Mapping[str, Sequence[Value]], cell: Mapping[str, Value]) -> bool:
    return all(cell[key] in values for key, values in only.items())


def _overrides(
    table: Table, variant: Variant, full: dict[str, Value], method: str, by_point: tuple[str, ...]
) -> list[str]:
    """Return the overrides of a run in the order in which they apply.

    The order is: experiment, row, method, grid point, rules, variant, rules of the
    variant.
    """
    smaller = table.smaller(variant)
    found = [f"experiment={table.experiment}"] if table.experiment else []
    for key, value in full.items():
        templates = (smaller.conditions if smaller else {}).get(key, table.conditions[key])
        found += [
            _filled(table, key, text, full) for text in _templates(table, key, value, templates)
        ]
    found += [*(table.columns[method].overrides or ()), *by_point]
    found += _ruled(table.rules, full, method)
    return (
        found
        if smaller is None
        else [*found, *smaller.overrides, *_ruled(smaller.rules, full, method)]
    )


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


def _only_text(only: Mapping[str, Sequence[Value]]) -> str:
    return " ".join(f"{key}={','.join(map(str, values))}" for key, values in only.items())
