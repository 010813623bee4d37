"""The report as one HTML file: it opens from disk, loads nothing, and reads on paper, on a phone, in light and dark."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from fedexp.tables.report import layout, texts
from fedexp.tables.report.layout import Row
from fedexp.tables.report.report import Cell, ClaimResult, Method, Picture, Report

_SVG_ID = re.compile(r'(\bid="|href="#|url\(#)')
_NEGATIVE = re.compile(r"(?<![\w.])-(?=\d|inf)")


def page(report: Report) -> str:
    """The whole page as UTF-8 text. The same report gives the same bytes.

    Args:
        report: its pictures are put in as they are; those in ``currentColor`` follow the theme, others get a white ground.
    """
    folder = files("fedexp.tables.report")
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    places, rows = layout.places(report), layout.rows(report)
    sections = {
        "table": "Table",
        "claims": "Claims" if report.claims else "",
        "means": "Means" if report.summaries else "",
        "pictures": "Pictures" if report.pictures else "",
        "cells": "Every number",
        "left-out": "Left out" if report.left_out else "",
        "assumptions": "Assumptions" if report.assumptions else "",
        "facts": "Facts" if report.facts else "",
        "command": "Command",
    }
    return Template(folder.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        policy=_policy(script),
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=script,
        name=escape(report.name),
        title=escape(report.title),
        badge=f'<span class="badge {report.form}">{report.form}</span>',
        source=_source(report),
        banner=_banner(report),
        headline=_headline(report),
        warnings=_warnings(report),
        contents="".join(f'<li><a href="#{key}">{name}</a></li>' for key, name in sections.items() if name),
        key=_key(report),
        wide=_wide(report, rows, places),
        claims=_claims(report),
        means=_means(report),
        pictures=_pictures(report.pictures),
        filters=_filters(report),
        long=_long(report, places),
        left_out=_section("left-out", "Left out of the paper's", f"<ul>{_items(report.left_out)}</ul>")
        if report.left_out
        else "",
        assumptions=_pairs(
            "assumptions", "Assumptions", "What the paper leaves open, and what was taken.", report.assumptions
        ),
        facts=_pairs("facts", "Facts", "", report.facts),
        command=_section("command", "Command", f"<pre><code>{escape(report.command)}</code></pre>"),
    )


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script but ours may run, whatever a label or a picture holds."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"  # data: images that a drawing holds
    )


# --- the head


def _source(report: Report) -> str:
    return " of ".join(
        part for part in (escape(report.source), f"<cite>{escape(report.paper)}</cite>" if report.paper else "") if part
    )


def _banner(report: Report) -> str:
    if report.form == "full":
        return ""
    smaller = dict.fromkeys(cell.reduced for cell in report.cells if cell.reduced)
    listed = f"<p>What was smaller:</p><ul>{_items(smaller)}</ul>" if smaller else ""
    what, said = texts.form(report).split(":", 1)
    return f'<div class="banner" role="note"><p><strong>{what}:</strong>{said}</p>{listed}</div>'


def _headline(report: Report) -> str:
    lines = "".join(f"<li><b>{what}:</b> {said}</li>" for what, said in texts.headline(report))
    return f'<ul class="headline" aria-label="What came of it">{lines}</ul>'


def _warnings(report: Report) -> str:
    if not report.warnings:
        return ""
    return (
        '<section class="warnings" aria-labelledby="warnings-title"><h2 id="warnings-title">⚠ Before you believe a number</h2>'
        f"<ul>{_items(report.warnings)}</ul></section>"
    )


# --- the table as in the paper


def _key(report: Report) -> str:
    allowed = texts.tolerance(report)
    first = f"{escape(_metric(report))}, {'higher' if report.higher_is_better else 'lower'} is better."
    last = "Point at a cell or press it for its seeds, runs and reason."
    if not layout.referenced(report):
        spread = "Each cell: mean ± sample standard deviation (number of seeds)."
        notes = [f"{escape(note)}." for note in texts.footnotes(report)]
        return " ".join([first, spread, "<b>Bold</b>: best of its row.", *notes, last])
    parts = [
        first,
        "Each cell: the paper | mean ± sample standard deviation of our runs (number of seeds).",
        "Below: the verdict, and our mean less the paper's number.",
        f"Reproduced: the 90 % interval of the difference lies within the tolerance, {escape(allowed)}; higher, lower: the "
        "95 % interval lies beyond it; inconclusive: neither, near if the means differ by no more, else far."
        if allowed
        else "",
        "<b>Bold</b>: best of its row, once among the paper's numbers and once among ours.",
        "ρ: Spearman's rank correlation of the methods' order in the row with the paper's."
        if texts.has_agreement(report)
        else "",
        *(f"{escape(note)}." for note in texts.footnotes(report)),
        last,
    ]
    return " ".join(filter(None, parts))


def _wide(report: Report, rows: Sequence[Row], places: int | None) -> str:
    columns = _columns(report)
    ranked = any(row.agreement for row in rows)
    heads = "".join(
        f'<th scope="col">{escape(layout.head(m))}{f"<code>{escape(m.key)}</code>" if m.key != m.label else ""}'
        f"<small>{'paper | our runs' if layout.referenced(report) else 'our runs'}</small></th>"
        for m in columns
    )
    body, above = [], None
    for at, row in enumerate(rows):
        block = next(iter(row.conditions.values()), None)
        new = len(report.keys) > 1 and block != above
        start = '<tr class="block">' if new else "<tr>"
        body.append(f"{start}{_wide_row(report, row, at, columns, places, ranked=ranked)}</tr>")
        above = block
    conditions = f'<th scope="col">{", ".join(map(escape, report.keys))}</th>' if report.keys else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="The table, scrolls sideways"><table class="wide">'
        f"<caption><span>{escape(report.source)}: {escape(report.title)}</span></caption>"
        f"<thead><tr>{conditions}{heads}{_rank_head(ranked)}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody>{_foot(report, columns, ranked=ranked)}</table></div>"
    )


def _rank_head(ranked: bool) -> str:
    if not ranked:
        return ""
    return '<th scope="col">Spearman ρ<small>(methods)</small></th>'


def _wide_row(report: Report, row: Row, at: int, columns: Sequence[Method], places: int | None, *, ranked: bool) -> str:
    first = {method.key: row.of(method.key) for method in columns}
    paper = layout.best(((m, c[0].paper) for m, c in first.items() if c), places, higher=report.higher_is_better)
    ours = layout.best(((m, c[0].mean) for m, c in first.items() if c), places, higher=report.higher_is_better)
    cells = []
    for column, method in enumerate(columns):
        shown = "".join(
            _button(report, cell, f"c{at}-{column}-{i}", places, paper=cell.method in paper, ours=cell.method in ours)
            for i, cell in enumerate(first[method.key])
        )
        cells.append(f"<td>{shown}</td>" if shown else '<td class="plain hole">no cell</td>')
    if ranked:
        known = row.agreement
        rho = "–" if known is None or known.rho is None else f"{known.rho:.2f}"
        cells.append(f'<td class="plain">{rho}{f" <span class=hole>({known.methods})</span>" if known else ""}</td>')
    place = f'<th scope="row">{_conditions(row.cells[0])}</th>' if report.keys else ""
    return f"{place}{''.join(cells)}"


def _button(report: Report, cell: Cell, key: str, places: int | None, *, paper: bool, ours: bool) -> str:
    theirs = "–" if cell.paper is None else _strong(_published(cell.paper, places), paper)
    mine = "–" if cell.mean is None else _strong(_number(cell.mean, places), ours)
    spread = f" ± {_number(cell.sd, places)}" if cell.sd is not None and math.isfinite(cell.sd) else ""
    beside = ""
    if layout.referenced(report):
        beside = f'<span class="unseen">paper </span>{theirs}<span class="bar" aria-hidden="true">|</span>'
    under = [_mark(cell)]
    if cell.delta is not None:
        under.append(f'<span class="unseen">difference </span>{_signed(cell.delta, places)}')
    flags = []
    if cell.failed:
        flags.append(f"⚠ {len(cell.failed)} failed")
    if cell.reduced:
        flags.append("reduced")
    if cell.deterministic:
        flags.append("deterministic")
    flagged = f'<span class="under tag">{", ".join(flags)}</span>' if flags else ""
    return (
        f'<button type="button" class="cell" popovertarget="{key}">'
        f"<span>{beside}"
        f'<span class="unseen">, our runs </span>{mine}{spread}{f" ({cell.n})" if cell.n else ""}</span>'
        f'<span class="under">{" ".join(under)}</span>{flagged}</button>'
        f'<div popover id="{key}">{_details(report, cell, places)}</div>'
    )


def _details(report: Report, cell: Cell, places: int | None) -> str:
    facts = [
        ("Paper", _paper(cell, places) + (f" {escape(layout.unit(report))}" if cell.paper is not None else "")),
        ("Our runs", _ours(cell, places)),
        ("95 % interval of the difference", _minus(texts.interval(cell.interval, places))),
        ("By seed", _seeds(cell, places)),
        ("Deterministic", "several runs gave one and the same number" if cell.deterministic else ""),
        ("Counted once", f"equals {escape(_label(report, cell.same_as))} by construction" if cell.same_as else ""),
        ("Failed", "<br>".join(map(escape, cell.failed))),
        ("Reduced", escape(cell.reduced)),
        ("Runs", "<br>".join(f"<code>{escape(run)}</code>" for run in cell.runs)),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts if value)
    reason = f"<p>{escape(cell.reason)}</p>" if cell.reason else ""
    where = ", ".join(f"{escape(k)} {escape(layout.label(v))}" for k, v in cell.conditions.items())
    title = f"{escape(_label(report, cell.method))}{f', {where}' if where else ''}"
    return f"<h3>{title}</h3><p>{_mark(cell)}</p>{reason}<dl>{listed}</dl>"


def _foot(report: Report, columns: Sequence[Method], *, ranked: bool) -> str:
    """Of every column, what the headline counts."""
    judged = ("reproduced", "higher", "lower", "inconclusive")
    counted = [cell for cells in layout.covered(report).values() for cell in cells if cell.verdict in judged]
    if not report.keys or not counted:
        return ""
    totals = []
    for method in columns:
        mine = [cell for cell in counted if cell.method == method.key]
        good = sum(cell.verdict == "reproduced" for cell in mine)
        totals.append(f"<td>{f'{good} of {len(mine)}' if mine else '–'}</td>")
    rho, _ = layout.mean_agreement(report)
    last = f"<td>{'' if rho is None else f'mean {rho:.2f}'}</td>" if ranked else ""
    return f'<tfoot><tr><th scope="row">reproduced</th>{"".join(totals)}{last}</tr></tfoot>'


# --- what it says of the paper's claims and methods


def _claims(report: Report) -> str:
    if not report.claims:
        return ""
    heads = _heads(["State", "Claim", "It says", "Why", "In print", "Row by row"])
    lines = "".join(map(_claim, report.claims))
    note = "Tested on differences paired by seed: yes and no by one-sided bounds of 95 %, else open."
    table = f'<table class="claims"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
    return _section("claims", "Claims", f'<p class="note">{note}</p>{_scroll("Claims", table)}')


def _claim(claim: ClaimResult) -> str:
    mark, word = texts.state(claim).split(" ", 1)
    rows = "".join(f"<li>{escape(_minus(texts.claim_row(row)))}</li>" for row in claim.rows)
    summary = texts.count(len(claim.rows), "row")
    columns = [
        _sign(mark, word, word),
        f"<code>{escape(claim.id)}</code><small>{escape(texts.where(claim))}</small>",
        escape(claim.says),
        escape(texts.why(claim)),
        f'<span class="{"tag" if claim.contradicted else ""}">{escape(texts.in_print(claim))}</span>',
        f"<details><summary>{summary}</summary><ul>{rows}</ul></details>" if rows else "",
    ]
    return f"<tr>{''.join(f'<td>{column}</td>' for column in columns)}</tr>"


def _means(report: Report) -> str:
    if not report.summaries:
        return ""
    unit = escape(layout.points(report.unit))
    heads = _heads(["Method", f"Ours less the paper's, {unit}", "95 % interval", "Mean of"])
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(_minus(text))}</td>' for text in texts.summary(found, report))}</tr>"
        for found in report.summaries
    )
    note = "Differences to the paper's numbers, averaged over rows, seed by seed."
    table = f'<table class="means"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'
    return _section("means", "Mean difference to the paper", f'<p class="note">{note}</p>{_scroll("Means", table)}')


def _heads(names: Iterable[str]) -> str:
    return "".join(f'<th scope="col">{name}</th>' for name in names)


def _scroll(name: str, table: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}, scrolls sideways">{table}</div>'


# --- the table, one line a cell


def _filters(report: Report) -> str:
    methods = "".join(
        f'<option value="{escape(m.key)}">{escape(_label(report, m.key))}</option>' for m in _columns(report)
    )
    verdicts = "".join(f'<option value="{word}">{mark} {word}</option>' for word, mark in texts.marks(report).items())
    return (
        '<form class="filters" hidden>'
        '<label>Text <input type="search" name="text" autocomplete="off" placeholder="e.g. 0.01 failed"></label>'
        f'<label>Method <select name="method"><option value="">all</option>{methods}</select></label>'
        f'<label>Verdict <select name="verdict"><option value="">all</option>{verdicts}</select></label>'
        '<button type="reset">Reset</button><output name="shown" role="status"></output></form>'
    )


def _long(report: Report, places: int | None) -> str:
    unit = escape(layout.unit(report))
    heads = [
        *map(escape, report.keys),
        "Method",
        f"Paper, {unit}",
        f"Our runs, {unit}",
        "sd",
        "n",
        "Δ",
        "95 % interval",
        "Verdict",
        "Why",
        "By seed",
        "Runs",
    ]
    lines = "".join(_long_row(report, cell, places) for cell in report.cells)
    table = (
        '<table class="long"><caption><span>One line a cell; press a heading to sort by it.</span></caption>'
        f"<thead><tr>{_heads(heads)}</tr></thead><tbody>{lines}</tbody></table>"
    )
    return _scroll("Every number", table)


def _long_row(report: Report, cell: Cell, places: int | None) -> str:
    why = [
        cell.reason,
        *(f"failed: {line}" for line in cell.failed),
        f"reduced: {cell.reduced}" if cell.reduced else "",
        f"equals {_label(report, cell.same_as)} by construction" if cell.same_as else "",
    ]
    runs = "".join(f"<li><code>{escape(run)}</code></li>" for run in cell.runs)
    summary = texts.count(len(cell.runs), "run")
    spread = f" ± {_number(cell.paper_sd, places)}" if cell.paper is not None and cell.paper_sd is not None else ""
    columns = [
        *(_condition(cell.conditions.get(key)) for key in report.keys),
        f'<td class="name">{escape(_label(report, cell.method))}</td>',
        _figure(cell.paper, "" if cell.paper is None else _published(cell.paper, places) + spread),
        _figure(cell.mean, "" if cell.mean is None else _number(cell.mean, places)),
        _figure(cell.sd, "" if cell.sd is None else _number(cell.sd, places)),
        _figure(cell.n, str(cell.n)),
        _figure(cell.delta, "" if cell.delta is None else _signed(cell.delta, places)),
        _figure(cell.interval and cell.interval[0], _minus(texts.interval(cell.interval, places))),
        f"<td>{_mark(cell)}</td>",
        f'<td class="words">{"<br>".join(escape(line) for line in why if line)}</td>',
        f'<td class="seeds">{_seeds(cell, places)}</td>',
        f"<td>{f'<details><summary>{summary}</summary><ul class=runs>{runs}</ul></details>' if runs else ''}</td>",
    ]
    return f'<tr data-method="{escape(cell.method)}" data-verdict="{texts.word(cell)}">{"".join(columns)}</tr>'


def _condition(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _figure(value, layout.label(value))
    return (
        f'<td class="name">{escape(layout.label(value))}</td>' if value is None or isinstance(value, str | bool) else ""
    )


def _figure(value: float | None, text: str) -> str:
    """A cell that sorts by its number, not by its text; without one it stays last."""
    key = "" if value is None or math.isnan(value) else repr(value).replace("inf", "Infinity")
    shown = text or '<span class="hole">–</span>'
    return f'<td class="figure" data-sort="{key}">{shown}</td>'


# --- the rest


def _pictures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    shown = []
    for at, picture in enumerate(pictures):
        svg = _inline(picture, f"p{at}-")
        plate = "" if "currentColor" in svg else " plate"
        title = escape(picture.title)
        region = f'<div class="scroll{plate}" tabindex="0" role="region" aria-label="Picture: {title}">{svg}</div>'
        shown.append(f"<figure>{region}<figcaption>{title}</figcaption></figure>")
    return _section("pictures", "Pictures", f"<div>{''.join(shown)}</div>")


def _inline(picture: Picture, prefix: str) -> str:
    """The drawing as an element of the page: no prolog, no metadata, ids of its own, named for those who cannot see it."""
    start = picture.svg.index("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", picture.svg[start:], flags=re.DOTALL)
    svg = _SVG_ID.sub(rf"\g<1>{prefix}", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(picture.title)}"', 1).strip()


def _section(key: str, title: str, inside: str) -> str:
    return f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{inside}</section>'


def _pairs(key: str, title: str, note: str, pairs: Sequence[tuple[str, str]]) -> str:
    if not pairs:
        return ""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    lead = f'<p class="note">{note}</p>' if note else ""
    return _section(key, title, f'{lead}<dl class="facts">{listed}</dl>')


def _columns(report: Report) -> list[Method]:
    """The report's methods, then those that only its cells know."""
    known = {method.key: method for method in report.methods}
    for cell in report.cells:
        known.setdefault(cell.method, Method(cell.method, cell.method))
    return list(known.values())


