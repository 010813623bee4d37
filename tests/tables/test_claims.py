"""Tests of claims.

They cover each kind of test, rows, alternatives, levels, missing runs, and the numbers
that the paper prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedexp.core.build import build
from fedexp.tables.claims import Curve, decide, decide_claims
from fedexp.tables.report.report import Cell, ClaimResult, Variant
from fedexp.tables.report.texts import claim_row
from fedexp.tables.schema import Table

# One number per seed, by row and column.
Runs = Mapping[tuple[int, str], Sequence[float]]

# Differences of seeds 0, 1 and 2 that are far above 0.
FAR = [5.0, 5.1, 4.9]
NULL = [0.0, 0.0, 0.0]


def result(
    claim: dict[str, Any],
    runs: Runs,
    *,
    variant: Variant = "full",
    printed: Mapping[tuple[int, str], float] | None = None,
    curves: Mapping[tuple[int, str], Sequence[Curve]] | None = None,
    higher: bool = True,
    objection: str = "",
    descending: bool = False,
    changes: Mapping[str, Any] | None = None,
    at_chance: Mapping[tuple[int, str], tuple[bool, ...]] | None = None,
    first_seed: Mapping[str, int] | None = None,
) -> ClaimResult:
    """Return the result of a claim about a made-up table.

    The table has a row for each `x`, the columns a, b, c and d, and a column that reads
    the runs of a. The column d has the rows 1 and 2 only. The seeds of a column are 0,
    1, ... unless `first_seed` names another first one.
    """
    first = first_seed or {}
    rows = sorted({row for row, _ in {**runs, **(curves or {}), **(printed or {})}})
    rows = rows[::-1] if descending else rows
    node = {
        "title": "t", "paper": "p", "source": "s", "metric": "m", "unit": "u", "higher_is_better": higher, "keys": ["x", "y"],
        "methods": [
            *({"key": name, "label": name, "overrides": []} for name in "abc"),
            {"key": "d", "label": "d", "overrides": [], "where": {"x": [1, 2]}},
            {"key": "ours", "label": "ours", "overrides": [], "role": "ours", "reads": "a"},
        ],
        "conditions": {"x": [], "y": []},
        "grids": [{"x": row, "y": -row} for row in rows],
        "seeds": [0], "smoke": {"what": "w"}, "reduced": {"what": "w"},
        "reference": [{"x": x, "y": -x, "method": m, "value": v} for (x, m), v in (printed or {}).items()],
        "claims": [{"id": "c", "where": "text", "says": "s", "test": "above", "a": ["a"], "b": ["b"]} | claim],
        **(changes or {}),
    }  # fmt: skip
    table = build(Table, node, "")
    cells = [
        Cell(
            {"x": x, "y": -x},
            m,
            None,
            None,
            tuple(v),
            tuple(range(len(v))),
            "reproduced",
            split_seeds=tuple(f"seed={i}" for i, _ in enumerate(v, first.get(m, 0))),
            did_not_learn=(at_chance or {}).get((x, m), ()),
        )
        for (x, m), v in runs.items()
    ]
    drawn = {
        ((x, -x), m, f"seed={i}", "acc"): c
        for (x, m), own in (curves or {}).items()
        for i, c in enumerate(own, first.get(m, 0))
    }
    (found,) = decide_claims(table, variant, cells, drawn, objection)
    return found


def pairs(*rows: Sequence[float], base: float = 50.0) -> dict[tuple[int, str], list[float]]:
    """Return runs in which column a exceeds b by these differences, one list per row.

    The seeds differ much, as runs on different splits do.
    """
    made: dict[tuple[int, str], list[float]] = {}
    for x, differences in enumerate(rows, 1):
        made[x, "b"] = [base + 10 * seed for seed in range(len(differences))]
        made[x, "a"] = [b + d for b, d in zip(made[x, "b"], differences, strict=True)]
    return made


# --- a row


@pytest.mark.parametrize(("higher", "than", "state"), [
    (True, 49, "supported"), (True, 56, "contradicted"), (False, 56, "supported"), (False, 49, "contradicted"), (True, 52, "undecided"),
])  # fmt: skip
def test_a_column_may_be_held_against_a_number(higher: bool, than: float, state: str) -> None:
    runs = {(1, "a"): [51.0, 52.0, 53.0]}
    found = result({"b": [], "than": than}, runs, higher=higher, printed={(1, "a"): 50.0})
    assert found.state == state and found.contradicted_in_print == (
        not (than < 50 if higher else than > 50)
    )


def test_a_row_is_yes_or_no_by_students_one_sided_test() -> None:
    numbers, found = np.random.default_rng(0), set()
    for n in (2, 3, 5, 8):
        for mean in (-6.0, -2.0, -0.7, 0.0, 0.7, 2.0, 6.0):
            for level in (0.05, 0.01):
                d = list(mean + numbers.standard_normal(n))
                above = stats.ttest_1samp(d, 0.0, alternative="greater").pvalue < level
                below = stats.ttest_1samp(d, 0.0, alternative="less").pvalue <= level
                expected = "yes" if above else "no" if below else "undecided"
                assert decide(d, level, level) == expected
                assert (decide(d, level, 0.0) == "yes") == above and (
                    decide(d, 0.0, level) == "no"
                ) == below
                found.add(expected)
    assert found == {"yes", "no", "undecided"}


def test_infinite_differences_are_compared_by_sign() -> None:
    for n in range(2, 12):
        for above in range(n + 1):
            d = [math.inf] * above + [-math.inf] * (n - above)
            yes = stats.binomtest(above, n, 0.5, "greater").pvalue <= 0.05
            no = stats.binomtest(above, n, 0.5, "less").pvalue <= 0.05
            assert decide(d) == ("yes" if yes else "no" if no else "undecided")
    assert (
        decide([math.inf, 0.0, 0.0, 0.0, 0.0]) == "undecided"
        and decide([-math.inf, 0.0, 0.0, 0.0, 0.0]) == "no"
    )


@pytest.mark.parametrize(("differences", "state"), [
    ([], "undecided"), ([9.0], "undecided"), ([9.0, math.nan], "undecided"),
    ([2.0] * 4, "undecided"), ([0.0] * 4, "undecided"), ([-2.0] * 4, "undecided"),
    ([2.0] * 5, "yes"), ([0.0] * 5, "no"), ([-2.0] * 5, "no"),
])  # fmt: skip
def test_one_seed_decides_nothing_and_equal_differences_by_their_sign(
    differences: list[float], state: str
) -> None:
    assert decide(differences) == state


def test_equal_differences_keep_the_level() -> None:
    for n in range(2, 12):
        for level in (0.05, 0.05 / 6, 0.05 / 12):
            is_decided = 0.5**n <= level
            assert decide([2.0] * n, level, 0.0) == ("yes" if is_decided else "undecided")
            assert decide([-2.0] * n, 0.0, level) == ("no" if is_decided else "undecided")


@pytest.mark.parametrize("higher", [True, False])
def test_differences_that_are_equal_up_to_rounding_are_equal(higher: bool) -> None:
    sign = 1 if higher else -1
    b = [0.7, 3.1, 20.3, 70.7, 90.2]
    runs = {(1, "a"): [sign * (value + 0.3) for value in b], (1, "b"): [sign * v for v in b]}
    assert len({a - b for a, b in zip(*runs.values(), strict=True)}) > 1
    three = {key: values[:3] for key, values in runs.items()}
    assert result({}, three, higher=higher).state == "undecided"
    assert result({}, runs, higher=higher).state == "supported"
    # The difference is not larger than 0.3.
    found = result({"by": 0.3}, runs, higher=higher)
    assert (found.state, found.rows[0].in_favour) == ("contradicted", 0)


# --- tests


@pytest.mark.parametrize(("claim", "differences", "state"), [
    ({}, FAR, "supported"), ({}, NULL, "undecided"), ({}, [-5.0, -5.1, -4.9], "contradicted"), ({}, [5.0, -5.0, 1.0], "undecided"),
    ({"by": 4}, FAR, "supported"), ({"by": 6}, FAR, "contradicted"), ({"by": -6}, [-5.0, -5.1, -4.9], "supported"), ({"by": 5}, FAR, "undecided"),
    ({"test": "within", "x": 6}, FAR, "supported"), ({"test": "within", "x": 6}, [-5.0, -5.1, -4.9], "supported"),
    ({"test": "within", "x": 4}, FAR, "contradicted"), ({"test": "within", "x": 4}, [-5.0, -5.1, -4.9], "contradicted"),
    ({"test": "within", "x": 5}, FAR, "undecided"), ({"test": "within", "x": 6}, [12.0, -12.0, 0.0], "undecided"),
    ({"test": "within", "x": 1}, [0.1, -0.1, 0.0], "supported"), ({"test": "within", "x": 1}, NULL, "undecided"),
])  # fmt: skip
def test_above_and_within_are_of_differences_paired_by_seed(
    claim: dict[str, Any], differences: list[float], state: str
) -> None:
    found = result(claim, pairs(differences))
    assert found.state == state and found.rows[0].n == 3
    turned = {key: [-v for v in values] for key, values in pairs(differences).items()}
    # Lower values are better here.
    assert result(claim, turned, higher=False).state == state


def test_within_holds_where_two_one_sided_tests_do() -> None:
    for spread in (0.1, 0.6, 1.5):
        d = [2.0 + spread, 2.0 - spread, 2.0, 2.0]
        p = [
            stats.ttest_1samp(d, edge, alternative=side).pvalue
            for edge, side in ((-3, "greater"), (3, "less"))
        ]
        assert (result({"test": "within", "x": 3}, pairs(d)).state == "supported") == (
            max(p) < 0.05
        )


def test_pairs_are_of_common_seeds_alone() -> None:
    runs = pairs(FAR)
    runs[1, "b"] = runs[1, "b"][:2]
    found = result({}, runs)
    assert found.rows[0].n == 2 and found.rows[0].estimate == pytest.approx(5.05)


@pytest.mark.parametrize(("claim", "values", "state"), [
    ({}, [1, 5, 9], "supported"), ({}, [1, 5, 3], "contradicted"), ({"direction": "down"}, [9, 5, 1], "supported"),
    ({"direction": "down"}, [1, 5, 9], "contradicted"), ({"slack": 3}, [1, 5, 3], "supported"), ({"slack": 1}, [1, 5, 3], "contradicted"),
    ({"slack": -3}, [1, 5, 9], "supported"), ({"slack": -5}, [1, 5, 9], "contradicted"), ({}, [5, 5, 9], "undecided"),
    ({"only": {"x": [1, 3]}}, [1, 5, 3], "supported"),
])  # fmt: skip
@pytest.mark.parametrize("higher", [True, False])
def test_a_trend_is_of_every_step(
    claim: dict[str, Any], values: list[float], state: str, higher: bool
) -> None:
    """The trend is along x, and y changes with x."""
    sign = 1 if higher else -1
    # The noise of the seeds is almost the same in all rows.
    noise = [0.0, 10.01, 19.98]
    runs = {
        (x, "a"): [sign * (v + e + 0.01 * x * i) for i, e in enumerate(noise)]
        for x, v in enumerate(values, 1)
    }
    trend = {"test": "trend", "b": [], "along": ["x", "y"]} | claim
    found = result(trend, runs, higher=higher, descending=True)
    assert (found.state, len(found.rows), found.rows[0].conditions) == (state, 1, {})


def test_a_trend_without_a_second_row_says_nothing() -> None:
    # The rows differ in y, too, so no group of rows has a second step.
    found = result({"test": "trend", "b": [], "along": "x"}, pairs(FAR, FAR))
    assert (found.state, found.rows) == ("undecided", ())


SLOW, FAST, NEVER = (
    [(0.0, 0.0), (10.0, 50.0), (20.0, 90.0)],
    [(0.0, 0.0), (5.0, 90.0), (9.0, 91.0)],
    [(0.0, 0.0), (20.0, 10.0)],
)
SOONER = {"test": "sooner", "curve": "acc", "target": {"share": 0.9}}


@pytest.mark.parametrize(("target", "a", "b", "state", "estimate"), [
    ({"share": 0.9}, FAST, SLOW, "supported", 15.0), ({"share": 0.9}, SLOW, FAST, "contradicted", -15.0),
    ({"share": 0.5}, FAST, SLOW, "supported", 5.0), ({"share": 0.9}, SLOW, SLOW, "contradicted", 0.0),
    ({"value": 60}, FAST, NEVER, "supported", math.inf), ({"value": 60}, NEVER, SLOW, "contradicted", -math.inf),
    ({"share": 1.0, "of": "a_final"}, FAST, SLOW, "supported", math.inf),
    ({"share": 1.0, "of": "b_final"}, FAST, SLOW, "supported", 15.0),
    ({"share": 1.0, "of": "b_final"}, NEVER, SLOW, "contradicted", -math.inf),
    ({"share": 0.9}, [(0.0, 1.0), (1.0, math.nan)], SLOW, "undecided", None),
    ({"share": 0.9}, SLOW, [(0.0, 1.0), (1.0, math.nan)], "undecided", None),
])  # fmt: skip
def test_sooner_is_of_where_the_target_is_first_reached(
    target: dict[str, Any], a: Curve, b: Curve, state: str, estimate: float | None
) -> None:
    found = result(SOONER | {"target": target}, {}, curves={(1, "a"): [a] * 5, (1, "b"): [b] * 5})
    assert found.state == state and found.rows[0].n == 5
    assert (
        math.isnan(found.rows[0].estimate or 0)
        if estimate is None
        else found.rows[0].estimate == estimate
    )
    assert (
        result(SOONER | {"target": target}, {}, curves={(1, "a"): [a], (1, "b"): [b]}).state
        == "undecided"
    )  # Each column has only one seed.


def test_sooner_of_a_loss_is_of_the_worse_final_divided_by_the_share() -> None:
    fast, slow = [(0.0, 9.0), (3.0, 2.2), (9.0, 1.0)], [(0.0, 9.0), (8.0, 2.1), (9.0, 2.0)]
    found = result(SOONER, {}, curves={(1, "a"): [fast] * 5, (1, "b"): [slow] * 5}, higher=False)
    assert found.state == "supported" and found.rows[0].estimate == 5.0
    assert (
        result(SOONER, {}, curves={(1, "a"): [slow] * 5, (1, "b"): [fast] * 5}, higher=False).state
        == "contradicted"
    )


def test_never_on_either_side_has_an_estimate_by_sign() -> None:
    curves = {(1, "a"): [FAST, NEVER, FAST], (1, "b"): [NEVER, FAST, NEVER]}
    (row,) = result(SOONER | {"target": {"value": 60}}, {}, curves=curves).rows
    assert (row.state, row.estimate, row.in_favour) == ("undecided", math.inf, 2)


def test_pairs_that_both_miss_the_target_are_left_out() -> None:
    value = {"target": {"value": 60}}
    found = result(SOONER | value, {}, curves={(1, "a"): [NEVER] * 5, (1, "b"): [NEVER] * 5})
    assert found.state == "undecided" and found.rows[0].n == 0
    assert "no run reaches the target in 1 of 1 rows" in found.reason

    curves = {(1, "a"): [FAST] * 5 + [NEVER] * 2, (1, "b"): [SLOW] * 5 + [NEVER] * 2}
    found = result(SOONER | value, {}, curves=curves)
    assert found.state == "supported" and found.rows[0].n == 5

    # The row that is left out does not keep the other rows from deciding the claim.
    curves = {
        (x, name): [curve if x < 3 else NEVER] * 5
        for x in (1, 2, 3)
        for name, curve in (("a", FAST), ("b", SLOW))
    }
    found = result(SOONER | value | {"rows": "most"}, {}, curves=curves)
    assert found.state == "supported"
    assert found.reason.endswith("no run reaches the target in 1 of 3 rows")


@pytest.mark.parametrize(("path", "reason"), [
    ("rounds_to.0.50", "no run reaches the target"), ("headline.value", "no pair has a finite number"),
])  # fmt: skip
def test_two_infinite_values_are_not_compared(path: str, reason: str) -> None:
    changes = {"headline": {"value": path}}
    never, printed = [math.inf] * 3, {(1, "a"): math.inf, (1, "b"): math.inf}
    found = result(
        {}, {(1, "a"): never, (1, "b"): never}, changes=changes, higher=False, printed=printed
    )
    assert found.state == "undecided" and f"{reason} in 1 of 1 rows" in found.reason
    assert found.printed == ""


def test_runs_without_the_curve_of_a_claim_are_named() -> None:
    found = result(SOONER | {"curve": "ac"}, pairs(FAR), curves={(1, "a"): [FAST] * 3})
    assert found.state == "undecided"
    assert found.reason.startswith("the runs have no curve ac in 1 of 1 rows")


def test_a_row_without_pairs_names_the_reason() -> None:
    never = {(1, "a"): [math.inf] * 3, (1, "b"): [math.inf] * 3}
    curves = {(1, "a"): [FAST] * 3, (1, "b"): [SLOW] * 3}
    for expected, found in {
        "a column has no runs": result({}, {(1, "a"): FAR}),
        "no pairs to compare": result({}, never),
        "no common seeds": result({}, pairs(FAR), first_seed={"b": 3}),
    }.items():
        assert claim_row(found.rows[0]) == f"x 1, y -1: undecided, {expected}"

    found = result({}, pairs(FAR, FAR), first_seed={"b": 3})
    assert found.reason == "no common seeds in 2 of 2 rows"
    found = result({"b": ["b", "c"]}, pairs(FAR), first_seed={"b": 3})
    assert found.reason == "1 of 1 rows lack runs of a column"

    found = result(SOONER, pairs(FAR), curves=curves, first_seed={"b": 3})
    assert found.reason == "no common seeds in 1 of 1 rows"
    assert claim_row(found.rows[0]) == "x 1, y -1: undecided, no common seeds"
    found = result(SOONER, {(1, "a"): FAR}, curves={(1, "a"): curves[1, "a"]})
    assert claim_row(found.rows[0]) == "x 1, y -1: undecided, a column has no runs"
    found = result(SOONER | {"curve": "ac"}, pairs(FAR), curves=curves)
    assert claim_row(found.rows[0]) == "x 1, y -1: undecided, no pairs to compare"


# --- alternatives, rows, levels


def test_lists_mean_all_of_them_unless_one_will_do() -> None:
    runs = pairs(FAR) | {(1, "c"): [90.0, 91.0, 92.0]}  # Column c is above a and b.
    assert result({"a": ["a", "c"]}, runs).state == "supported"
    assert result({"b": ["b", "c"]}, runs).state == "contradicted"
    assert result({"b": ["b", "c"], "any_of": "b"}, runs).state == "supported"
    assert result({"a": ["b", "c"], "b": ["a"]}, runs).state == "contradicted"
    assert result({"a": ["b", "c"], "b": ["a"], "any_of": "a"}, runs).state == "supported"
    assert result({"a": ["a", "b"], "b": ["c"], "any_of": "a"}, runs).state == "contradicted"


def _at(p: float, n: int = 4) -> list[float]:
    """Return differences whose one-sided p value is `p`."""
    noise = np.array([-1.5, -0.5, 0.5, 1.5])[:n]
    return list(noise + float(stats.t.ppf(1 - p, n - 1)) * noise.std(ddof=1) / math.sqrt(n))


@pytest.mark.parametrize(("p", "state"), [(0.024, "supported"), (0.026, "undecided")])
def test_of_two_alternatives_either_has_half_the_level(p: float, state: str) -> None:
    runs = pairs(_at(p)) | {(1, "c"): [-200.0, 300.0, -100.0, 400.0]}
    assert result({"a": ["a", "c"], "any_of": "a"}, runs).state == state
    assert result({}, runs).state == "supported"


@pytest.mark.parametrize(("rows", "p", "state"), [
    ("all", [0.049, 0.049, 0.049], "supported"), ("all", [0.049, 0.049, 0.051], "undecided"),
    ("all", [0.049, 0.049, 1 - 0.016], "contradicted"), ("all", [0.049, 0.049, 1 - 0.018], "undecided"),
    ("most", [0.049, 0.049, 0.5], "supported"), ("most", [0.049, 0.051, 0.5], "undecided"),
    ("most", [0.5, 0.951, 0.951], "contradicted"), ("most", [0.5, 0.949, 0.951], "undecided"),
    ("most", [0.001, 0.001, 0.951, 0.951], "contradicted"), ("most", [0.001, 0.001, 0.5, 0.5], "undecided"),
    (1, [0.016, 0.9, 0.9], "supported"), (1, [0.018, 0.9, 0.9], "undecided"), (1, [0.951, 0.951, 0.951], "contradicted"),
    (1, [0.949, 0.951, 0.951], "undecided"), (2, [0.024, 0.024, 0.9], "supported"), (2, [0.024, 0.026, 0.9], "undecided"),
    (2, [0.001, 0.976, 0.976], "contradicted"), (2, [0.001, 0.974, 0.976], "undecided"), (4, [0.001, 0.001, 0.001], "undecided"),
])  # fmt: skip
def test_rows_decide_by_their_number_and_share_the_level(
    rows: Any, p: list[float], state: str
) -> None:
    """A claim must hold in all rows, in most rows, or in a number of rows.

    The level is divided among those rows that could decide the claim alone
    (Bonferroni).
    """
    found = result({"rows": rows}, pairs(*map(_at, p)))
    assert found.state == state and found.needed == str(rows)


def test_both_sides_of_within_share_the_level_of_no() -> None:
    for p, state in ((0.024, "contradicted"), (0.026, "undecided")):
        assert result({"test": "within", "x": 1}, pairs([d + 1 for d in _at(p)])).state == state


def test_a_pair_is_in_favour_if_all_tests_hold_for_its_seed() -> None:
    # Only seed 2 is within 1 on both sides.
    (row,) = result({"test": "within", "x": 1}, pairs([2.0, -3.0, 0.5])).rows
    assert (row.n, row.in_favour) == (3, 1)
    # The order of the seeds differs between the columns.
    runs = {(1, "a"): [5.0, 5.0, 5.0], (1, "b"): [1.0, 1.0, 9.0], (1, "c"): [9.0, 1.0, 1.0, 1.0]}
    (row,) = result({"b": ["b", "c"]}, runs, first_seed={"c": -1}).rows
    assert (row.n, row.in_favour) == (3, 2)
    # Each seed has an alternative that holds, except seed 2.
    runs = {(1, "a"): NULL, (1, "b"): [-5.0, 1.0, 1.0], (1, "c"): [1.0, -6.0, 1.0]}
    (row,) = result({"b": ["b", "c"], "any_of": "b"}, runs).rows
    assert (row.n, row.in_favour) == (3, 2)


def test_only_and_columns_that_some_rows_lack_restrict_the_rows() -> None:
    runs = pairs(FAR, FAR, [-5.0, -5.1, -4.9])
    assert (
        result({}, runs).state == "contradicted"
        and result({"only": {"x": [1, 2]}}, runs).state == "supported"
    )
    runs |= {(1, "d"): NULL, (2, "d"): NULL}
    found = result({"b": ["b", "d"]}, runs)
    assert found.state == "supported" and [row.conditions["x"] for row in found.rows] == [1, 2]


# --- what decides nothing


def test_missing_rows_and_single_seeds_leave_it_open_with_signs() -> None:
    runs = pairs(FAR, [5.0], [-1.0, -1.0])
    del runs[3, "b"]
    found = result({}, runs)
    assert found.state == "undecided"
    assert found.reason == (
        "1 of 3 rows lack runs of a column, 1 of 3 rows with one seed; 4 of 4 pairs in favour"
    )
    assert [(row.n, row.in_favour) for row in found.rows] == [
        (3, 3),
        (1, 1),
        (0, 0),
    ] and found.rows[2].estimate is None
    # Column c has no runs.
    assert result({"a": ["a", "c"]}, pairs(FAR)).state == "undecided"
    assert result({"only": {"x": 9}}, runs).reason == "it is not about any row of this variant"


def test_smoke_runs_decide_nothing() -> None:
    found = result({}, pairs(FAR), variant="smoke")
    reason = "a smoke run only shows that the pipeline works; 3 of 3 pairs in favour"
    assert (found.state, found.reason) == ("undecided", reason)
    # Partial runs can decide this claim, because it is only about rows that were run.
    assert result({}, pairs(FAR), variant="partial").state == "supported"


@pytest.mark.parametrize(("differences", "state"), [
    (FAR, "supported in reduced form"), ([-5.0, -5.1, -4.9], "not supported in reduced form"),
    ([5.0, -5.0, 1.0], "undecided"), ([5.0], "undecided"),
])  # fmt: skip
def test_reduced_runs_are_judged_by_the_same_tests(differences: list[float], state: str) -> None:
    found = result({}, pairs(differences), variant="reduced")
    assert (found.state, found.scope) == (state, "reduced form: w")


@pytest.mark.parametrize(("claim", "reason"), [
    ({"by": 1}, "amount"), ({"test": "within", "x": 6}, "amount"),
    ({"b": [], "than": 40}, "amount"),
    ({"test": "trend", "b": [], "along": ["x", "y"], "slack": -1}, "amount"),
])  # fmt: skip
def test_amounts_need_the_papers_settings(claim: dict[str, Any], reason: str) -> None:
    runs = pairs(FAR, [25.0, 25.2, 24.9])
    assert result(claim, runs, variant="full").state != "undecided"
    found = result(claim, runs, variant="reduced")
    assert found.state == "undecided" and reason in found.reason
    assert "pairs in favour" in found.reason


def test_costs_and_targets_need_the_papers_settings() -> None:
    runs = pairs(FAR)
    for path in ("seconds.aggregate", "rounds_to.0.5"):
        found = result({}, runs, variant="reduced", changes={"headline": {"value": path}})
        assert found.state == "undecided" and "a cost" in found.reason
    curves = {(1, "a"): [FAST] * 3, (1, "b"): [SLOW] * 3}
    found = result({**SOONER, "target": {"share": 0.9}}, {}, variant="reduced", curves=curves)
    assert found.state == "undecided" and "target" in found.reason


def test_a_reduced_form_must_have_all_rows_of_a_claim() -> None:
    runs = {**pairs(FAR, FAR), (1, "d"): [90.0, 91.0, 92.0], (2, "d"): [90.0, 91.0, 92.0]}
    part = {"reduced": {"what": "w", "grids": [{"x": 1, "y": -1}]}}
    trend = {"test": "trend", "b": [], "along": ["x", "y"]}
    # A trend has one group of rows. The reduced form has no second step.
    for claim, lacking in (({}, 1), ({"only": {"x": [1, 2]}}, 1), ({"a": ["d"]}, 1), (trend, 2)):
        found = result(claim, runs, variant="reduced", changes=part)
        assert found.state == "undecided"
        assert f"the reduced form lacks {lacking} of 2 rows of the claim" in found.reason
    one = result({"only": {"x": 1}}, runs, variant="reduced", changes=part)
    assert one.state == "supported in reduced form"
    # Only the reduced form has this row.
    other = {"reduced": {"what": "w", "grids": [{"x": 3, "y": -3}]}, "grids": [{"x": 1, "y": -1}]}
    only = {"only": {"x": 3}}
    three = {(3, column): values for (x, column), values in runs.items() if x == 1}
    found = result(only, three, variant="reduced", changes=other)
    assert found.state == "supported in reduced form"


def test_a_reduced_form_must_have_the_data_sets_of_a_claim() -> None:
    data = {"x": "dataset=mnist", "y": []}
    for replaced, state in (
        ("dataset=mnist", "supported in reduced form"),
        ("dataset=digits", "undecided"),
    ):
        changes = {"conditions": data, "reduced": {"what": "w", "overrides": [replaced]}}
        found = result({}, pairs(FAR), variant="reduced", changes=changes)
        assert found.state == state
        assert ("other data sets" in found.reason) == (state == "undecided")


def test_superseded_settings_give_no_verdict() -> None:
    for methods, state in (
        ([], "superseded settings: no verdict"),
        (["b"], "superseded settings: no verdict"),
        (["c"], "supported in reduced form"),
    ):
        note = {"why": "too few rounds", "methods": methods}
        changes = {"reduced": {"what": "w", "superseded": note}}
        found = result({}, pairs(FAR), variant="reduced", changes=changes)
        assert found.state == state
        assert found.reason.startswith("too few rounds; 3 of 3 pairs") == (methods != ["c"])
        assert result({}, pairs(FAR), changes=changes).state == "supported"


def test_runs_at_chance_level_count_but_must_not_decide() -> None:
    """All pairs support the claim, but without the first seed only one pair is left."""
    runs = pairs([5.0, 5.1])
    assert result({}, runs).state == "supported"
    found = result({}, runs, at_chance={(1, "b"): (True, False)})
    assert found.state == "undecided" and found.rows[0].n == 2
    assert found.reason == (
        "supported with all runs, undecided without the runs that did not learn; "
        "2 of 2 pairs in favour"
    )
    # The claim does not read column c.
    runs[1, "c"] = [10.0, 10.0]
    assert result({}, runs, at_chance={(1, "c"): (True, True)}).state == "supported"
    # Enough pairs are left, and they decide alike.
    assert result({}, pairs(FAR), at_chance={(1, "b"): (True, False, False)}).state == "supported"


def test_runs_that_are_not_the_tables_decide_nothing() -> None:
    found = result({}, pairs(FAR), objection="run with local.lr=3")
    assert found.state == "undecided" and found.reason.startswith("run with local.lr=3; 3 of 3")


# --- the paper's own numbers


@pytest.mark.parametrize(("rows", "shown", "contradicted"), [
    ("all", "2 of 3 rows", True), ("most", "2 of 3 rows", False), (1, "2 of 3 rows", False), (3, "2 of 3 rows", False),
    (4, "2 of 3 rows", True),
])  # fmt: skip
def test_every_claim_is_held_against_what_the_paper_prints(
    rows: Any, shown: str, contradicted: bool
) -> None:
    printed = {
        (1, "a"): 5.0,
        (1, "b"): 4.0,
        (2, "a"): 5.0,
        (2, "b"): 4.0,
        (3, "a"): 4.0,
        (3, "b"): 4.0,
        (4, "a"): 9.0,
    }
    for variant in ("full", "smoke"):
        found = result({"rows": rows}, pairs(FAR, FAR, FAR, FAR), printed=printed, variant=variant)  # type: ignore[arg-type]
        assert (found.printed, found.contradicted_in_print) == (shown, contradicted)
        assert [row.printed for row in found.rows] == [True, True, False, None]
    # The column `ours` is not one of the paper's.
    assert result({"a": ["ours"]}, {}, printed=printed).printed == ""


def test_rows_without_printed_numbers_may_still_make_most_rows_fit() -> None:
    printed = {(1, "a"): 5.0, (1, "b"): 4.0, (2, "a"): 4.0, (2, "b"): 4.0, (3, "a"): 4.0}
    found = result({"rows": "most"}, {}, printed=printed)
    assert (found.printed, found.contradicted_in_print) == ("1 of 2 rows", False)
    found = result({"rows": "most"}, {}, printed={**printed, (1, "a"): 3.0})
    assert (found.printed, found.contradicted_in_print) == ("0 of 2 rows", True)


def test_printed_numbers_of_the_other_tests() -> None:
    printed = {(1, "a"): 5.0, (1, "b"): 4.0, (2, "a"): 7.0, (2, "b"): 4.0}
    within = {"test": "within", "x": 2}
    assert result(within, {}, printed=printed).printed == "1 of 2 rows"
    assert result(within | {"a": ["b"], "b": ["a"]}, {}, printed=printed).printed == "1 of 2 rows"
    assert not result(
        {"test": "trend", "b": [], "along": ["x", "y"]}, {}, printed=printed
    ).contradicted_in_print
    assert result(
        {"test": "trend", "b": [], "along": ["x", "y"], "direction": "down"}, {}, printed=printed
    ).contradicted_in_print
    assert result({}, {}, printed=printed, higher=False).contradicted_in_print
    # Column c is not printed.
    assert result({"b": ["b", "c"]}, {}, printed=printed).printed == ""
    assert result({"b": ["b", "c"], "any_of": "b"}, {}, printed=printed).printed == "2 of 2 rows"
    assert result(SOONER, {}, printed=printed).printed == ""


def test_no_claim_about_nothing_is_contradicted() -> None:
    assert result({}, pairs(FAR)).printed == "" and not result({}, pairs(FAR)).contradicted_in_print


def test_a_single_seed_leaves_it_open_though_the_other_rows_would_do() -> None:
    assert result({"rows": "most"}, pairs(FAR, FAR, FAR)).state == "supported"
    assert result({"rows": "most"}, pairs(FAR, FAR, [5.0])).state == "undecided"
    runs = pairs(FAR, FAR, FAR)
    del runs[3, "b"]
    assert result({"rows": "most"}, runs).state == "undecided"


def test_an_open_alternative_keeps_a_row_open() -> None:
    runs = pairs([-5.0, -5.1, -4.9]) | {(1, "c"): [10.0, 100.0, 70.0]}
    assert (
        result({}, runs).state == "contradicted"
        and result({"a": ["a", "c"], "any_of": "a"}, runs).state == "undecided"
    )
