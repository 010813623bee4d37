"""Texts of a report that several formats share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from fedexp.tables.report import layout
from fedexp.tables.report.report import (
    Cell,
    ClaimResult,
    ClaimRow,
    ClaimState,
    Report,
    Role,
    Summary,
    Variant,
)

# Signs of verdicts, by `verdict_name`.
MARKS: Mapping[str, str] = {
    "reproduced": "✓",
    "close": "≈",
    "different (higher)": "↑",
    "different (lower)": "↓",
    "undecided": "?",
    "not run": "○",
    "no reference": "·",
    "not comparable": "≠",
}
_HASHES = ("data sha256", "split sha256", "code hash")
_DETERMINISTIC = "‡"
POOLED = (
    "Pooled over the last ten rounds of all runs, if those of every run are recorded: "
    "mean ± sd (runs x rounds)"
)
CLAIM_MARKS: Mapping[ClaimState, str] = {
    "supported": "✓",
    "contradicted": "✗",
    "supported in reduced form": "(✓)",
    "not supported in reduced form": "(✗)",
    "undecided": "?",
    "superseded settings: no verdict": "–",
}
_ROLES: Mapping[Role, str] = {
    "proposed": "proposed method",
    "baseline": "baselines",
    "reference": "reference baselines",
}
_VARIANTS: Mapping[Variant, str] = {
    "full": "Full: all of the table's cells and runs.",
    "partial": "Partial: not exactly the cells and runs of the full variant.",
    "reduced": (
        "Reduced: these runs are smaller than the paper's. Their numbers are not compared with the "
        "paper's. Claims are judged for these runs only."
    ),
    "smoke": (
        "Smoke test: the runs show that the pipeline works; do not compare their numbers "
        "with published ones."
    ),
}


# --- the whole report


def headline(report: Report) -> list[tuple[str, str]]:
    """Return the most important results: (subject, result)."""
    paper = report.paper_claims
    ours = [claim for claim in report.claims if claim.is_ours]
    outcomes = []
    if paper:
        outcomes.append(("claims of the paper", states(paper)))
    if ours:
        outcomes.append(
            ("and of our own expectations" if paper else "our own expectations", states(ours))
        )
    covered = layout.counted_cells(report)
    for role, name in _ROLES.items():
        if cells := covered.get(role):
            outcomes.append((name, f"{count(len(cells), 'cell')}: {_verdicts(cells)}"))
    if not covered:
        outcomes.append(("cells of the paper", f"none; {len(report.cells)} of ours"))
    return outcomes


def states(claims: Sequence[ClaimResult]) -> str:
    """Count claims by state: ``2 supported, 1 undecided``."""
    counts = Counter(claim.state for claim in claims)
    return ", ".join(f"{counts[state]} {state}" for state in get_args(ClaimState) if counts[state])


def _verdicts(cells: Sequence[Cell]) -> str:
    """Count verdicts: ``2 reproduced, 5 undecided``."""
    counts = Counter(map(verdict_name, cells))
    return ", ".join(f"{counts[name]} {name}" for name in MARKS if counts[name])


def variant_note(report: Report) -> str:
    """Return the name of the variant, and its meaning for the numbers."""
    return _VARIANTS[report.variant]


def variant_suffix(report: Report) -> str:
    """Return the variant for the end of a name: `` (reduced)``."""
    return f" ({report.variant})"


def stamp(report: Report) -> str:
    """Return the facts that a picture needs if it is shown outside the report.

    They are table, variant, runs per cell, commit and date, as far as they are known.
    """
    counts = sorted({cell.n for cell in report.cells if cell.n})
    facts = dict(report.facts)
    known = [
        f"{report.name}, {report.variant} variant",
        f"n = {counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} runs per cell"
        if counts
        else "",
        f"commit {facts['commit']}" if "commit" in facts else "",
        facts.get("date", ""),
    ]
    return "; ".join(filter(None, known)) + "."


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the report's facts (name, value) without those that `hashes` returns."""
    return [fact for fact in report.facts if fact[0] not in _HASHES]


