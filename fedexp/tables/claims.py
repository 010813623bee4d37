"""Tests of the paper's claims on our runs and on the paper's own numbers.

A claim is tested row by row, in the rows that it is about. Most tests compare two
columns (methods). They use the differences between runs that have the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.stats import binom, t

from fedexp.tables.cells import planned_cells
from fedexp.tables.claim_rows import RowGroup, row_groups
from fedexp.tables.report.report import (
    Cell,
    ClaimResult,
    ClaimRow,
    ClaimState,
    RowState,
    Value,
    Variant,
)
from fedexp.tables.schema import Claim, Table, Target
from fedexp.tables.seeds import ROUNDING
from fedexp.tables.verdicts import LEVEL

# Values of a table's keys, which identify a row.
RowKey = tuple[Value, ...]
# Points (iteration or round, value), in ascending order of iterations or rounds.
Curve = Sequence[tuple[float, float]]
# Curves by row, column, split seed and the claim's `curve`. The split seed is a text
# with the seed of a run and its conditions that do not identify a row.
Curves = Mapping[tuple[RowKey, str, str, str], Curve]
# States of a claim, by the common answer of its rows (yes, no or undecided).
_FULL: Mapping[RowState, ClaimState] = {
    "yes": "supported",
    "no": "contradicted",
    "undecided": "undecided",
}
_REDUCED: Mapping[RowState, ClaimState] = {
    "yes": "supported in reduced form",
    "no": "not supported in reduced form",
    "undecided": "undecided",
}
# A number is a cost if its path in the result begins with one of these texts. Costs are
# seconds and numbers of rounds until a target is reached.
_COSTS = ("seconds.", "rounds_to.")
# Reasons why a claim is undecided. `_ROWS` is replaced by the number of rows.
_ROWS = "{rows}"
_ABSENT = f"{_ROWS} lack runs of a column"
_SINGLE = f"{_ROWS} with one seed"
_APART = "no common seeds"


@dataclass(frozen=True)
class Numbers:
    """The numbers that claims compare.

    Args:
        ours: Numbers of our runs by split seed, for each row and column.
        printed: The paper's numbers by row and column. They are the same for every
            variant of our runs.
        curves: Curves of our runs, for claims that compare curves.
    """

    ours: Mapping[tuple[RowKey, str], Mapping[str, float]]
    printed: Mapping[tuple[RowKey, str], float]
    curves: Curves

    @classmethod
    def of(
        cls, table: Table, cells: Iterable[Cell], curves: Curves, learned: bool = False
    ) -> Numbers:
        """Collect the numbers of cells.

        Args:
            table: The table of the cells.
            cells: The cells.
            curves: Curves of our runs, for claims that compare curves.
            learned: Whether runs at chance level are left out.
        """
        ours: dict[tuple[RowKey, str], dict[str, float]] = {}
        left_out = set()
        for cell in cells:
            place = table.row_key(cell.conditions), cell.method
            numbers = zip(cell.split_seeds, cell.values, strict=True)
            ours[place] = dict(numbers)
            for split_seed, flag in zip(cell.split_seeds, cell.did_not_learn, strict=False):
                if learned and flag:
                    del ours[place][split_seed]
                    left_out.add((*place, split_seed))
        if left_out:
            curves = {key: curve for key, curve in curves.items() if key[:3] not in left_out}
        known = [row for row in table.reference if row.get("value") is not None]
        printed = {(table.row_key(row), str(row["method"])): float(row["value"]) for row in known}
        return cls(ours, printed, curves)


def decide_claims(
    table: Table, variant: Variant, cells: Sequence[Cell], curves: Curves, objection: str = ""
) -> tuple[ClaimResult, ...]:
    """Decide every claim of the table.

    A claim is undecided if one of its rows lacks runs of a column. A pair of runs is
    left out if both of its numbers are infinite. All claims are undecided if there is
    an objection to one run, such as data that differ from the paper's.

    Args:
        table: The table.
        variant: Variant of the runs.
        cells: Cells of the report.
        curves: Curves of our runs, for claims that compare curves.
        objection: Reason why the runs cannot decide a claim, empty if they can.
    """
    numbers = Numbers.of(table, cells, curves)
    flagged = any(any(cell.did_not_learn) for cell in cells)
    learned = Numbers.of(table, cells, curves, learned=True) if flagged else numbers
    return tuple(
        _decided(claim, table, variant, numbers, learned, objection) for claim in table.claims
    )


def _decided(
    claim: Claim,
    table: Table,
    variant: Variant,
    numbers: Numbers,
    learned: Numbers,
    objection: str,
) -> ClaimResult:
    """Decide a claim.

    Args:
        claim: The claim.
        table: Its table.
        variant: Variant of the runs.
        numbers: Numbers of all runs.
        learned: Numbers without those of runs at chance level. If no run is at chance
            level, this is `numbers` itself.
        objection: Reason why the runs cannot decide a claim, empty if they can.
    """
    decisions = _claim_rows(claim, table, variant, numbers)
    rows = tuple(decision.row for decision in decisions)
    words = _REDUCED if variant == "reduced" else _FULL
    outcome, reason = _outcome(claim, decisions)
    state = words[outcome]
    without = state
    if learned is not numbers:
        without = words[_outcome(claim, _claim_rows(claim, table, variant, learned))[0]]
    if without != state:
        reason = (
            f"{state} with all runs, {without} without the runs that did not learn"
            f"{_in_favour(decisions)}"
        )
        state = "undecided"

    objection = objection or _objection(claim, table, variant)
    if objection:
        state, reason = "undecided", objection + _in_favour(decisions)
    superseded = _superseded(claim, table, variant)
    if superseded:
        state, reason = "superseded settings: no verdict", superseded + _in_favour(decisions)

    in_print = [
        _in_print(_tests(claim, table, group, numbers))
        for group in row_groups(claim, table, "full")
    ]
    printed, contradicted = _printed_state(claim, in_print)

    return ClaimResult(
        claim.id,
        claim.where,
        claim.says,
        state,
        _scope(table, variant),
        reason,
        str(claim.rows),
        rows,
        printed,
        contradicted,
    )


# --- what a variant may decide


def _scope(table: Table, variant: Variant) -> str:
    """Return a text that names the runs on which a claim was decided."""
    smaller = table.smaller(variant)
    if smaller is not None:
        return f"{variant} form: {smaller.what}"
    return "full form" if variant == "full" else "full form, not exactly its runs"


def _objection(claim: Claim, table: Table, variant: Variant) -> str:
    """Return why a smaller variant cannot decide a claim, empty if it can.

    The smoke variant cannot decide any claim. The reduced variant can decide a claim
    about an order (which number is better), but not about an amount, a cost or the time
    to a target. It must have all rows that the claim has in the full variant, with the
    same data sets. It may have further rows, even if the full variant has none.
    """
    if variant == "smoke":
        return "a smoke run only shows that the pipeline works"
    if variant != "reduced":
        return ""
    columns = [table.columns[name] for name in (*claim.a, *claim.b)]
    if claim.is_about_an_amount:
        return "a claim about an amount needs the paper's settings"
    if claim.target is not None:
        return "a claim about the time to a target needs the paper's settings"
    if any(table.value_path(column).startswith(_COSTS) for column in columns):
        return "a claim about a cost needs the paper's settings"

    full, reduced = (
        {place for group in row_groups(claim, table, form) for place in group.places}
        for form in ("full", "reduced")
    )
    if lacking := len(full - reduced):
        return f"the reduced form lacks {lacking} of {len(full)} rows of the claim"
    datasets = [_datasets(claim, table, form, full) for form in ("full", "reduced")]
    return "" if datasets[0] == datasets[1] else "the reduced form has other data sets"


def _datasets(
    claim: Claim, table: Table, variant: Variant, places: Collection[RowKey]
) -> dict[tuple[RowKey, str], set[str]]:
    """Return the overrides of ``dataset`` in a claim's cells, by row and column."""
    names = {*claim.a, *claim.b}
    return {
        (place, planned.method): {
            override
            for job in planned.jobs
            for override in job.overrides
            if override.startswith("dataset=")
        }
        for planned in planned_cells(table, variant)
        if planned.method in names and (place := table.row_key(planned.conditions)) in places
    }


