"""Checks of a table's file that involve several of its parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from string import Formatter
from typing import Any

from fedexp.core.build import convert, require
from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.selection import is_number
from fedexp.tables.claim_rows import row_groups
from fedexp.tables.report.report import Value
from fedexp.tables.schema import Claim, Column, Table, Where, check_seeds, require_known


def check_table(table: Table) -> None:
    """Refuse a table whose parts do not fit each other.

    Raises:
        ConfigError: The first problem, with its place in the file.
    """
    _check_values(table)
    require_known(table.keys, table.conditions, "keys")
    _check_condition_overrides(table)
    _check_condition_grids(table)
    _check_where_clauses(table)
    _check_paths(table)
    for column in table.methods:
        _check_point_grid(table, column)
        _check_column_references(table, column)
    for claim in table.claims:
        _check_claim(table, claim)
    _check_reference(table)


def _check_values(table: Table) -> None:
    """Check values that do not depend on other parts of the table."""
    require(len({*table.keys}) == len(table.keys), "keys: name each condition once")
    keys = {column.key for column in table.methods}
    require(len(keys) == len(table.methods) > 0, "methods: keys must differ")
    check_seeds(table.seeds)
    ids = {claim.id for claim in table.claims}
    checks = {
        "tie must not be negative": table.tie >= 0,
        "flop must be positive": table.flop is None or table.flop > 0,
        "paper_runs must be positive": table.paper_runs is None or table.paper_runs > 0,
        "claims: ids must differ": len(ids) == len(table.claims),
    }
    for message, holds in checks.items():
        require(holds, message)


def _check_condition_overrides(table: Table) -> None:
    """Check that the overrides of every condition are texts."""
    for prefix, part in (("", table), ("reduced.", table.reduced), ("smoke.", table.smoke)):
        for key, node in (part.conditions if part else {}).items():
            for given in node.values() if isinstance(node, dict) else [node]:
                if given is None:  # the condition has no override
                    continue
                for override in given if isinstance(given, list) else [given]:
                    if not isinstance(override, str):
                        raise ConfigError(
                            f"an override of '{key}' must be a text",
                            where=f"{prefix}conditions.{key}",
                            expected=f"key={{{key}}}, a list of such texts, or a mapping from "
                            f"values of {key} to such texts",
                            got=repr(override),
                        )


def _check_condition_grids(table: Table) -> None:
    """Check that every grid of conditions has valid values of each condition."""
    for variant in ("full", "reduced", "smoke"):
        smaller = table.smaller(variant)
        grids = table.grids
        prefix = ""
        if smaller and smaller.grids is not None:
            grids, prefix = smaller.grids, f"{variant}."
        require(len(grids) > 0, f"{prefix}grids: give at least one grid of conditions")
        for number, grid in enumerate(grids):
            where = f"{prefix}grids[{number}]"
            require_known(grid, table.conditions, where)
            missing = [key for key in table.conditions if key not in grid]
            require(not missing, f"{where}: no value of {', '.join(missing)}")
            for key, own in grid.items():
                require(own != [], f"{where}.{key}: give at least one value")
                for value in own if isinstance(own, list) else [own]:
                    convert(value, Value, f"{where}.{key}")


def _check_where_clauses(table: Table) -> None:
    """Check the names in ``where`` clauses and in ``superseded``."""
    for variant, part in (("reduced", table.reduced), ("smoke", table.smoke)):
        if part and part.superseded:
            where = f"{variant}.superseded.methods"
            require_known(part.superseded.methods, table.columns, where)
    values = _condition_values(table)
    for where, clause in _where_clauses(table):
        require_known(clause, ["method", *table.conditions], where)
        for key, accepted in clause.items():
            named = accepted if isinstance(accepted, list) else [accepted]
            for value in named:
                _require_value(value, values[key], f"{where}.{key}")


def _condition_values(table: Table) -> dict[str, list[Value]]:
    """Return the values of each condition in the grids of all variants.

    The values of ``method`` are the columns. A tuning file may add columns later, which
    end in ``_tuned``.
    """
    found: dict[str, list[Value]] = {key: [] for key in table.conditions}
    for part in (table, table.reduced, table.smoke):
        for grid in (part and part.grids) or ():
            for key, own in grid.items():
                found[key] += own if isinstance(own, list) else [own]
    return {**found, "method": [*table.columns, *(f"{key}_tuned" for key in table.columns)]}


def _require_value(value: Any, known: Sequence[Value], where: str) -> None:
    """Refuse a value that a condition does not have, and suggest the nearest one.

    The message names a value that only has another type, such as the number 0.1 instead
    of the text ``'0.1'``.
    """
    if value in known:
        return
    numbers = [one for one in known if is_number(one)]
    if same := [one for one in known if str(one) == str(value)]:
        kind = "text" if isinstance(same[0], str) else "number" if is_number(same[0]) else "value"
        do = f"write the {kind}: {same[0]!r}, not {value!r}"
    elif is_number(value) and numbers:
        do = f"did you mean {min(numbers, key=lambda one: abs(one - value))}?"
    else:
        do = suggest(str(value), map(str, known))
    raise ConfigError(f"unknown value '{value}'", where=where, do=do)


def _where_clauses(table: Table) -> Iterator[tuple[str, Where]]:
    for column in table.methods:
        yield f"methods.{column.key}.where", column.where
        if column.equals is not None:
            yield f"methods.{column.key}.equals.where", column.equals.where
    for place, part in (("", table), ("reduced.", table.reduced), ("smoke.", table.smoke)):
        for number, rule in enumerate(part.rules if part else ()):
            yield f"{place}rules[{number}].where", rule.where
    for key, clause in table.given.items():
        yield f"given.{key}", clause
    for claim in table.claims:
        yield f"claims.{claim.id}.only", claim.only


def _check_paths(table: Table) -> None:
    """Check the placeholders in the paths at which numbers are read."""
    for name in ("value", "pooled_rounds"):
        _check_placeholders(getattr(table.headline, name), table.keys, f"headline.{name}")
    for column in table.methods:
        names = [*table.keys, "point"] if column.grid else table.keys
        _check_placeholders(column.value, names, f"methods.{column.key}.value")


def _check_point_grid(table: Table, column: Column) -> None:
    """Check the placeholders of a column's hyper-parameter grid.

    A grid that cannot be used is refused.
    """
    grid, where = column.grid, f"methods.{column.key}.grid"
    if grid is None:
        return

    for override in grid.overrides:
        _check_placeholders(override, ["point"], f"{where}.overrides")
    _check_placeholders(grid.by, [*table.keys, "point"], f"{where}.by")

    if problem := _point_grid_problem(table, column):
        raise ConfigError(problem, where=where, expected="see Grid in fedexp.tables.schema")


def _point_grid_problem(table: Table, column: Column) -> str:
    """Return why a column's grid cannot be used. The text is empty if it can."""
    grid = column.grid
    assert grid is not None
    value = table.value_path(column)
    named = any("{point}" in text for text in grid.overrides) or all(
        "{point}" in path for path in (value, grid.by or value)
    )

    if not named:
        return (
            "its points look the same: {point} must be in the overrides or in every path "
            "that is read"
        )

    if grid.by is None and (grid.best == "highest") != table.higher_is_better:
        return f"the {grid.best} of its numbers is the worst one in this table"
    if any(claim.curve and column.key in (*claim.a, *claim.b) for claim in table.claims):
        return "a claim needs its curve, and it has one for every point"
    return "a condition is called point, too" if "point" in table.conditions else ""


