"""A report on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import ClaimState, Report, Verdict
from fedexp.tables.report.shown_cells import ShownCell, shown_rows
from fedexp.tracking.terminal import console

STYLES: dict[Verdict, str] = {
    "reproduced": "green",
    "close": "green",
    "different": "red",
    "undecided": "yellow",
    "not run": "dim",
    "no reference": "",
    "not comparable": "magenta",
}
_CLAIM_STYLES: dict[ClaimState, str] = {
    "supported": "green",
    "contradicted": "red",
    "supported in reduced form": "cyan",
    "not supported in reduced form": "magenta",
    "undecided": "yellow",
    "superseded settings: no verdict": "dim",
}
# Width in letters that is large enough for every line.
_ENDLESS = 100_000


def print_report(report: Report, out: Console | None = None) -> None:
    """Print the headline, the table, the paper's claims and the warnings.

    The table is as in the paper, with one column per method. A cell has the paper's
    number in its first line. Our number, the difference and the mark of the verdict are
    in the second line. If the terminal is too narrow, the differences are left out. If
    the table is still too wide, another table is printed that has one line per cell. It
    has the differences if there is room.
    """
    out = out or console()
    out.print(
        f"{report.name}{texts.variant_suffix(report)}: {report.title}", style="bold", markup=False
    )
    for subject, outcome in texts.headline(report):
        out.print(f"{subject}: {outcome}", style="bold", markup=False)
    out.print(f"{report.source}; {report.metric}, {layout.unit(report)}", markup=False)
    out.print(
        texts.variant_note(report), style="" if report.variant == "full" else "yellow", markup=False
    )

    fitting = [
        deltas
        for deltas in (True, False)
        if _width(_wide(report, deltas=deltas), out, wrapped=False) <= out.width
    ]
    deltas = next(iter(fitting), None)
    out.print(_long(report, out) if deltas is None else _wide(report, deltas=deltas))
    out.print("; ".join(_legend(report, deltas)), style="dim", markup=False)

    for scope in texts.scopes(report):
        out.print(f"claims, {scope}", style="bold", markup=False)
    for claim in report.claims:
        in_print = texts.claim_in_print(claim)
        line = (
            f"{texts.claim_state(claim)} {claim.id} ({texts.claim_source(claim)}): {claim.says}. "
            f"{texts.claim_reason(claim)}{f'; in print: {in_print}' if in_print else ''}"
        )
        out.print(line, style=_CLAIM_STYLES[claim.state], markup=False)

    for found in report.summaries:
        name, mean, interval, of = texts.summary(found, report)
        points = layout.difference_unit(report.unit)
        out.print(
            f"{name}: mean difference to the paper {mean} {points}, 95 %: {interval} ({of})",
            markup=False,
        )

    if report.left_out:
        out.print(
            (
                f"left out of the paper's table: {texts.count(len(report.left_out), 'part')}, see "
                f"the report"
            ),
            markup=False,
        )

    for warning in report.warnings:
        out.print(f"! {warning}", style="yellow", markup=False, soft_wrap=True)
    for failure in dict.fromkeys(failure for cell in report.cells for failure in cell.failed):
        out.print(f"failed {failure}", style="red", markup=False, soft_wrap=True)


def print_tables(rows: Sequence[Mapping[str, Any]], out: Console | None = None) -> None:
    """Print the list of tables, from the rows of `fedexp.tables.listing`.

    On a narrow terminal, the least important columns are left out. The column of names
    always stays. The column of states also stays if any state is known.
    """
    out = out or console()
    of_runs = any(row["runs"] is not None for row in rows)
    columns: tuple[str, ...] = _COLUMNS_OF_RUNS if of_runs else _COLUMNS
    short = [{**row, "state": (row["state"] or "")[:_STATE]} for row in rows]
    for dropped in ("", *_DROPPED):
        columns = tuple(column for column in columns if column != dropped)
        table = _list_of_tables(short, columns)
        if _width(table, out, wrapped=not of_runs) <= out.width:
            break
    out.print(_list_of_tables(rows, columns))


# Only this many letters of a state are counted for the width of the table. Longer
# states may be broken over lines.
_STATE = 20
_COLUMNS = ("table", "title", "data", "hours", "state")
_COLUMNS_OF_RUNS = (
    "table",
    "paper",
    "cells",
    "runs",
    "done",
    "failed",
    "missing",
    "data",
    "hours",
    "state",
)
_DROPPED = ("paper", "hours", "data", "title", "missing", "failed", "cells", "runs", "done")
_NUMBERS = ("cells", "runs", "done", "failed", "missing")


def _list_of_tables(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    if not any(row["state"] for row in rows):
        columns = [column for column in columns if column != "state"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            overflow="fold",
            no_wrap=column == "table",
        )
    for row in rows:
        shown = {
            **row,
            "paper": f"{row['paper'].split(',')[0]}, {row['source']}",
            "data": ", ".join(_DATA[there].format(name) for name, there in row["data"].items()),
            "hours": _hours(row),
        }
        table.add_row(*(Text("" if shown[c] is None else str(shown[c])) for c in columns))
    return table


_DATA: Mapping[bool | None, str] = {True: "{}", False: "{} (absent)", None: "{} (unknown)"}


def _hours(row: Mapping[str, Any]) -> str:
    """Return the computing time of a table in hours, as text.

    It is that of the stored runs. If no run is stored, it is the cost of each variant
    in the table's file, such as ``0.88, reduced 0.69``.
    """
    if row["seconds"]:
        return f"{row['seconds'] / 3600:.3g}"
    return ", ".join(
        f"{cost['hours']:g}" if variant == "full" else f"{variant} {cost['hours']:g}"
        for variant, cost in row["cost"].items()
    )


def _legend(report: Report, deltas: bool | None) -> Iterator[str]:
    """Yield the legend of the table.

    Args:
        report: The report.
        deltas: Whether the wide table has differences. None: the table has one line per
            cell.
    """
    compared = layout.has_reference(report)
    if deltas is not None:
        yield (
            f"{'paper above ours' if compared else 'ours'} (mean ± sd "
            f"(n){', difference' if compared and deltas else ''})"
        )
    yield from texts.legend(report)
    yield from texts.footnotes(report)


def _width(table: Table, out: Console, *, wrapped: bool) -> int:
    """Return the width that a table needs. `wrapped`: whether lines may be broken."""
    needed = Measurement.get(out, out.options.update(width=_ENDLESS), table)
    return needed.minimum if wrapped else needed.maximum


def _wide(report: Report, *, deltas: bool) -> Table:
    """Build the table as in the paper: one column per method."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    agreement, reference = texts.has_agreement(report), layout.has_reference(report)
    labels = map(layout.marked_label, report.methods)
    for head in (*report.keys, *labels, *["Spearman"] * agreement):
        table.add_column(Text(head), justify="right", no_wrap=True)
    for row in shown_rows(report):
        cells = [_cell_text(row.first(method.key), reference, deltas) for method in report.methods]
        table.add_row(*map(Text, row.conditions), *cells, *[row.rho] * agreement)
    return table