def hashes(report: Report) -> list[tuple[str, str]]:
    """Return the report's facts that are hashes, which serve only for comparisons."""
    return [fact for fact in report.facts if fact[0] in _HASHES]


def footnotes(report: Report) -> list[str]:
    """Return notes that explain the signs beside labels and marks.

    A note also names each column that equals another column by construction, because
    equal cells are counted once.
    """
    notes = [oracle_note(report)]
    if any(cell.deterministic for cell in report.cells):
        notes.append(f"{_DETERMINISTIC} deterministic: several runs gave exactly the same number")
    if any(cell.mean == math.inf for cell in report.cells):
        notes.append("inf: infinite in at least one run (rounds to a target: never reached)")
    names = layout.marked_labels(report)
    same = Counter((cell.method, cell.same_as) for cell in report.cells if cell.same_as)
    notes += [
        (
            f"{names.get(a, a)} equals {names.get(b, b)} by construction in {count(rows, 'row')}: "
            f"counted once"
        )
        for (a, b), rows in same.items()
    ]

    return [note for note in notes if note]


def legend(report: Report) -> list[str]:
    """Return the meaning of marks, the tolerance, and the mean rank correlation."""
    signs = ", ".join(f"{mark} {name}" for name, mark in verdict_marks(report).items())
    allowed = tolerance_note(report)
    return list(filter(None, [signs, f"tolerance {allowed}" if allowed else "", rank_note(report)]))


def oracle_note(report: Report) -> str:
    """Return a note that explains the sign of columns that have seen test data.

    `layout.marked_labels` adds this sign. The note is empty if there is no such column.
    """
    chosen = [f"{method.label}, {method.oracle}" for method in report.methods if method.oracle]
    return f"{layout.ORACLE.strip()} has seen test data: {'; '.join(chosen)}" if chosen else ""


def tolerance_note(report: Report) -> str:
    """Return the tolerance as text, empty if nothing is judged.

    Columns with their own tolerance are in brackets. For example,
    ``5 percentage points (Ensemble 10)`` means that Ensemble has a tolerance of 10.
    """
    own = [
        f"{layout.marked_label(m)} {m.tolerance:g}"
        for m in report.methods
        if m.tolerance not in (None, report.tolerance)
    ]
    if not layout.has_reference(report) or (report.tolerance is None and not own):
        return ""
    unit = layout.difference_unit(report.unit)
    if report.tolerance is None:
        return f"{', '.join(own)} {unit}"
    return f"{report.tolerance:g} {unit}" + (f" ({', '.join(own)})" if own else "")


def rank_note(report: Report) -> str:
    """Return a note on the mean rank correlation, empty if no row has one."""
    mean, rows = layout.mean_agreement(report)
    return (
        ""
        if mean is None
        else f"rank agreement (Spearman) {mean:.2f}, mean of {count(rows, 'row')}"
    )


# --- cells


