"""The words of a report that its forms share."""

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
    Verdict,
)

MARKS: Mapping[Verdict, str] = {
    "reproduced": "✓",
    "higher": "↑",
    "lower": "↓",
    "inconclusive": "?",
    "not run": "○",
    "no reference": "·",
    "not comparable": "≠",
}
_HASHES = ("data sha256", "split sha256", "code hash")
_NEAR, _DETERMINISTIC = "≈", "‡"
POOLED = "Pooled over the last ten rounds of all runs, where every run's are recorded: mean ± sd (runs x rounds)"
CLAIM_MARKS: Mapping[ClaimState, str] = {"held": "✓", "refuted": "✗", "open": "?"}
_ROLES: Mapping[Role, str] = {
    "proposed": "proposed method",
    "baseline": "baselines",
    "reference": "reference baselines",
}
_VARIANTS: Mapping[Variant, str] = {
    "full": "Full: all of the table's cells and runs.",
    "partial": "Partial: a part of the full variant's cells or runs.",
    "reduced": "Reduced: these runs are smaller than the paper's, so no cell counts as reproduced.",
    "smoke": "Smoke test: the runs show that the pipeline works; compare their numbers with nothing published.",
}


# --- the whole report


def headline(report: Report) -> list[tuple[str, str]]:
    """What a reader should know if he reads no further: (of what, what came of it)."""
    paper = report.paper_claims
    ours = [claim for claim in report.claims if claim.is_ours]
    outcomes = []
    if paper:
        outcomes.append(("claims of the paper", _states(paper)))
    if ours:
        outcomes.append(
            ("and of our own expectations" if paper else "our own expectations", _states(ours))
        )
    covered = layout.counted_cells(report)
    for role, name in _ROLES.items():
        if cells := covered.get(role):
            outcomes.append((name, f"{count(len(cells), 'cell')}: {_verdicts(cells)}"))
    if not covered:
        outcomes.append(("cells of the paper", f"none; {len(report.cells)} of ours"))
    return outcomes


def _states(claims: Sequence[ClaimResult]) -> str:
    counts = Counter(claim.state for claim in claims)
    return ", ".join(f"{counts[state]} {state}" for state in get_args(ClaimState))


def _verdicts(cells: Sequence[Cell]) -> str:
    """``2 reproduced, 5 inconclusive (3 near)``."""
    counts = Counter(cell.verdict for cell in cells)
    near = sum(cell.verdict == "inconclusive" and bool(cell.near) for cell in cells)
    return ", ".join(
        f"{counts[verdict]} {verdict}"
        + (f" ({near} near)" if near and verdict == "inconclusive" else "")
        for verdict in get_args(Verdict)
        if counts[verdict]
    )


def variant_note(report: Report) -> str:
    """The variant's name, and what it means for the numbers."""
    return _VARIANTS[report.variant]


def variant_suffix(report: Report) -> str:
    """`` (reduced)``, to stand behind a name."""
    return f" ({report.variant})"


def stamp(report: Report) -> str:
    """What must go with a picture wherever it is shown: table, variant, runs a cell, commit, date; only what is known."""
    counts = sorted({cell.n for cell in report.cells if cell.n})
    facts = dict(report.facts)
    known = [
        f"{report.name}, {report.variant} variant",
        f"n = {counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} runs a cell"
        if counts
        else "",
        f"commit {facts['commit']}" if "commit" in facts else "",
        facts.get("date", ""),
    ]
    return "; ".join(filter(None, known)) + "."


def facts(report: Report) -> list[tuple[str, str]]:
    """Of the report's, what a reader reads; `hashes` has the others."""
    return [fact for fact in report.facts if fact[0] not in _HASHES]


def hashes(report: Report) -> list[tuple[str, str]]:
    """Facts that are there to be compared, not read."""
    return [fact for fact in report.facts if fact[0] in _HASHES]


def footnotes(report: Report) -> list[str]:
    """What the signs at labels and marks mean, and which cells the headline leaves out."""
    notes = [oracle_note(report)]
    if any(cell.deterministic for cell in report.cells):
        notes.append(f"{_DETERMINISTIC} deterministic: several runs gave one and the same number")
    if any(cell.mean == math.inf for cell in report.cells):
        notes.append("inf: infinite in one run or more; of rounds to a target: never reached")
    names = layout.marked_labels(report)
    same = Counter((cell.method, cell.same_as) for cell in report.cells if cell.same_as)
    notes += [
        f"{names.get(a, a)} equals {names.get(b, b)} by construction in {count(rows, 'row')}: counted once"
        for (a, b), rows in same.items()
    ]
    return [note for note in notes if note]