def _superseded(claim: Claim, table: Table, variant: Variant) -> str:
    """Return why the settings of a claim's runs are superseded, empty if they are not.

    Superseded settings do not test what the paper claims (`Superseded`).
    """
    smaller = table.smaller(variant)
    note = None if smaller is None else smaller.superseded
    if note is None or (note.methods and not {*claim.a, *claim.b} & {*note.methods}):
        return ""
    return note.why


# --- rows


@dataclass(frozen=True)
class _Decision:
    """The result of a claim in one row, with reasons why it may be undecided.

    Args:
        row: The result.
        num_censored: Number of pairs that were left out of the row.
        lacking: Reason why the claim as a whole is undecided, such as missing runs.
            Empty: the row has enough runs.
        censored: Reason why pairs were left out of the row. Empty: the row has at least
            two pairs.
    """

    row: ClaimRow
    num_censored: int = 0
    lacking: str = ""
    censored: str = ""


def _claim_rows(
    claim: Claim, table: Table, variant: Variant, numbers: Numbers
) -> tuple[_Decision, ...]:
    groups = row_groups(claim, table, variant)
    levels = _levels(claim, len(groups))
    found = []
    for group in groups:
        tests = _tests(claim, table, group, numbers)
        row, num_censored = _claim_row(group, tests, levels)
        reasons = _why_undecided(claim, table, tests, row.n)
        found.append(_Decision(row, num_censored, *reasons))
    return tuple(found)


