"""A report as Markdown: its headline, the table of numbers, the claims, then what a reader must know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Cell, Report
from fedexp.tables.report.shown_cells import ShownCell, shown_rows


def markdown(report: Report) -> str:
    """The document. A cell reads ``paper → ours mean ± sd (n) mark``, best of its row in bold on either side.

    Pictures are files beside it, ``report-<name>.png``.
    """
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {report.name}{texts.named_form(report)}: {_plain(report.title)}"
    yield ""
    yield from (f"- **{what}**: {said}" for what, said in texts.headline(report))
    yield ""
    better = "higher" if report.higher_is_better else "lower"
    what = f"{_plain(report.metric)}, {layout.unit(report)}, {better} is better"
    yield f"{_plain(report.paper)}, {_plain(report.source)}: {what}."
    yield ""
    yield f"**{texts.form(report)}**"
    yield ""
    for warning in report.warnings:
        yield f"- **{_plain(warning)}**"
    if report.warnings:
        yield ""
    yield from _table(report)
    yield ""
    yield " ".join(_legend(report))
    yield ""
    yield from _pooled(report)
    yield from _problems(report)
    for picture in report.pictures:
        yield f"![{_plain(picture.title)}](report-{picture.name}.png)"
        yield ""
    yield from _claims(report)
    yield from _summaries(report)
    yield from _listed("Left out of the paper's", map(_plain, report.left_out))
    assumed = (f"**{_plain(assumed)}**: {_plain(why)}" for assumed, why in report.assumptions)
    yield from _listed("Assumed, because the paper is silent", assumed)
    yield "## Made with"
    yield ""
    yield from (f"- {name}: {_plain(value)}" for name, value in texts.facts(report))
    yield f"- command: `{report.command}`"
    if folded := texts.hashes(report):
        yield from ("", f"<details><summary>{', '.join(name for name, _ in folded)}</summary>", "")
        yield from (f"- {name}: {_plain(value)}" for name, value in folded)
        yield from ("", "</details>")


def _legend(report: Report) -> Iterator[str]:
    """What the cells mean."""
    yield f"{'Paper → ours' if layout.referenced(report) else 'Ours'}, mean ± sd (n); best of a row in bold."
    yield ", ".join(f"{mark} {word}" for word, mark in texts.marks(report).items()) + "."
    if tolerance := texts.tolerance(report):
        yield f"Tolerance {_plain(tolerance)}."
    if rank := texts.rank(report):
        yield texts.sentence(rank)
    yield from (f"{_plain(note)}." for note in texts.footnotes(report))


def _pooled(report: Report) -> Iterator[str]:
    heads, rows = texts.pooled(report)
    if not rows:
        return
    yield from (f"{texts.POOLED}.", "")
    yield _row([_plain(head) for head in heads])
    yield _row(["---:"] * len(report.keys) + [":---"] * (len(heads) - len(report.keys)))
    yield from (_row([_plain(text) for text in row]) for row in rows)
    yield ""


def _problems(report: Report) -> Iterator[str]:
    """Why cells were not run, and what failed."""
    absent = [cell for cell in report.cells if cell.verdict == "not run"]
    failures = dict.fromkeys(failure for cell in report.cells for failure in cell.failed)
    for reason in dict.fromkeys(cell.reason for cell in absent):
        places = [_place(cell, report) for cell in absent if cell.reason == reason]
        yield f"- not run: {_plain(reason)} ({_plain(_few(places))})"
    for failure in failures:
        yield f"- failed: {_plain(failure)}"
    if absent or failures:
        yield ""


def _claims(report: Report) -> Iterator[str]:
    if not report.claims:
        return
    yield from ("## Claims", "")
    yield _row(["State", "Claim", "Where", "It says", "Why", "In print", "Row by row"])
    yield _row([":---"] * 7)
    for claim in report.claims:
        said = [claim.id, texts.where(claim), claim.says, texts.why(claim), texts.in_print(claim)]
        rows = "; ".join(map(texts.claim_row, claim.rows))
        yield _row([texts.state(claim), *map(_plain, said), _plain(rows)])
    yield ""


def _summaries(report: Report) -> Iterator[str]:
    if not report.summaries:
        return
    yield from ("## Mean difference to the paper, by seed", "")
    yield _row(
        [
            "Method",
            f"Ours less the paper's, {layout.points(report.unit)}",
            "95 % interval",
            "Mean of",
        ]
    )
    yield _row([":---", "---:", "---:", ":---"])
    for found in report.summaries:
        yield _row([_plain(text) for text in texts.summary(found, report)])
    yield ""


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A section; none without lines."""
    listed = [f"- {line}" for line in lines]
    if listed:
        yield from (f"## {title}", "", *listed, "")


def _table(report: Report) -> Iterator[str]:
    agreement, reference = texts.has_agreement(report), layout.referenced(report)
    labels = [_plain(layout.head(method)) for method in report.methods]
    yield _row([*map(_plain, report.keys), *labels, *(["Spearman"] if agreement else [])])
    yield _row(["---:"] * len(report.keys) + [":---"] * len(report.methods) + ["---:"] * agreement)
    for row in shown_rows(report):
        cells = [_cell(row.first(method.key), reference) for method in report.methods]
        yield _row([*map(_plain, row.conditions), *cells, *([row.rho] if agreement else [])])


def _cell(shown: ShownCell | None, reference: bool) -> str:
    if shown is None:
        return ""
    paper = f"**{shown.published}**" if shown.best_paper else shown.published
    ours = f"**{shown.measured}**" if shown.best_ours else shown.measured
    mine = f"{ours} {shown.mark}" if ours else texts.MARKS[shown.cell.verdict]
    return f"{paper or 'none'} → {mine}" if reference else mine


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _place(cell: Cell, report: Report) -> str:
    labels = {m.key: layout.head(m) for m in report.methods}
    return " ".join(
        [labels[cell.method], *(f"{k}={layout.label(v)}" for k, v in cell.conditions.items())]
    )


def _few(places: Sequence[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


def _plain(text: str) -> str:
    """Text that no Markdown reader takes for markup."""
    for character in "\\|*`<>[]":
        text = text.replace(character, f"\\{character}")
    return text