def pooled(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the table with the title `POOLED`.

    It has means and standard deviations over the last ten rounds of all runs of a cell.
    Methods and rows without such numbers are left out.
    """
    names, digits = layout.marked_labels(report), layout.places(report)
    there = {cell.method for cell in report.cells if cell.pooled_sd is not None}
    methods = [method.key for method in report.methods if method.key in there]
    rows = [
        [
            *conditions(row, report),
            *("".join(_pooled(cell, digits) for cell in row.cells_of(key)) for key in methods),
        ]
        for row in layout.rows(report)
        if any(cell.pooled_sd is not None for cell in row.cells)
    ]
    return [*report.keys, *(names[key] for key in methods)], rows


def _pooled(cell: Cell, digits: int | None) -> str:
    if cell.pooled_mean is None or cell.pooled_sd is None:
        return ""
    lengths = sorted(map(len, cell.last_10))
    rounds = f"{lengths[0]} to {lengths[-1]}" if lengths[0] < lengths[-1] else f"{lengths[0]}"
    return (
        f"{layout.number(cell.pooled_mean, digits)}{spread(cell.pooled_sd, digits)} "
        f"({cell.n} x {rounds})"
    )


def verdict_mark(cell: Cell) -> str:
    """Return the sign of a verdict.

    A second sign follows if several runs gave exactly the same number.
    """
    return MARKS[verdict_name(cell)] + (_DETERMINISTIC if cell.deterministic else "")


def verdict_name(cell: Cell) -> str:
    """Return the name of the verdict, with its direction if it is ``different``."""
    return f"{cell.verdict} ({cell.direction})" if cell.direction else cell.verdict


def verdict_marks(report: Report) -> dict[str, str]:
    """Return the sign of every verdict name in the report, in the order of verdicts."""
    there = set(map(verdict_name, report.cells))
    return {name: mark for name, mark in MARKS.items() if name in there}


def conditions(row: layout.Row, report: Report) -> list[str]:
    """Return the conditions of a row as texts."""
    return [layout.label(row.conditions[key]) for key in report.keys]


def interval(ends: tuple[float, float] | None, digits: int | None) -> str:
    """Return an interval as ``-3.00 to +1.20``, empty without an interval."""
    return "" if ends is None else " to ".join(layout.signed(end, digits) for end in ends)


def has_agreement(report: Report) -> bool:
    """Return whether a rank correlation with the paper is known."""
    return any(a.rho is not None for a in report.agreement)


# --- claims and summaries


def claim_state(claim: ClaimResult) -> str:
    """Return the mark and the state of a claim: ``✓ supported``."""
    return f"{CLAIM_MARKS[claim.state]} {claim.state}"


def claim_class(claim: ClaimResult) -> str:
    """Return the state of a claim as a CSS class."""
    return claim.state.replace(" ", "-").replace(":", "")


def scopes(report: Report) -> list[str]:
    """Return the different texts that name the runs on which claims were decided."""
    return list(dict.fromkeys(claim.scope for claim in report.claims))


def claim_source(claim: ClaimResult) -> str:
    """Return a claim's place in the paper, or a text for our own expectation."""
    return "our own expectation" if claim.is_ours else claim.where


def claim_reason(claim: ClaimResult) -> str:
    """Return the reason for a claim's state, and in how many rows it must hold."""
    needed = {"all": "every row", "most": "most rows"}.get(claim.needed, f"{claim.needed} rows")
    return f"{claim.reason} (must hold in {needed})"


def claim_in_print(claim: ClaimResult) -> str:
    """Return a claim's result on the paper's own numbers, empty without a result."""
    if not claim.contradicted_in_print:
        return claim.printed
    return f"{claim.printed}: the paper's own numbers do not support it"


def claim_row(row: ClaimRow) -> str:
    """Return a row of a claim as text.

    Example: ``clients 5, beta 0.01: yes, +2.31, 3 of 3 pairs in favour; in print no``.
    """
    place = (
        ", ".join(f"{key} {layout.label(value)}" for key, value in row.conditions.items())
        or "all rows"
    )
    estimate = (
        row.why_empty
        if row.estimate is None
        else f"{row.estimate:+.3g}, {row.in_favour} of {row.n} pairs in favour"
    )
    printed = "" if row.printed is None else f"; in print {'yes' if row.printed else 'no'}"
    return f"{place}: {row.state}, {estimate}{printed}"


def summary(found: Summary, report: Report) -> tuple[str, str, str, str]:
    """Return the method, its mean difference from the paper, the interval, and counts.

    The counts are the numbers of seeds and rows over which the mean is taken.
    """
    digits = layout.places(report)
    return (
        layout.marked_labels(report).get(found.method, found.method),
        layout.signed(found.mean, digits),
        interval(found.interval, digits) or "none for one seed",
        f"{count(found.n, 'seed')}, {count(found.rows, 'row')}",
    )


def sentence(text: str) -> str:
    """Return a text as a sentence with a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first items, and count the others: ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def spread(value: float | None, digits: int | None) -> str:
    """Return the standard deviation that follows a mean: `` ± 1.20``.

    The result is empty without a standard deviation.
    """
    return "" if value is None else f" ± {layout.number(value, digits)}"
