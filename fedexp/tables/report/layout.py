"""A report as rows and columns.

The functions determine the order of columns, the printed digits of numbers, and the
best number of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import get_args

from fedexp.storage.selection import is_number
from fedexp.tables.grouping import grouped
from fedexp.tables.report.report import (
    Agreement,
    Cell,
    Conclusion,
    Method,
    Report,
    Role,
    Value,
)

# Mark behind the label of a method that has seen test data.
ORACLE = " †"
# Roles of the columns whose cells are counted in the report's headline
# (`fedexp.tables.report.texts.headline`).
_HEADLINE: tuple[Role, ...] = ("proposed", "baseline", "reference")
# Largest number of decimals.
_MOST_PLACES = 4
_NEGATIVE = re.compile(r"(?<![\w.])-(?=\d|inf)")
# Numbers of this size or larger are written with an exponent.
_TOO_LONG = 1e7


@dataclass(frozen=True)
class Row:
    """A row of the table: all cells with the same conditions, in the report's order."""

    conditions: dict[str, Value]
    cells: tuple[Cell, ...]
    agreement: Agreement | None

    def cells_of(self, method: str) -> tuple[Cell, ...]:
        """Return the cells of a column, empty if this row has no cell in it."""
        return tuple(cell for cell in self.cells if cell.method == method)


def rows(report: Report) -> tuple[Row, ...]:
    """Group the cells by their conditions, in order of first appearance."""
    found = grouped((report.row_key(cell.conditions), cell) for cell in report.cells)
    agreement = {report.row_key(a.conditions): a for a in report.agreement}
    return tuple(
        Row(cells[0].conditions, tuple(cells), agreement.get(place))
        for place, cells in found.items()
    )


def by_role(report: Report) -> list[Method]:
    """Return the columns ordered by role.

    The order is: the proposed method, baselines, reference baselines, local models,
    columns that the paper does not have. A method that occurs in a cell but not in
    `Report.methods` counts as the last baseline.
    """
    known = {method.key: method for method in report.methods}
    for cell in report.cells:
        known.setdefault(cell.method, Method(cell.method, cell.method))
    return sorted(known.values(), key=lambda method: get_args(Role).index(method.role))


def counted_cells(report: Report) -> dict[Role, list[Cell]]:
    """Return the cells of the paper that are counted in the report's headline, by role.

    Local models are not counted, and neither are columns that the paper does not have.
    If two cells are equal by construction, only one of them is counted.
    """
    roles: dict[str, Role] = {method.key: method.role for method in report.methods}
    cells = [
        cell
        for cell in report.cells
        if cell.paper is not None and roles.get(cell.method) in _HEADLINE
    ]
    there = {(report.row_key(cell.conditions), cell.method) for cell in cells}
    return grouped(
        (roles[cell.method], cell)
        for cell in cells
        if (report.row_key(cell.conditions), cell.same_as) not in there
    )


def judged_cells(report: Report) -> list[Cell]:
    """Return the `counted_cells` that were judged against the paper's number."""
    cells = [cell for cells in counted_cells(report).values() for cell in cells]
    return [cell for cell in cells if cell.verdict in get_args(Conclusion)]


def has_reference(report: Report) -> bool:
    """Return whether the paper prints a number. A demonstration table has none."""
    return any(cell.paper is not None for cell in report.cells)


def mean_agreement(report: Report) -> tuple[float | None, int]:
    """Return the mean rank correlation, and the number of rows that have one."""
    known = [a.rho for a in report.agreement if a.rho is not None]
    return (sum(known) / len(known) if known else None), len(known)


def places(report: Report) -> int | None:
    """Return the number of decimals with which the table's numbers are printed.

    It is 2 for percent. For other units, it is the number of decimals that the paper
    prints, but at most 4. None means 4 significant digits.
    """
    if report.unit == "percent":
        return 2
    published = [
        cell.paper for cell in report.cells if cell.paper is not None and math.isfinite(cell.paper)
    ]
    return min(_MOST_PLACES, max(map(_decimals, published))) if published else None


def number(value: float, places: int | None) -> str:
    """Format a number of ours. `nan`, `inf` and `-inf` are printed by name."""
    if not math.isfinite(value):
        return str(float(value))
    if places is None:
        return f"{value:.4g}"
    return f"{value:.3e}" if abs(value) >= _TOO_LONG else f"{value:.{places}f}"


def signed(value: float, places: int | None) -> str:
    """Format a difference with its sign. It has no sign if it is printed as zero."""
    text = number(value, places)
    if math.isnan(value) or float(text) == 0:
        return text.removeprefix("-")
    return text if text.startswith("-") else f"+{text}"


def published(value: float, places: int | None) -> str:
    """Format a number of the paper. No digit that the paper prints is lost."""
    text = number(value, places)
    return text if float(text) == value or not math.isfinite(value) else repr(value)


def best(
    values: Iterable[tuple[str, float | None]], places: int | None, *, higher: bool
) -> set[str]:
    """Return the methods with the best value. Values that are printed equally are ties.

    A value that is missing or not finite is never the best. If fewer than two values
    are left, the set is empty.

    Args:
        values: (method, value).
        places: Decimals.
        higher: Whether higher is better.
    """
    shown = {
        name: float(number(v, places)) for name, v in values if v is not None and math.isfinite(v)
    }
    if len(shown) < 2:
        return set()
    top = max(shown.values()) if higher else min(shown.values())
    return {name for name, value in shown.items() if value == top}


def label(value: Value) -> str:
    """Return the value of a condition as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def marked_label(method: Method) -> str:
    """Return the label of a method, with a mark if it has seen test data."""
    return method.label + (ORACLE if method.oracle else "")


def marked_labels(report: Report) -> dict[str, str]:
    """Return the marked labels of all methods.

    Some papers call their own method "Ours". In a report, "ours" means fedexp's runs,
    so the method's key is added to this label.
    """
    return {
        m.key: marked_label(
            replace(m, label=f"{m.label} ({m.key})") if m.label.strip().lower() == "ours" else m
        )
        for m in report.methods
    }


def minus(text: str) -> str:
    """Replace hyphens before numbers by minus signs, except in exponents."""
    return _NEGATIVE.sub("−", text)


def unit(report: Report) -> str:
    """Return the unit of the table's numbers as text."""
    return {"percent": "%"}.get(report.unit, report.unit)


def difference_unit(unit: str) -> str:
    """Return the unit of differences."""
    return {"percent": "percentage points"}.get(unit, unit)


def _decimals(value: float) -> int:
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def is_axis(values: Sequence[Value]) -> bool:
    """Return whether values can be an axis.

    They can if all are numbers and at least two of them differ. True and False are not
    numbers.
    """
    return len(set(values)) > 1 and all(map(is_number, values))


def cell_name(method: str, conditions: Mapping[str, Value]) -> str:
    """Return the name of a cell, such as ``fedavg clients=5 beta=0.1``."""
    return " ".join([method, *(f"{key}={label(value)}" for key, value in conditions.items())])


def duration(seconds: float) -> str:
    """Format seconds: ``12 s``, ``3.4 min``, ``2.1 h``."""
    for limit, length, unit in ((100, 1, "s"), (6000, 60, "min")):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"
