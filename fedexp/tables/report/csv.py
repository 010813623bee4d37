"""A report as CSV for pandas: one line per cell.

The file ``runs.csv`` beside it (see `fedexp.tables.record`) has one line per run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedexp.tables.report import layout
from fedexp.tables.report.report import Report
from fedexp.tables.report.shown_cells import shown_cells

# First characters of a formula. Some spreadsheets also accept the full-width forms.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_NUMBERS = ("paper", "paper_sd", "mean", "sd", "n", "delta", "pooled_mean", "pooled_sd")
_JUDGED = ("verdict", "direction", "reason", "settles", "deterministic", "same_as", "reduced")


def to_csv(report: Report) -> str:
    """Return the report as CSV, with all numbers at full precision.

    Every field is a single value. Texts are made safe by `inert`.
    """
    return csv_text(map(inert, columns(report)), lines(report))


def csv_text(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a heading and rows as CSV. Texts in the rows are made safe by `inert`."""
    lines = [head, *(map(inert, row) for row in rows)]
    return "".join(",".join(map(_cell, line)) + "\n" for line in lines)


def _cell(value: Any) -> str:
    """Return a value as a cell, empty for None.

    A text is quoted if it contains a comma, a quote, a line break, a semicolon or a
    tab. Semicolons and tabs are included because some spreadsheets separate cells at
    them. A part of the text might then be read as a formula.
    """
    text = "" if value is None else str(value)
    if not any(character in text for character in ',;"\t\r\n'):
        return text
    return '"' + text.replace('"', '""') + '"'


def inert(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would read as a formula.

    A text also counts as a formula if white space or quotes precede the formula,
    because some spreadsheets ignore them. Numbers stay as they are.
    """
    if not isinstance(value, str) or _reads_as_number(value):
        return value
    is_formula = value.lstrip(' \t\r\n"').startswith(_FORMULA)
    return f"'{value}" if is_formula or value.startswith(("\t", "\r")) else value


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def columns(report: Report) -> list[str]:
    """Return the names of the columns."""
    return [
        "table",
        *report.keys,
        "method",
        "label",
        "role",
        "oracle",
        *_NUMBERS,
        "interval_low",
        "interval_high",
        *_JUDGED,
        "unit",
        "form",
    ]


def lines(report: Report) -> list[list[Any]]:
    """Return the values of `columns` for every cell, None if there is no value."""
    return [
        [
            report.name,
            *(shown.cell.conditions[key] for key in report.keys),
            shown.method.key,
            layout.marked_label(shown.method),
            shown.method.role,
            shown.method.oracle,
            *(getattr(shown.cell, name) for name in _NUMBERS),
            *(shown.cell.interval or (None, None)),
            *(getattr(shown.cell, name) for name in _JUDGED),
            report.unit,
            report.variant,
        ]
        for shown in shown_cells(report)
    ]