def _label(report: Report, key: str) -> str:
    return layout.names(report).get(key, key)


def _metric(report: Report) -> str:
    return f"{report.metric.replace('_', ' ').capitalize()} in {layout.unit(report)}"


def _conditions(cell: Cell) -> str:
    return "".join(
        f"<span><i>{escape(k)}</i> <span>{escape(layout.label(v))}</span></span>" for k, v in cell.conditions.items()
    )


def _paper(cell: Cell, places: int | None) -> str:
    if cell.paper is None:
        return "no number"
    return _published(cell.paper, places) + ("" if cell.paper_sd is None else f" ± {_number(cell.paper_sd, places)}")


def _ours(cell: Cell, places: int | None) -> str:
    if cell.mean is None:
        return "not run"
    spread = "" if cell.sd is None else f" ± {_number(cell.sd, places)}"
    delta = "" if cell.delta is None else f", Δ {_signed(cell.delta, places)}"
    return f"{_number(cell.mean, places)}{spread} (n = {cell.n}{delta})"


def _seeds(cell: Cell, places: int | None) -> str:
    """Each seed and its value, with the point of a grid that it is the best of; they wrap between seeds alone."""
    points = [f" at {escape(point)}" for point in cell.chosen] or [""] * cell.n
    each = zip(cell.seeds, cell.values, points, strict=True)
    return ", ".join(f'<span class="pair">{seed}: {_number(value, places)}{at}</span>' for seed, value, at in each)


def _mark(cell: Cell) -> str:
    return _sign(texts.mark(cell), texts.word(cell), cell.verdict)


def _sign(mark: str, word: str, kind: str) -> str:
    """A coloured sign with its word; `kind` has the colour."""
    slug = kind.replace(" ", "-")
    return f'<span class="mark {slug}"><span aria-hidden="true">{mark}</span> {word}</span>'


def _number(value: float, places: int | None) -> str:
    return _minus(layout.number(value, places))


def _published(value: float, places: int | None) -> str:
    return _minus(layout.published(value, places))


def _signed(value: float, places: int | None) -> str:
    return _minus(layout.signed(value, places))


def _minus(text: str) -> str:
    """Hyphens before numbers as minus signs; those of exponents stay."""
    return _NEGATIVE.sub("−", text)


def _strong(text: str, best: bool) -> str:
    return f"<b>{text}</b>" if best else text


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)
