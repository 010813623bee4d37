"""The rows of a table that a claim is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedexp.tables.cells import planned_rows
from fedexp.tables.report.report import Value, Variant
from fedexp.tables.schema import Claim, Table, Where, fits


@dataclass(frozen=True)
class RowGroup:
    """A group of rows on which a test of a claim is decided.

    A group has one row, unless the claim is about a trend. For a trend, the group has
    several rows that differ only in the conditions `Claim.along`. They are in the order
    of the first of these conditions: numbers ascend, and texts keep the table's order.

    Args:
        conditions: Conditions that all rows of the group share.
        places: Keys of the rows.
    """

    conditions: dict[str, Value]
    places: tuple[tuple[Value, ...], ...]


def row_groups(claim: Claim, table: Table, variant: Variant) -> list[RowGroup]:
    """Return the groups of a variant's rows on which a claim is decided.

    A row is in a group if the claim is about it, and if it has all columns of the
    claim.
    """
    places = planned_rows(table, "full" if variant == "partial" else variant)
    columns = [table.columns[name] for name in (*claim.a, *claim.b)]
    wanted = [(claim.only, ""), *((column.where, column.key) for column in columns)]
    meant = [p for p in places if all(fits(_of_row(where, p), p, key) for where, key in wanted)]
    along = claim.keys_along
    if not along:
        return [RowGroup(place, (table.row_key(place),)) for place in meant]
    grouped: dict[str, list[dict[str, Value]]] = {}
    for place in meant:
        others = {key: value for key, value in place.items() if key not in along}
        grouped.setdefault(repr(others), []).append(place)
    return [
        RowGroup(
            {key: value for key, value in group[0].items() if key not in along},
            tuple(
                table.row_key(place)
                for place in sorted(group, key=lambda place: _along(place[along[0]]))
            ),
        )
        for group in grouped.values()
        if len(group) > 1
    ]


def _of_row(where: Where, place: Mapping[str, Value]) -> Where:
    """Return a ``where`` with only ``method`` and the keys that identify a row.

    Other conditions cannot select a row, because a row pools the runs that differ only
    in them.
    """
    return {key: value for key, value in where.items() if key in place or key == "method"}


def _along(value: Value) -> float:
    """Return a sort key: numbers ascend, and other values keep the table's order."""
    return float(value) if isinstance(value, int | float) else 0.0
