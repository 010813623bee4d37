"""Checks of a table's file that involve several of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter

from fedexp.core.build import require
from fedexp.core.errors import ConfigError
from fedexp.tables.schema import Claim, Column, Table, Where, check_seeds, require_known


def check_table(table: Table) -> None:
    """Refuse a table whose parts do not fit each other.

    Raises:
        ConfigError: The first problem, with its place in the file.
    """
    _check_values(table)
    for key in table.keys:
        require_known(key, table.conditions, "keys")
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
    require(
        len({column.key for column in table.methods}) == len(table.methods) > 0,
        "methods: keys must differ",
    )
    check_seeds(table.seeds)
    require(table.tie >= 0, "tie must not be negative")
    require(table.flop is None or table.flop > 0, "flop must be positive")
    require(table.paper_runs is None or table.paper_runs > 0, "paper_runs must be positive")
    require(
        len({claim.id for claim in table.claims}) == len(table.claims), "claims: ids must differ"
    )


def _check_condition_grids(table: Table) -> None:
    """Check that every grid of conditions has a value of each condition."""
    for variant in ("full", "reduced", "smoke"):
        smaller = table.smaller(variant)
        for number, grid in enumerate((smaller and smaller.grids) or table.grids):
            where = f"{variant if smaller else ''}.grids[{number}]".lstrip(".")
            for key in grid:
                require_known(key, table.conditions, where)
            missing = [key for key in table.conditions if key not in grid]
            require(not missing, f"{where}: no value of {', '.join(missing)}")


def _check_where_clauses(table: Table) -> None:
    """Check that every ``where`` clause names only conditions or ``method``."""
    for where, clause in _where_clauses(table):
        for key in clause:
            require_known(key, ["method", *table.conditions], where)


def _where_clauses(table: Table) -> Iterator[tuple[str, Where]]:
    for column in table.methods:
        yield f"methods.{column.key}.where", column.where
    for place, part in (("", table), ("reduced.", table.reduced), ("smoke.", table.smoke)):
        for number, rule in enumerate(part.rules if part else ()):
            yield f"{place}rules[{number}].where", rule.where
    for key, clause in table.given.items():
        yield f"given.{key}", clause


def _check_paths(table: Table) -> None:
    """Check the placeholders in the paths at which numbers are read."""
    for where, path, names in _paths(table):
        for key in _names_in_braces(path, where):
            require_known(key, names, where)


def _paths(table: Table) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the place of each path in the file, the path, and allowed placeholders."""
    keys = list(table.keys)
    yield "headline.value", table.headline.value, keys
    yield "headline.pooled_rounds", table.headline.pooled_rounds or "", keys
    for column in table.methods:
        names = [*keys, "point"] if column.grid else keys
        yield f"methods.{column.key}.value", column.value or "", names


def _check_point_grid(table: Table, column: Column) -> None:
    """Check the placeholders of a column's grid, and refuse a grid that is unusable."""
    grid, where = column.grid, f"methods.{column.key}.grid"
    if grid is None:
        return

    for override in grid.overrides:
        for key in _names_in_braces(override, f"{where}.overrides"):
            require_known(key, ["point"], f"{where}.overrides")
    for key in _names_in_braces(grid.by or "", f"{where}.by"):
        require_known(key, [*table.keys, "point"], f"{where}.by")

    if problem := _point_grid_problem(table, column):
        raise ConfigError(problem, where=where, expected="see Grid in fedexp.tables.schema")


def _point_grid_problem(table: Table, column: Column) -> str:
    """Return why a column's grid cannot be used, empty if it can."""
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
    for other in (column.reads, column.equals and column.equals.column):
        if other is not None:
            require_known(other, table.columns, f"methods.{column.key}")
    if column.equals is None:
        return

    for key in column.equals.where:
        require_known(key, table.keys, f"methods.{column.key}.equals.where")
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
    for name in (*claim.a, *claim.b):
        require_known(name, table.columns, f"claims.{claim.id}")
    for key in claim.only:
        require_known(key, table.keys, f"claims.{claim.id}.only")
    for key in claim.keys_along:
        require_known(key, table.keys, f"claims.{claim.id}.along")


def _check_reference(table: Table) -> None:
    """Check the rows of the paper's numbers."""
    for row in table.reference:
        require_known(row.get("method"), table.columns, "reference")
        for key in row:
            require_known(key, [*table.keys, "method", "value", "sd"], "reference")


def _names_in_braces(path: str, where: str) -> list[str]:
    try:
        return [name for _, name, _, _ in Formatter().parse(path) if name is not None]
    except ValueError as error:
        raise ConfigError(f"'{path}' cannot be filled in", where=where, got=str(error)) from None
