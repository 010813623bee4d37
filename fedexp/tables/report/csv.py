"""A report as CSV: one line a cell, for pandas."""

from __future__ import annotations

import csv
import io

from fedexp.tables.report.report import Report


def to_csv(report: Report) -> str:
    """All numbers at full precision; values, seeds and runs joined by blanks."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ["paper", "paper_sd", "mean", "sd", "n", "delta"]
    writer.writerow(
        [*report.keys, "method", "label", *numbers, "verdict", "reason", "reduced", "values", "seeds", "runs"]
    )
    labels = {method.key: method.label for method in report.methods}
    for cell in report.cells:
        writer.writerow(
            [
                *(cell.conditions[key] for key in report.keys),
                cell.method,
                labels[cell.method],
                *("" if value is None else value for value in (getattr(cell, name) for name in numbers)),
                cell.verdict,
                cell.reason,
                cell.reduced,
                " ".join(map(repr, cell.values)),
                " ".join(map(str, cell.seeds)),
                " ".join(cell.runs),
            ]
        )
    return text.getvalue()