def _why_undecided(claim: Claim, table: Table, tests: Sequence[_Test], n: int) -> tuple[str, str]:
    """Return why a row has fewer than two pairs, as texts for `_Decision`.

    Args:
        claim: The claim.
        table: Its table.
        tests: Tests of the claim in the row.
        n: Number of pairs of the row.
    """
    if n > 1:
        return "", ""
    empty = [test for test in tests if not any(pairs.differences for pairs in test.alternatives)]
    missing = [test for test in empty if not any(pairs.censored for pairs in test.alternatives)]
    if missing:
        lacking = [pairs for test in missing for pairs in test.alternatives]
        if any(pairs.lacks_curve for pairs in lacking):
            return f"the runs have no curve {claim.curve} in {_ROWS}", ""
        return (f"{_APART} in {_ROWS}" if all(p.are_apart for p in lacking) else _ABSENT), ""
    if not any(pairs.censored for test in tests for pairs in test.alternatives):
        return _SINGLE, ""

    paths = [table.value_path(table.columns[name]) for name in (*claim.a, *claim.b)]
    reaches = claim.test == "sooner" or all(path.startswith("rounds_to.") for path in paths)
    if n == 0:
        why = "no run reaches the target" if reaches else "no pair has a finite number"
    else:
        why = "only one pair " + ("reaches the target" if reaches else "has a finite number")
    return "", f"{why} in {_ROWS}"


