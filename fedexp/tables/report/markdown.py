"""A report as Markdown: headline, table of numbers, claims, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Report
from fedexp.tables.report.shown_cells import ShownCell, shown_rows

# Largest number of names in a list.
_SHOWN = 4


def markdown(report: Report) -> str:
    """Return the document.

    A cell is ``paper → ours mean ± sd (n) mark``. On each side of the arrow, the best
    of the row is bold. Pictures are files beside the document, ``report-<name>.png``.
    """
    return "\n".join(_document(report)) + "\n"


def _document(report: Report) -> Iterator[str]:
    yield f"# {report.name}{texts.variant_suffix(report)}: {escape(report.title)}"
    yield ""
    yield from (f"- **{subject}**: {outcome}" for subject, outcome in texts.headline(report))
    yield ""

    better = "higher" if report.higher_is_better else "lower"
    what = f"{escape(report.metric)}, {layout.unit(report)}, {better} is better"
    yield f"{escape(report.paper)}, {escape(report.source)}: {what}."
    yield ""
    yield f"**{texts.variant_note(report)}**"
    yield ""
    for warning in report.warnings:
        yield f"- **{escape(warning)}**"
    if report.warnings:
        yield ""

    yield from _number_table(report)
    yield ""
    yield " ".join(_legend(report))
    yield ""
    yield from _pooled_table(report)
    yield from _problems(report)
    for picture in report.pictures:
        yield f"![{escape(picture.title)}](report-{picture.name}.png)"
        yield ""

    yield from _claim_table(report)
    yield from _mean_differences(report)
    yield from _section("Left out of the paper's table", map(escape, report.left_out))
    assumed = (f"**{escape(assumed)}**: {escape(why)}" for assumed, why in report.assumptions)
    yield from _section("Assumed, because the paper is silent", assumed)

    yield "## Made with"
    yield ""
    yield from (f"- {name}: {escape(value)}" for name, value in texts.facts(report))
    yield f"- command: `{report.command}`"
    if folded := texts.hashes(report):
        yield from ("", f"<details><summary>{', '.join(name for name, _ in folded)}</summary>", "")
        yield from (f"- {name}: {escape(value)}" for name, value in folded)
        yield from ("", "</details>")


def _legend(report: Report) -> Iterator[str]:
    """Yield sentences that explain the table's cells, marks and notes."""
    yield (
        f"{'Paper → ours' if layout.has_reference(report) else 'Ours'}, mean ± sd (n); best "
        f"of a row in bold."
    )
    yield from (escape(texts.sentence(line)) for line in texts.legend(report))
    yield from (f"{escape(note)}." for note in texts.footnotes(report))


def _pooled_table(report: Report) -> Iterator[str]:
    heads, rows = texts.pooled(report)
    if not rows:
        return
    yield from (f"{texts.POOLED}.", "")
    yield _table_row([escape(head) for head in heads])
    yield _table_row(["---:"] * len(report.keys) + [":---"] * (len(heads) - len(report.keys)))
    yield from (_table_row([escape(text) for text in row]) for row in rows)
    yield ""


def _problems(report: Report) -> Iterator[str]:
    """Yield the reasons of cells without runs, and failures."""
    labels = {method.key: layout.marked_label(method) for method in report.methods}
    absent = [cell for cell in report.cells if cell.verdict == "not run"]
    failures = dict.fromkeys(failure for cell in report.cells for failure in cell.failed)
    for reason in dict.fromkeys(cell.reason for cell in absent):
        names = [
            layout.cell_name(labels[cell.method], cell.conditions)
            for cell in absent
            if cell.reason == reason
        ]
        yield f"- not run: {escape(reason)} ({escape(texts.shortened(names, _SHOWN))})"
    for failure in failures:
        yield f"- failed: {escape(failure)}"
    if absent or failures:
        yield ""


def _claim_table(report: Report) -> Iterator[str]:
    if not report.claims:
        return
    yield from ("## Claims", "")
    yield from (f"{escape(texts.sentence(scope))}" for scope in texts.scopes(report))
    yield ""
    yield _table_row(["State", "Claim", "Where", "It says", "Why", "In print", "Row by row"])
    yield _table_row([":---"] * 7)

    for claim in report.claims:
        texts_of_claim = [
            claim.id,
            texts.claim_source(claim),
            claim.says,
            texts.claim_reason(claim),
            texts.claim_in_print(claim),
        ]
        rows = "; ".join(map(texts.claim_row, claim.rows))
        yield _table_row([texts.claim_state(claim), *map(escape, texts_of_claim), escape(rows)])

    yield ""


def _mean_differences(report: Report) -> Iterator[str]:
    if not report.summaries:
        return
    yield from ("## Mean difference to the paper, by seed", "")
    yield _table_row(
        [
            "Method",
            f"Ours minus the paper's, {layout.difference_unit(report.unit)}",
            "95 % interval",
            "Mean of",
        ]
    )
    yield _table_row([":---", "---:", "---:", ":---"])
    for found in report.summaries:
        yield _table_row([escape(text) for text in texts.summary(found, report)])
    yield ""


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a section, nothing without lines."""
    listed = [f"- {line}" for line in lines]
    if listed:
        yield from (f"## {title}", "", *listed, "")


def _number_table(report: Report) -> Iterator[str]:
    agreement, reference = texts.has_agreement(report), layout.has_reference(report)
    labels = [escape(layout.marked_label(method)) for method in report.methods]
    yield _table_row([*map(escape, report.keys), *labels, *(["Spearman"] if agreement else [])])
    yield _table_row(
        ["---:"] * len(report.keys) + [":---"] * len(report.methods) + ["---:"] * agreement
    )
    for row in shown_rows(report):
        cells = [_cell_markup(row.first(method.key), reference) for method in report.methods]
        yield _table_row([*map(escape, row.conditions), *cells, *([row.rho] if agreement else [])])


def _cell_markup(shown: ShownCell | None, reference: bool) -> str:
    if shown is None:
        return ""
    paper = f"**{shown.published}**" if shown.best_paper else shown.published
    ours = f"**{shown.measured}**" if shown.best_ours else shown.measured
    mine = f"{ours} {shown.mark}" if ours else shown.mark
    return f"{paper or 'none'} → {mine}" if reference else mine


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape(text: str) -> str:
    """Escape the characters of code, links, HTML, tables and ``*`` in Markdown."""
    for character in "\\|*`<>[]":
        text = text.replace(character, f"\\{character}")
    return text