def _check_column_references(table: Table, column: Column) -> None:
    """Check the other columns that a column names."""
    others = [column.reads, column.equals and column.equals.column]
    named = [other for other in others if other is not None]
    require_known(named, table.columns, f"methods.{column.key}")
    if column.equals is None:
        return

    require_known(column.equals.where, table.keys, f"methods.{column.key}.equals.where")
    if table.columns[column.equals.column].equals is not None:
        raise ConfigError(
            (
                f"'{column.equals.column}' equals another column itself, so cells of neither "
                f"might be counted"
            ),
            where=f"methods.{column.key}.equals.column",
            expected="a column without 'equals'",
        )


def _check_claim(table: Table, claim: Claim) -> None:
    """Check the columns and conditions that a claim names."""
    require_known((*claim.a, *claim.b), table.columns, f"claims.{claim.id}")
    require_known(claim.only, table.keys, f"claims.{claim.id}.only")
    require_known(claim.keys_along, table.keys, f"claims.{claim.id}.along")
    if not isinstance(claim.rows, int):
        return

    rows = len(row_groups(claim, table, "full"))
    if claim.rows > rows:
        raise ConfigError(
            f"claim {claim.id} must hold in {claim.rows} rows, and it is about {rows} rows",
            where=f"claims.{claim.id}.rows",
            expected=f"all, most or a number up to {rows}",
            got=claim.rows,
        )


def _check_reference(table: Table) -> None:
    """Check the rows of the paper's numbers: names, numbers, and one row per cell."""
    cells, values = set(), _condition_values(table)
    for row in table.reference:
        require_known([row.get("method")], table.columns, "reference")
        require_known(row, [*table.keys, "method", "value", "sd"], "reference")
        missing = [key for key in table.keys if key not in row]
        require(not missing, f"reference: {row} has no {', '.join(missing)}")
        for name in ("value", "sd"):
            number = row.get(name)
            require(
                number is None or (is_number(number) and not math.isnan(number)),
                f"reference: {name} must be a number, got {number!r}",
            )
        sd = row.get("sd")
        require(sd is None or sd >= 0, f"reference: sd must not be negative, got {sd}")
        several = [key for key in table.keys if isinstance(row[key], list | dict)]
        require(not several, f"reference: {row} has several values of {', '.join(several)}")
        for key in table.keys:
            _require_value(row[key], values[key], f"reference.{key}")
        cell = (row["method"], *table.row_key(row))
        require(cell not in cells, f"reference: two rows of {' '.join(map(str, cell))}")
        cells.add(cell)


def _check_placeholders(text: str | None, known: Collection[str], where: str) -> None:
    """Check that every placeholder in a text is known."""
    try:
        fields = list(Formatter().parse(text or ""))
    except ValueError as error:
        raise ConfigError(f"'{text}' cannot be filled in", where=where, got=str(error)) from None
    require_known([name for _, name, _, _ in fields if name is not None], known, where)
