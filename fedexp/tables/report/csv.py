"""A report as CSV: one line a cell, for pandas."""

from __future__ import annotations

import csv
import io
from typing import Any

from fedexp.tables.report import layout
from fedexp.tables.report.report import Report

_NUMBERS = ("paper", "paper_sd", "mean", "sd", "n", "delta")
_JUDGED = ("verdict", "reason", "near", "settles", "deterministic", "same_as", "reduced")


def to_csv(report: Report) -> str:
    """All numbers at full precision; values, seeds and runs joined by blanks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(report))
    writer.writerows(lines(report))
    return text.getvalue()


def columns(report: Report) -> list[str]:
    numbers = (*_NUMBERS, "interval_low", "interval_high")
    return [
        *report.keys,
        "method",
        "label",
        "role",
        "oracle",
        *numbers,
        *_JUDGED,
        "form",
        "values",
        "seeds",
        "chosen",
        "runs",
    ]


def lines(report: Report) -> list[list[Any]]:
    """What stands in `columns`, None where there is nothing."""
    methods = {method.key: method for method in report.methods}
    return [
        [
            *(cell.conditions[key] for key in report.keys),
            cell.method,
            layout.head(methods[cell.method]),
            methods[cell.method].role,
            methods[cell.method].oracle,
            *(getattr(cell, name) for name in _NUMBERS),
            *(cell.interval or (None, None)),
            *(getattr(cell, name) for name in _JUDGED),
            report.form,
            " ".join(map(repr, cell.values)),
            " ".join(map(str, cell.seeds)),
            " ".join(cell.chosen),
            " ".join(cell.runs),
        ]
        for cell in report.cells
    ]