@dataclass(frozen=True)
class _Pairs:
    """The paired differences of two cells.

    Args:
        by_seed: The differences by split seed.
        censored: Number of pairs that were left out, because both numbers are infinite.
            Both runs miss a target, and it is not known which one misses it by more.
        lacks_curve: Whether a cell has runs, but none of them has the claim's curve.
        are_apart: Whether both cells have numbers, but no common split seed.
        tolerance: Largest number that differs from 0 only by rounding.
    """

    by_seed: Mapping[str, float]
    censored: int = 0
    lacks_curve: bool = False
    are_apart: bool = False
    tolerance: float = 0.0

    @property
    def differences(self) -> tuple[float, ...]:
        """The differences, one per pair."""
        return tuple(self.by_seed.values())

    def is_above(self, split_seed: str) -> bool:
        """Return whether the pair of this split seed has a difference above 0."""
        return self.by_seed.get(split_seed, -math.inf) > self.tolerance

    @property
    def why_empty(self) -> str:
        """Reason why there are no differences, "" if there are some."""
        if self.by_seed:
            return ""
        if self.censored or self.lacks_curve:
            return "no pairs to compare"
        return _APART if self.are_apart else "a column has no runs"

    @classmethod
    def of(cls, numbers: Mapping[str, tuple[float, float]]) -> _Pairs:
        """Subtract the second number of every pair from the first one.

        Args:
            numbers: The pairs by split seed.
        """
        by_seed = {seed: a - b for seed, (a, b) in numbers.items() if not _is_censored(a, b)}
        sizes = (abs(size) for pair in numbers.values() for size in pair if math.isfinite(size))
        tolerance = ROUNDING * max(sizes, default=0.0)
        return cls(by_seed, len(numbers) - len(by_seed), tolerance=tolerance)

    def scaled(self, factor: float, shift: float = 0.0) -> _Pairs:
        """Multiply all differences by a factor and add a number."""
        return replace(self, by_seed={seed: factor * d + shift for seed, d in self.by_seed.items()})


def _is_censored(a: float, b: float) -> bool:
    """Return whether two numbers are infinite with the same sign."""
    return math.isinf(a) and a == b


@dataclass(frozen=True)
class _Test:
    """A test that consists of alternatives. At least one of them must hold.

    Args:
        alternatives: The paired differences of each alternative. An alternative holds
            if the mean of its differences is above 0.
        printed: The difference of the paper's numbers for each alternative, None if the
            paper does not print these numbers.
    """

    alternatives: tuple[_Pairs, ...]
    printed: tuple[float | None, ...]


def _tests(claim: Claim, table: Table, group: RowGroup, numbers: Numbers) -> list[_Test]:
    """Return the tests of a claim in a row. All of them must hold."""
    sign = 1.0 if table.higher_is_better else -1.0
    if claim.test == "trend":
        return _trend(claim, group, numbers, sign)
    (place,) = group.places
    if claim.than is not None:
        return [_beyond(claim, numbers, place, a, sign) for a in claim.a]
    pairs = [(a, b) for a in claim.a for b in claim.b]

    if claim.test == "within":
        assert claim.x is not None
        tests = []
        for a, b in pairs:
            found = _paired(numbers, place, a, place, b)
            printed = _printed(numbers, place, a, place, b)
            for side in (1, -1):
                tests.append(
                    _Test(
                        (found.scaled(side, claim.x),),
                        (None if printed is None else claim.x + side * printed,),
                    )
                )
        return tests

    made = {}
    for a, b in pairs:
        if claim.test == "above":
            found = _paired(numbers, place, a, place, b).scaled(sign, -claim.by)
            printed = _printed(numbers, place, a, place, b)
            made[a, b] = found, None if printed is None else sign * printed - claim.by
        else:
            made[a, b] = _sooner(claim, numbers, place, a, b, table.higher_is_better), None

    if claim.any_of == "a":
        sets = [[made[a, b] for a in claim.a] for b in claim.b]
    elif claim.any_of == "b":
        sets = [[made[a, b] for b in claim.b] for a in claim.a]
    else:
        sets = [[one] for one in made.values()]

    return [_Test(tuple(d for d, _ in one), tuple(p for _, p in one)) for one in sets]


def _beyond(claim: Claim, numbers: Numbers, place: RowKey, a: str, sign: float) -> _Test:
    """Return a test of whether column a is better than the number `claim.than`.

    The column must be better by more than `claim.by`.
    """
    assert claim.than is not None
    printed = numbers.printed.get((place, a))
    values = numbers.ours.get((place, a), {})
    pairs = _Pairs.of({seed: (value, claim.than) for seed, value in values.items()})
    return _Test(
        (pairs.scaled(sign, -claim.by),),
        (None if printed is None else sign * (printed - claim.than) - claim.by,),
    )


