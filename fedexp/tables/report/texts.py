"""The words of a report that its forms share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedexp.tables.report import layout
from fedexp.tables.report.report import Cell, Report, Verdict

MARKS: Mapping[Verdict, str] = {
    "reproduced": "✓",
    "deviates": "✗",
    "not run": "○",
    "no reference": "·",
    "not comparable": "≠",
}


@dataclass(frozen=True)
class Shown:
    """A cell as text.

    Args:
        paper, ours, delta: empty where there is no such number; ours is ``mean ± sd (n)``.
        best_paper, best_ours: it is the best of its row.
    """

    cell: Cell
    paper: str
    ours: str
    delta: str
    best_paper: bool
    best_ours: bool


def shown(report: Report) -> list[tuple[layout.Row, list[Shown | None]]]:
    """Every row with one entry a method; None where the table has no such cell."""
    digits = layout.places(report)
    found = []
    for row in layout.rows(report):
        top = {
            side: layout.best([(c.method, getattr(c, side)) for c in row.cells], digits, higher=report.higher_is_better)
            for side in ("paper", "mean")
        }
        entries: list[Shown | None] = []
        for method in report.methods:
            cell = next(iter(row.of(method.key)), None)
            entries.append(
                None
                if cell is None
                else Shown(
                    cell,
                    "" if cell.paper is None else layout.published(cell.paper, digits) + _sd(cell.paper_sd, digits),
                    "" if cell.mean is None else f"{layout.number(cell.mean, digits)}{_sd(cell.sd, digits)} ({cell.n})",
                    "" if cell.delta is None else _signed(layout.number(cell.delta, digits)),
                    method.key in top["paper"],
                    method.key in top["mean"],
                )
            )
        found.append((row, entries))
    return found


def conditions(row: layout.Row, report: Report) -> list[str]:
    return [layout.label(row.conditions[key]) for key in report.keys]


def counts(report: Report) -> str:
    """``9 reproduced, 2 deviates, 1 not run``."""
    return ", ".join(f"{number} {verdict}" for verdict, number in layout.verdicts(report).items() if number)


def rho(row: layout.Row) -> str:
    """Spearman of a row, empty where there is none."""
    return "" if row.agreement is None or row.agreement.rho is None else f"{row.agreement.rho:.2f}"


def tolerance(report: Report) -> str:
    """``5 percentage points (Ensemble 10)``: columns that have their own in brackets; empty where nothing is judged."""
    own = [f"{m.label} {m.tolerance:g}" for m in report.methods if m.tolerance not in (None, report.tolerance)]
    if not layout.referenced(report) or (report.tolerance is None and not own):
        return ""
    unit = {"percent": "percentage points"}.get(report.unit, report.unit)
    if report.tolerance is None:
        return f"{', '.join(own)} {unit}"
    return f"{report.tolerance:g} {unit}" + (f" ({', '.join(own)})" if own else "")


def has_agreement(report: Report) -> bool:
    return any(a.rho is not None for a in report.agreement)


def _sd(value: float | None, digits: int | None) -> str:
    return "" if value is None else f" ± {layout.number(value, digits)}"


def _signed(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"
