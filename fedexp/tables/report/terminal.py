"""A report on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Report, Verdict
from fedexp.tables.report.texts import MARKS, Shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STYLES: dict[Verdict, str] = {
    "reproduced": "green",
    "deviates": "red",
    "not run": "dim",
    "no reference": "",
    "not comparable": "yellow",
}


def console() -> Console:
    """Wide where there is no terminal: a table in a file is better wide than wrapped."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(width=220, no_color=True, highlight=False)


def print_report(report: Report) -> None:
    """The table, its verdicts and its warnings. A cell has the paper's number, below it ours and the mark of the verdict."""
    from rich import box
    from rich.table import Table

    out = console()
    form = "" if report.form == "full" else f" ({report.form})"
    out.print(f"{report.name}{form}: {report.title}", style="bold", markup=False)
    out.print(f"{report.source}; {report.metric}, {layout.unit(report)}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in report.keys:
        table.add_column(key, justify="right", no_wrap=True)
    for method in report.methods:
        table.add_column(method.label, justify="right", no_wrap=True)
    agreement, reference = texts.has_agreement(report), layout.referenced(report)
    if agreement:
        table.add_column("Spearman", justify="right")
    for row, entries in texts.shown(report):
        cells = [_cell(entry, reference) for entry in entries]
        table.add_row(*texts.conditions(row, report), *cells, *([texts.rho(row)] if agreement else []))
    out.print(table)
    used = [verdict for verdict, number in layout.verdicts(report).items() if number]
    out.print(
        f"{'paper above ours' if reference else 'ours'} (mean ± sd (n){', difference' if reference else ''}); "
        + ", ".join(f"{MARKS[verdict]} {verdict}" for verdict in used)
        + (f"; tolerance {tolerance}" if (tolerance := texts.tolerance(report)) else ""),
        style="dim",
        markup=False,
    )
    for warning in report.warnings:
        out.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)
    for failure in dict.fromkeys(failure for cell in report.cells for failure in cell.failed):
        out.print(f"failed {failure}", style="red", markup=False, soft_wrap=True)
    mean, number = layout.mean_agreement(report)
    rank = f"; rank agreement {mean:.2f} (mean of {number} rows)" if mean is not None else ""
    out.print(f"{texts.counts(report)}{rank}", style="bold", markup=False)


def _cell(entry: Shown | None, reference: bool) -> Text:
    from rich.text import Text

    text = Text()
    if entry is None:
        return text
    if reference:
        text.append(f"{entry.paper}\n", style="bold" if entry.best_paper else "")
    ours = " ".join(filter(None, [entry.ours, entry.delta, MARKS[entry.cell.verdict]]))
    return text.append(ours, style=f"{'bold ' if entry.best_ours else ''}{STYLES[entry.cell.verdict]}".strip())