def _trend(claim: Claim, group: RowGroup, numbers: Numbers, sign: float) -> list[_Test]:
    """Return one test for every column and every step along the claim's condition.

    A step leads from one row of the group to the next row.
    """
    way = sign if claim.direction == "up" else -sign
    tests = []
    for a in claim.a:
        for before, after in zip(group.places, group.places[1:], strict=False):
            found = _paired(numbers, after, a, before, a).scaled(way, claim.slack)
            printed = _printed(numbers, after, a, before, a)
            tests.append(
                _Test((found,), (None if printed is None else way * printed + claim.slack,))
            )
    return tests


def _paired(numbers: Numbers, place: RowKey, a: str, other: RowKey, b: str) -> _Pairs:
    """Return column a in row `place` minus column b in row `other`.

    There is one pair for every split seed for which both cells have a number.
    """
    left, right = numbers.ours.get((place, a), {}), numbers.ours.get((other, b), {})
    found = _Pairs.of({seed: (left[seed], right[seed]) for seed in left if seed in right})
    return replace(found, are_apart=bool(left and right and not left.keys() & right.keys()))


def _printed(numbers: Numbers, place: RowKey, a: str, other: RowKey, b: str) -> float | None:
    """Return the difference of the paper's numbers, None if it is not known."""
    left, right = numbers.printed.get((place, a)), numbers.printed.get((other, b))
    if left is None or right is None or _is_censored(left, right):
        return None
    return left - right


def _sooner(
    claim: Claim, numbers: Numbers, place: RowKey, a: str, b: str, higher_is_better: bool
) -> _Pairs:
    """Return by how much column a reaches the target earlier than column b.

    The unit is iterations or rounds. There is one pair for every split seed. A target
    that is never reached counts as infinitely late.
    """
    assert claim.curve is not None and claim.target is not None
    split_seeds = [
        split_seed
        for where, column, split_seed, curve in numbers.curves
        if (where, column, curve) == (place, a, claim.curve)
    ]
    found = {}
    for split_seed in dict.fromkeys(split_seeds):
        first, second = (
            numbers.curves.get((place, column, split_seed, claim.curve)) for column in (a, b)
        )
        if first and second:
            target = _target(claim.target, first[-1][1], second[-1][1], higher_is_better)
            found[split_seed] = (
                _reached(second, target, higher_is_better),
                _reached(first, target, higher_is_better),
            )

    drawn = {
        column
        for where, column, _, curve in numbers.curves
        if (where, curve) == (place, claim.curve)
    }
    lacks_curve = any(numbers.ours.get((place, name)) and name not in drawn for name in (a, b))
    are_apart = {a, b} <= drawn and not found
    return replace(_Pairs.of(found), lacks_curve=lacks_curve, are_apart=are_apart)


def _target(target: Target, a: float, b: float, higher_is_better: bool) -> float:
    if target.value is not None:
        return target.value
    assert target.share is not None
    worse = min if higher_is_better else max
    final = {"lower_final": worse(a, b), "a_final": a, "b_final": b}[target.of]
    return (
        math.nan
        if math.isnan(a + b)
        else final * target.share
        if higher_is_better
        else final / target.share
    )


def _reached(curve: Curve, target: float, higher_is_better: bool) -> float:
    """Return the first x at which the curve reaches the target, infinity if none does.

    The result is NaN if the target is NaN, which happens if a run diverged.
    """
    if math.isnan(target):
        return math.nan
    return next(
        (x for x, y in curve if (y >= target if higher_is_better else y <= target)), math.inf
    )


# --- decisions