def legend(report: Report) -> list[str]:
    """Return what marks mean, the tolerance, and the mean agreement of ranks."""
    signs = ", ".join(f"{mark} {name}" for name, mark in verdict_marks(report).items())
    allowed = tolerance_note(report)
    return list(filter(None, [signs, f"tolerance {allowed}" if allowed else "", rank_note(report)]))


def oracle_note(report: Report) -> str:
    """The legend of the sign that `layout.marked_labels` sets; empty where no column has seen test data."""
    chosen = [f"{method.label}, {method.oracle}" for method in report.methods if method.oracle]
    return f"{layout.ORACLE.strip()} has seen test data: {'; '.join(chosen)}" if chosen else ""


def tolerance_note(report: Report) -> str:
    """``5 percentage points (Ensemble 10)``: columns that have their own in brackets; empty where nothing is judged."""
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
    """Mean agreement of the methods' order; empty where no row has one."""
    mean, rows = layout.mean_agreement(report)
    return (
        ""
        if mean is None
        else f"rank agreement (Spearman) {mean:.2f}, mean of {count(rows, 'row')}"
    )


# --- cells


def pooled(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table that `POOLED` is the title of: methods and rows that have such numbers; else no rows."""
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
    return f"{layout.number(cell.pooled_mean, digits)}{spread(cell.pooled_sd, digits)} ({cell.n} x {rounds})"


def verdict_mark(cell: Cell) -> str:
    """The verdict as a sign, and a second one at runs that gave one and the same number."""
    sign = _NEAR if cell.verdict == "inconclusive" and cell.near else MARKS[cell.verdict]
    return sign + (_DETERMINISTIC if cell.deterministic else "")


def verdict_name(cell: Cell) -> str:
    """The verdict; ``inconclusive (near)`` and ``inconclusive (far)``."""
    if cell.verdict != "inconclusive" or cell.near is None:
        return cell.verdict
    return f"{cell.verdict} ({'near' if cell.near else 'far'})"


def verdict_marks(report: Report) -> dict[str, str]:
    """The sign of every word that the report's cells have, in the order of verdicts."""
    order = {verdict: at for at, verdict in enumerate(get_args(Verdict))}
    cells = sorted(report.cells, key=lambda cell: (order[cell.verdict], not cell.near))
    return {verdict_name(cell): verdict_mark(cell).removesuffix(_DETERMINISTIC) for cell in cells}


def conditions(row: layout.Row, report: Report) -> list[str]:
    return [layout.label(row.conditions[key]) for key in report.keys]


def interval(ends: tuple[float, float] | None, digits: int | None) -> str:
    """``-3.00 to +1.20``, empty where there is none."""
    return "" if ends is None else " to ".join(layout.signed(end, digits) for end in ends)


def has_agreement(report: Report) -> bool:
    return any(a.rho is not None for a in report.agreement)


# --- claims and summaries


def claim_state(claim: ClaimResult) -> str:
    """``✓ held``."""
    return f"{CLAIM_MARKS[claim.state]} {claim.state}"


def claim_source(claim: ClaimResult) -> str:
    return "our own expectation" if claim.is_ours else claim.where


def claim_reason(claim: ClaimResult) -> str:
    """The reason, and of how many rows the claim is meant."""
    needed = {"all": "every row", "most": "most rows"}.get(claim.needed, f"{claim.needed} rows")
    return f"{claim.reason} (meant of {needed})"


def claim_in_print(claim: ClaimResult) -> str:
    """What the paper's own numbers say, empty where it prints none."""
    if not claim.contradicted:
        return claim.printed
    return f"{claim.printed}: the paper's own numbers do not bear it out"


def claim_row(row: ClaimRow) -> str:
    """``clients 5, beta 0.01: yes, +2.31, 3 of 3 pairs in favour; in print no``."""
    place = (
        ", ".join(f"{key} {layout.label(value)}" for key, value in row.conditions.items())
        or "all rows"
    )
    estimate = (
        "no pairs"
        if row.estimate is None
        else f"{row.estimate:+.3g}, {row.in_favour} of {row.n} pairs in favour"
    )
    printed = "" if row.printed is None else f"; in print {'yes' if row.printed else 'no'}"
    return f"{place}: {row.state}, {estimate}{printed}"


def summary(found: Summary, report: Report) -> tuple[str, str, str, str]:
    """Method, mean difference to the paper, its interval, and of how many numbers it is the mean."""
    digits = layout.places(report)
    return (
        layout.marked_labels(report).get(found.method, found.method),
        layout.signed(found.mean, digits),
        interval(found.interval, digits) or "one seed has none",
        f"{count(found.n, 'seed')}, {count(found.rows, 'row')}",
    )


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shortened(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first items, and count the others: ``a, b and 3 more``."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def spread(value: float | None, digits: int | None) -> str:
    """Return a standard deviation behind its mean: `` ± 1.20``, empty if there is none."""
    return "" if value is None else f" ± {layout.number(value, digits)}"
