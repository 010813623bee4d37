"""A report as Markdown: headline, table of numbers, claims, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedexp.tables.grouping import grouped
from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Report
from fedexp.tables.report.shown_cells import ShownCell, shown_rows

# If several cells have the same reason, at most this many of them are listed.
_SHOWN = 4


def markdown(report: Report) -> str:
    """Return a report as a Markdown document.

    A cell is ``paper → mean ± sd (n) mark``. Here ``paper`` is the paper's number, and
    ``mean``, ``sd`` and ``n`` are those of our runs. The mark is the sign of the
    verdict. On each side of the arrow, the best number of the row is bold. Pictures are
    files beside the document: ``report-<name>.png``.
    """
    return "\n\n".join(filter(None, _paragraphs(report))) + "\n"


def _paragraphs(report: Report) -> Iterator[str]:
    """Yield the paragraphs, lists and tables of the document. Some may be empty."""
    yield f"# {report.name}{texts.variant_suffix(report)}: {escape(report.title)}"
    yield "\n".join(f"- **{subject}**: {outcome}" for subject, outcome in texts.headline(report))
    better = "higher" if report.higher_is_better else "lower"
    what = f"{escape(report.metric)}, {layout.unit(report)}, {better} is better"
    yield f"{escape(report.paper)}, {escape(report.source)}: {what}."
    yield f"**{texts.variant_note(report)}**"
    yield "\n".join(f"- **{escape(warning)}**" for warning in report.warnings)

    yield _number_table(report)
    yield " ".join(_legend(report))
    yield _pooled_table(report)
    yield "\n".join(_problems(report))
    for picture in report.pictures:
        yield f"![{escape(picture.title)}](report-{picture.name}.png)"

    yield _claim_table(report)
    yield _mean_differences(report)
    yield _section("Left out of the paper's table", map(escape, report.left_out))
    assumed = (f"**{escape(assumed)}**: {escape(why)}" for assumed, why in report.assumptions)
    yield _section("Assumed, because the paper is silent", assumed)

    facts = [f"{name}: {escape(value)}" for name, value in texts.facts(report)]
    yield _section("Made with", [*facts, f"command: `{report.command}`"])
    if folded := texts.hashes(report):
        yield f"<details><summary>{', '.join(name for name, _ in folded)}</summary>"
        yield "\n".join(f"- {name}: {escape(value)}" for name, value in folded)
        yield "</details>"


def _legend(report: Report) -> Iterator[str]:
    """Yield sentences that explain the table's cells, marks and notes."""
    yield (
        f"{'Paper → ours' if layout.has_reference(report) else 'Ours'}, mean ± sd (n); best "
        f"of a row in bold."
    )
    yield from (escape(texts.sentence(line)) for line in texts.legend(report))
    yield from (f"{escape(note)}." for note in texts.footnotes(report))


def _pooled_table(report: Report) -> str:
    heads, rows = texts.pooled(report)
    alignment = ["---:"] * len(report.keys) + [":---"] * (len(heads) - len(report.keys))
    return _titled_table(f"{texts.POOLED}.", heads, alignment, rows)


def _problems(report: Report) -> Iterator[str]:
    """Yield the reasons why cells have no runs, and the failed runs."""
    labels = {method.key: layout.marked_label(method) for method in report.methods}
    absent = grouped(
        (cell.reason, layout.cell_name(labels[cell.method], cell.conditions))
        for cell in report.cells
        if cell.verdict == "not run"
    )
    for reason, names in absent.items():
        yield f"- not run: {escape(reason)} ({escape(texts.shortened(names, _SHOWN))})"
    for failure in dict.fromkeys(failure for cell in report.cells for failure in cell.failed):
        yield f"- failed: {escape(failure)}"


def _claim_table(report: Report) -> str:
    heads = ["State", "Claim", "Where", "It says", "Why", "In print", "Row by row"]
    rows = [
        [
            texts.claim_state(claim),
            claim.id,
            texts.claim_source(claim),
            claim.says,
            texts.claim_reason(claim),
            texts.claim_in_print(claim),
            "; ".join(map(texts.claim_row, claim.rows)),
        ]
        for claim in report.claims
    ]
    title = "\n\n".join(["## Claims", *(escape(texts.sentence(s)) for s in texts.scopes(report))])
    return _titled_table(title, heads, [":---"] * len(heads), rows)


def _mean_differences(report: Report) -> str:
    difference = f"Ours minus the paper's, {layout.difference_unit(report.unit)}"
    return _titled_table(
        "## Mean difference to the paper, by seed",
        ["Method", difference, "95 % interval", "Mean of"],
        [":---", "---:", "---:", ":---"],
        [texts.summary(found, report) for found in report.summaries],
    )


def _section(title: str, lines: Iterable[str]) -> str:
    """Return a section with a list. It is empty if there are no lines."""
    listed = "\n".join(f"- {line}" for line in lines)
    return f"## {title}\n\n{listed}" if listed else ""


def _titled_table(
    title: str, heads: Sequence[str], alignment: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a title with a table below it, or an empty text if there are no rows."""
    shown = [_table_row([escape(text) for text in row]) for row in (heads, *rows)]
    return "\n".join([title, "", shown[0], _table_row(alignment), *shown[1:]]) if rows else ""


def _number_table(report: Report) -> str:
    agreement, reference = texts.has_agreement(report), layout.has_reference(report)
    labels = [escape(layout.marked_label(method)) for method in report.methods]
    lines = [
        [*map(escape, report.keys), *labels, *["Spearman"] * agreement],
        ["---:"] * len(report.keys) + [":---"] * len(report.methods) + ["---:"] * agreement,
    ]
    for row in shown_rows(report):
        cells = [_cell_markup(row.first(method.key), reference) for method in report.methods]
        lines.append([*map(escape, row.conditions), *cells, *[row.rho] * agreement])
    return "\n".join(map(_table_row, lines))


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
    """Escape ``*`` and Markdown's characters for code, links, HTML and tables."""
    for character in "\\|*`<>[]":
        text = text.replace(character, f"\\{character}")
    return text