def _levels(claim: Claim, rows: int) -> tuple[float, float]:
    """Return the significance levels at which a row is decided as yes and as no.

    Of the claim's `rows` rows, `needed` rows must fit the claim. The claim is supported
    if at least `needed` rows are yes. It is contradicted if more than ``rows - needed``
    rows are no. `LEVEL` is divided by the number of rows in which one error could
    decide the claim wrongly (Bonferroni):

    - Level of yes: If the claim is false, at most ``needed - 1`` rows are truly yes,
      and at least ``rows - needed + 1`` rows are not. One wrong yes among the latter
      could support the claim. The level of yes is ``LEVEL / (rows - needed + 1)``.
    - Level of no: If the claim is true, at least `needed` rows are truly yes. One wrong
      no among these rows could contradict the claim. The level of no is
      ``LEVEL / needed``.

    For example, if the claim needs all rows, the level of no is divided by their
    number. If it needs one row, the level of yes is divided by the number of rows.
    For "most", no level is divided: each row is decided at `LEVEL`.
    """
    needed = _needed(claim, rows)
    if claim.rows == "most" or not 0 < needed <= rows:
        return LEVEL, LEVEL
    return LEVEL / (rows - needed + 1), LEVEL / needed


def _needed(claim: Claim, rows: int) -> int:
    if isinstance(claim.rows, int):
        return claim.rows
    return rows if claim.rows == "all" else rows // 2 + 1


def decide(
    differences: Sequence[float],
    yes_level: float = LEVEL,
    no_level: float = LEVEL,
    tolerance: float = 0.0,
) -> RowState:
    """Decide whether the mean of paired differences is above 0.

    The answer is yes or no if a one-sided bound of Student's t shows it, and undecided
    otherwise. Special cases:

    - Fewer than two differences, or a difference that is NaN because a run diverged:
      the answer is undecided.
    - An infinite difference, or differences that vary by at most `tolerance`: a sign
      test replaces the t test. At the level of 5 %, it needs at least five pairs.

    Args:
        differences: The paired differences.
        yes_level: Significance level of the bound for yes.
        no_level: Significance level of the bound for no.
        tolerance: Largest number that differs from 0 only by rounding.
    """
    n = len(differences)
    if n < 2 or any(map(math.isnan, differences)):
        return "undecided"

    are_equal = max(differences) - min(differences) <= tolerance
    if are_equal or any(map(math.isinf, differences)):
        above = sum(d > tolerance for d in differences)
        if float(binom.sf(above - 1, n, 0.5)) <= yes_level:
            return "yes"
        return "no" if float(binom.cdf(above, n, 0.5)) <= no_level else "undecided"

    mean = statistics.mean(differences)
    se = statistics.stdev(differences) / math.sqrt(n)
    if mean - float(t.ppf(1 - yes_level, n - 1)) * se > 0:
        return "yes"
    return "no" if mean + float(t.ppf(1 - no_level, n - 1)) * se <= 0 else "undecided"


def _claim_row(
    group: RowGroup, tests: Sequence[_Test], levels: tuple[float, float]
) -> tuple[ClaimRow, int]:
    """Decide a claim in one row, and count the pairs that were left out of it.

    All tests must hold. A test holds if one of its alternatives holds. A single
    alternative can make its test hold, so the level of yes is divided by the number of
    alternatives. A single test can make the row no, so the level of no is divided by
    the number of tests.

    Args:
        group: The row, or the rows of a trend.
        tests: Tests of the claim in this row.
        levels: Significance levels of the row: (yes, no).
    """
    yes_level, no_level = levels
    states: list[RowState] = []
    for test in tests:
        single = [
            decide(
                pairs.differences,
                yes_level / len(test.alternatives),
                no_level / len(tests),
                pairs.tolerance,
            )
            for pairs in test.alternatives
        ]
        states.append("yes" if "yes" in single else "no" if set(single) == {"no"} else "undecided")

    state: RowState = "no" if "no" in states else "yes" if set(states) == {"yes"} else "undecided"
    best = (max(test.alternatives, key=_order) for test in tests)
    worst = min(best, key=_order, default=_Pairs({}))
    found = worst.differences
    estimate = _middle(found) if found else None

    # A pair is in favour only if all tests hold for its seed, not only the worst one.
    in_favour = sum(
        all(any(pairs.is_above(seed) for pairs in test.alternatives) for test in tests)
        for seed in worst.by_seed
    )

    row = ClaimRow(
        group.conditions,
        state,
        estimate,
        len(found),
        in_favour,
        _in_print(tests),
        worst.why_empty,
    )
    return row, worst.censored


