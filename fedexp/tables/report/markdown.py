"""A report as Markdown: one table of numbers, then what a reader must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Cell, Report
from fedexp.tables.report.texts import MARKS, Shown


def markdown(report: Report) -> str:
    """The document. A cell reads ``paper → ours mean ± sd (n) mark``, best of its row in bold on either side.

    Pictures are files beside it, ``report-<name>.png``.
    """
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {report.name}{'' if report.form == 'full' else f' ({report.form})'}: {_plain(report.title)}"
    yield ""
    better = "higher" if report.higher_is_better else "lower"
    what = f"{_plain(report.metric)}, {layout.unit(report)}, {better} is better"
    yield f"{_plain(report.paper)}, {_plain(report.source)}: {what}."
    yield ""
    for warning in report.warnings:
        yield f"- **{_plain(warning)}**"
    if report.warnings:
        yield ""
    yield from _table(report)
    yield ""
    yield " ".join(_legend(report))
    yield ""
    yield from _problems(report)
    for picture in report.pictures:
        yield f"![{_plain(picture.title)}](report-{picture.name}.png)"
        yield ""
    if report.assumptions:
        yield "## Assumed, because the paper is silent"
        yield ""
        for assumed, why in report.assumptions:
            yield f"- **{_plain(assumed)}**: {_plain(why)}"
        yield ""
    yield "## Made with"
    yield ""
    for name, value in report.facts:
        yield f"- {name}: {_plain(value)}"
    yield f"- command: `{report.command}`"


def _legend(report: Report) -> Iterator[str]:
    """What the cells mean, and how many got which verdict."""
    yield f"{'Paper → ours' if layout.referenced(report) else 'Ours'}, mean ± sd (n); best of a row in bold."
    used = [verdict for verdict, number in layout.verdicts(report).items() if number]
    yield ", ".join(f"{MARKS[verdict]} {verdict}" for verdict in used) + "."
    if tolerance := texts.tolerance(report):
        yield f"Tolerance {tolerance}."
    yield f"**{texts.counts(report)}.**"
    mean, number = layout.mean_agreement(report)
    if mean is not None:
        yield f"Rank agreement (Spearman), mean of {number} rows: {mean:.2f}."


def _problems(report: Report) -> Iterator[str]:
    """Why cells were not run, and what failed."""
    absent = [cell for cell in report.cells if cell.verdict == "not run"]
    failures = dict.fromkeys(failure for cell in report.cells for failure in cell.failed)
    for reason in dict.fromkeys(cell.reason for cell in absent):
        places = [_place(cell, report) for cell in absent if cell.reason == reason]
        yield f"- not run: {_plain(reason)} ({_few(places)})"
    for failure in failures:
        yield f"- failed: {_plain(failure)}"
    if absent or failures:
        yield ""


def _table(report: Report) -> Iterator[str]:
    agreement, reference = texts.has_agreement(report), layout.referenced(report)
    head = [*map(_plain, report.keys), *(_plain(m.label) for m in report.methods), *(["Spearman"] if agreement else [])]
    yield _row(head)
    yield _row(["---:"] * len(report.keys) + [":---"] * len(report.methods) + ["---:"] * agreement)
    for row, entries in texts.shown(report):
        cells = [_cell(entry, reference) for entry in entries]
        yield _row([*texts.conditions(row, report), *cells, *([texts.rho(row)] if agreement else [])])


def _cell(entry: Shown | None, reference: bool) -> str:
    if entry is None:
        return ""
    paper = f"**{entry.paper}**" if entry.best_paper else entry.paper
    ours = f"**{entry.ours}**" if entry.best_ours else entry.ours
    mine = f"{ours} {MARKS[entry.cell.verdict]}" if ours else MARKS[entry.cell.verdict]
    return f"{paper or 'none'} → {mine}" if reference else mine


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _place(cell: Cell, report: Report) -> str:
    labels = {m.key: m.label for m in report.methods}
    return " ".join([labels[cell.method], *(f"{k}={layout.label(v)}" for k, v in cell.conditions.items())])


def _few(places: Sequence[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _plain(text: str) -> str:
    """Text that no Markdown reader takes for markup."""
    for character in "\\|*`<>[]":
        text = text.replace(character, f"\\{character}")
    return text