def _long(report: Report, out: Console) -> Table:
    """Build a table with one line per cell.

    On a narrow terminal, the differences are left out first. Then headings and labels
    are wrapped. If this is not enough, numbers and verdicts are wrapped, too.
    """
    with_deltas = _one_a_line(report, whole=True, deltas=True)
    if _width(with_deltas, out, wrapped=False) <= out.width:
        return with_deltas
    table = _one_a_line(report, whole=True, deltas=False)
    return (
        table
        if _width(table, out, wrapped=True) <= out.width
        else _one_a_line(report, whole=False, deltas=False)
    )


def _one_a_line(report: Report, *, whole: bool, deltas: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    compared = layout.has_reference(report)
    lines = [
        ([*row.conditions, shown.label], shown)
        for row in shown_rows(report)
        for method in report.methods
        if (shown := row.first(method.key)) is not None
    ]
    for at, key in enumerate(report.keys):
        longest = max((len(place[at]) for place, _ in lines), default=0)
        table.add_column(
            Text(key), justify="right", overflow="fold", min_width=longest if whole else None
        )
    table.add_column("method", overflow="fold")
    deltas = deltas and compared
    for name in (*(["paper"] if compared else []), "ours", *(["difference"] if deltas else [])):
        table.add_column(name, justify="right", overflow="fold", no_wrap=whole)
    table.add_column("verdict", overflow="fold", no_wrap=whole)
    for place, shown in lines:
        numbers = [
            *([shown.published] if compared else []),
            shown.measured,
            *([shown.delta] if deltas else []),
        ]
        table.add_row(
            *map(Text, [*place, *numbers, f"{shown.mark} {shown.verdict_name}"]),
            style=STYLES[shown.cell.verdict],
        )
    return table


def _cell_text(shown: ShownCell | None, reference: bool, deltas: bool) -> Text:
    text = Text("")
    if shown is None:
        return text
    if reference:
        text.append(f"{shown.published}\n", style="bold" if shown.best_paper else "")
    ours = " ".join(filter(None, [shown.measured, shown.delta if deltas else "", shown.mark]))
    return text.append(
        ours, style=f"{'bold ' if shown.best_ours else ''}{STYLES[shown.cell.verdict]}".strip()
    )