def _middle(differences: Sequence[float]) -> float:
    """Return the mean of differences, or their lower median if one is infinite.

    If a difference is NaN, the result is NaN.
    """
    endless = any(map(math.isinf, differences)) and not any(map(math.isnan, differences))
    return statistics.median_low(differences) if endless else statistics.mean(differences)


def _order(pairs: _Pairs) -> tuple[int, float]:
    """Return a sort key for paired differences, the worst first.

    The order is: no differences, NaN, then the others by ascending `_middle`.
    """
    if not pairs.differences:
        return 0, 0.0
    middle = _middle(pairs.differences)
    return (1, 0.0) if math.isnan(middle) else (2, middle)


def _in_print(tests: Sequence[_Test]) -> bool | None:
    """Return whether the paper's numbers pass the tests, None if too few exist."""
    known = [_any(test.printed) for test in tests]
    return None if not known or None in known else all(known)


def _any(printed: Sequence[float | None]) -> bool | None:
    known = [d > 0 for d in printed if d is not None]
    return any(known) if len(known) == len(printed) or any(known) else None


def _outcome(claim: Claim, decisions: Sequence[_Decision]) -> tuple[RowState, str]:
    """Return whether the rows support a claim, and the reason."""
    rows = [decision.row for decision in decisions]
    counts = Counter(row.state for row in rows)
    shown = (
        f"{counts['yes']} of {len(rows)} rows yes, {counts['no']} no, "
        f"{counts['undecided']} undecided"
    )
    if not rows:
        return "undecided", "it is not about any row of this variant"
    needed = _needed(claim, len(rows))
    if needed > len(rows):
        return "undecided", f"it needs {needed} rows, and there are {len(rows)}"

    censored = _counted([decision.censored for decision in decisions])
    if lacking := _counted([decision.lacking for decision in decisions]):
        return "undecided", ", ".join([*lacking, *censored]) + _in_favour(decisions)

    shown = "; ".join([shown, *censored])
    if counts["yes"] >= needed:
        return "yes", shown
    return ("no" if counts["no"] > len(rows) - needed else "undecided"), shown


def _counted(reasons: Sequence[str]) -> list[str]:
    """Return each reason with the number of its rows, the missing runs first."""
    counts = Counter(filter(None, reasons))
    ordered = sorted(counts, key=lambda reason: (reason != _ABSENT, reason == _SINGLE, reason))
    return [reason.replace(_ROWS, f"{counts[reason]} of {len(reasons)} rows") for reason in ordered]


def _in_favour(decisions: Sequence[_Decision]) -> str:
    """Return a text with the number of pairs that are in favour of the claim.

    A pair that was left out is not in favour.
    """
    pairs = sum(decision.row.n + decision.num_censored for decision in decisions)
    in_favour = sum(decision.row.in_favour for decision in decisions)
    return f"; {in_favour} of {pairs} pairs in favour" if pairs else ""


def _printed_state(claim: Claim, rows: Sequence[bool | None]) -> tuple[str, bool]:
    """Count the rows in which the paper's own numbers fit the claim.

    The rows are those of the full variant, even if our runs are of a smaller variant.

    Returns:
        The count as text (empty if the paper prints too few numbers), and whether the
        paper's own numbers contradict the claim. They do if too few rows can fit. A row
        without printed numbers can fit.
    """
    known = [fitting for fitting in rows if fitting is not None]
    if not known:
        return "", False
    possible = sum(known) + len(rows) - len(known)
    return f"{sum(known)} of {len(known)} rows", possible < _needed(claim, len(rows))
