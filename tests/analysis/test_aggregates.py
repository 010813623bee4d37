"""Tests of the numbers that summarise a table over its rows."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import mannwhitneyu, norm, ttest_1samp, ttest_ind

from fedexp.analysis.aggregates import (
    Scores,
    aggregate,
    critical_difference,
    iqm,
    rank_groups,
)


def scores(*rows: list[float]) -> Scores:
    """Return rows whose seeds are 0, 1, ..."""
    return [{(seed,): value for seed, value in enumerate(row)} for row in rows]


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert iqm(np.array([8.0, 1, 100, 3, 4, 5, 6, -50])) == pytest.approx((3 + 4 + 5 + 6) / 4)


def test_means_are_over_rows_and_the_iqm_is_over_all_runs() -> None:
    rows = [0.1, 0.2, 0.3], [0.6, 0.6, 0.9], [0.2, 0.3, 0.4]
    one, _ = aggregate({"a": scores(*rows), "b": scores(*rows)}, True).columns
    means = [statistics.mean(row) for row in rows]
    assert one.mean.value == pytest.approx(statistics.mean(means))
    assert one.median.value == pytest.approx(statistics.median(means))
    # A quarter of nine runs are two runs
    assert one.iqm.value == pytest.approx(statistics.mean(sorted(itertools.chain(*rows))[2:-2]))


def test_intervals_describe_seeds_and_not_rows() -> None:
    """Rows whose runs are equal give an interval of width 0, however far apart they are."""
    found = aggregate({"a": scores([0.1] * 3, [0.9] * 3), "b": scores([0.2] * 3, [0.3] * 3)}, True)
    for column in found.columns:
        for estimate in (column.mean, column.median, column.iqm):
            assert estimate.low == pytest.approx(estimate.value, abs=1e-12)
            assert estimate.high == pytest.approx(estimate.value, abs=1e-12)


def disjoint(*rows: list[float]) -> Scores:
    """Return rows without common seeds."""
    return [
        {(number, seed): value for seed, value in enumerate(row)} for number, row in enumerate(rows)
    ]


def test_interval_of_the_mean_over_rows_with_common_seeds_is_students() -> None:
    """The seeds are in another order in the second row."""
    rows = [[1.0, 2.0, 4.0, 9.0], [3.0, 14.0, 6.0, 11.0]]
    means = [statistics.mean(pair) for pair in zip(*rows, strict=True)]
    for column, values in ((scores(rows[0]), rows[0]), (scores(*rows), means)):
        shuffled = [column[0], *(dict(reversed(row.items())) for row in column[1:])]
        found = aggregate({"a": shuffled, "b": shuffled}, True).columns[0].mean
        expected = ttest_1samp(values, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_interval_of_the_mean_over_rows_without_common_seeds_is_welchs() -> None:
    """The mean of x and y is half of x - (-y). Equal variances give the pooled test."""
    rows = [[1.0, 2.0, 4.0, 9.0], [3.0, 4.0, 6.0, 11.0]]
    other = [[1.0, 2.0, 4.0], [3.0, 40.0, 6.0, 110.0, 7.0]]
    for (x, y), equal in ((rows, True), (other, False)):
        found = aggregate({name: disjoint(x, y) for name in "ab"}, True).columns[0].mean
        test = ttest_ind(x, [-value for value in y], equal_var=equal)
        expected = test.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low / 2, expected.high / 2))


def test_interval_of_the_mean_over_groups_of_rows_with_common_seeds_is_welchs() -> None:
    """Two rows have the same seeds, and the third has others. The weights are 2 and 1."""
    x, y, z = [1.0, 2.0, 4.0], [3.0, 7.0, 5.0], [2.0, 8.0, 9.0, 4.0]
    rows = [*scores(x, y), {(9, seed): value for seed, value in enumerate(z)}]
    found = aggregate({"a": rows, "b": rows}, True).columns[0].mean
    pairs = [sum(pair) / 3 for pair in zip(x, y, strict=True)]
    test = ttest_ind(pairs, [-value / 3 for value in z], equal_var=False)
    expected = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_intervals_over_equal_rows_are_those_of_one_row() -> None:
    """Six rows with the same numbers say no more about the seeds than one row."""
    a, b = [0.1, 0.2, 0.6, 0.4, 0.9], [0.3, 0.5, 0.2, 0.8, 0.7]
    one = aggregate({"a": scores(a), "b": scores(b)}, True)
    six = aggregate({"a": scores(*[a] * 6), "b": scores(*[b] * 6)}, True)

    for few, many in zip(one.columns, six.columns, strict=True):
        for name in ("mean", "median"):
            left, right = getattr(few, name), getattr(many, name)
            assert (left.low, left.high) == pytest.approx((right.low, right.high))
    left, right = one.improvements[0].probability, six.improvements[0].probability
    assert (left.low, left.high) == pytest.approx((right.low, right.high), abs=0.05)


def test_rows_with_some_common_seeds_give_no_interval() -> None:
    some = [{(0,): 0.1, (1,): 0.2, (2,): 0.4}, {(1,): 0.3, (2,): 0.2, (3,): 0.6}]
    found = aggregate({"a": some, "b": scores([0.1, 0.2, 0.3], [0.3, 0.4, 0.2])}, True)
    columns = {column.column: column for column in found.columns}
    for estimate in (columns["a"].mean, columns["a"].median, columns["a"].iqm):
        assert (estimate.low, estimate.high) == (None, None)
    assert columns["b"].mean.low is not None
    assert found.improvements[0].probability.low is None


def test_interval_of_the_iqm_is_that_of_the_normal_distribution() -> None:
    """The IQM of one row of normal numbers has a known asymptotic variance."""
    row = list(np.random.default_rng(1).normal(0.0, 1.0, 200))
    found = aggregate({"a": scores(row), "b": scores(row)}, True).columns[0].iqm
    assert found.low is not None and found.high is not None
    q = norm.ppf(0.75)
    variance = 2 * (quad(lambda x: x**2 * norm.pdf(x), 0, q)[0] + 0.25 * q**2) / 0.5**2
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * math.sqrt(variance / 200), rel=0.2)


def test_a_single_run_gives_no_interval() -> None:
    found = aggregate({"a": scores([0.1], [0.2, 0.3]), "b": scores([0.1, 0.2], [0.3, 0.4])}, True)
    ends = {column.column: (column.mean, column.median, column.iqm) for column in found.columns}
    assert all((one.low, one.high) == (None, None) for one in ends["a"])
    assert all(one.low is not None for one in ends["b"])
    assert found.improvements[0].probability.low is None


def test_means_of_the_same_numbers_tie() -> None:
    a, b = scores([0.1, 0.2, 0.3]), scores([0.3, 0.2, 0.1])
    assert sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1])
    assert [column.rank for column in aggregate({"a": a, "b": b}, True).columns] == [1.5, 1.5]


def test_equal_means_near_zero_tie() -> None:
    a, b = scores([0.1, 0.2, -0.3], [1, 1]), scores([0.1, -0.3, 0.2], [1, 1])
    means = [np.mean([*column[0].values()]) for column in (a, b)]
    assert means[0] != means[1] and not math.isclose(*means)
    assert [column.rank for column in aggregate({"a": a, "b": b}, True).columns] == [1.5, 1.5]
    for sign in (1, -1):
        c, d = scores([0.0, 0.0, 0.0], [1, 1]), scores([sign * v for v in (0.1, 0.2, -0.3)], [1, 1])
        assert [column.rank for column in aggregate({"c": c, "d": d}, True).columns] == [1.5, 1.5]
    # Small values that differ do not tie.
    a, b = scores([1e-20, 1e-20], [1, 1]), scores([2e-20, 2e-20], [1, 1])
    assert [column.rank for column in aggregate({"a": a, "b": b}, True).columns] == [1.25, 1.75]


def test_means_next_to_a_huge_mean_do_not_tie() -> None:
    """The huge mean is that of another row in column c, and of the same row in column d."""
    found = aggregate(
        {
            "a": scores([0.1], [0.1]),
            "b": scores([0.2], [0.2]),
            "c": scores([0.3], [1e27]),
            "d": scores([1e27], [0.3]),
        },
        False,
    )
    ranks = {column.column: column.rank for column in found.columns}
    assert ranks == {"a": 1, "b": 2, "c": 3.5, "d": 3.5}
    assert found.p is not None and found.p < 1


@pytest.mark.parametrize("higher", [True, False])
def test_ranks_and_wins_follow_the_direction(higher: bool) -> None:
    found = aggregate(
        {
            "low": scores([1, 2], [3, 4]),
            "mid": scores([2, 2], [4, 5]),
            "top": scores([9, 9], [9, 9]),
        },
        higher,
    )
    order = ["top", "mid", "low"] if higher else ["low", "mid", "top"]
    assert [column.column for column in found.columns] == order
    assert [column.rank for column in found.columns] == [1, 2, 3]
    rates = {column.column: column.win_rate for column in found.columns}
    # Of four pairs with "mid", "low" ties one
    wins = {"low": 0.5 / 8, "mid": 3.5 / 8, "top": 1.0}
    assert rates == {name: share if higher else 1 - share for name, share in wins.items()}


def test_pairs_of_the_win_rate_have_common_seeds() -> None:
    a, b = [{(0,): 1.0, (1,): 1.0}] * 2, [{(1,): 0.0, (2,): 9.0}] * 2
    assert [column.win_rate for column in aggregate({"a": a, "b": b}, True).columns] == [0.0, 1.0]
    b = [{(2,): 9.0}] * 2
    assert {column.win_rate for column in aggregate({"a": a, "b": b}, True).columns} == {None}


@pytest.mark.parametrize("higher", [True, False])
def test_probability_of_improvement_is_mann_whitneys_statistic(higher: bool) -> None:
    a, b = ([1.0, 3, 5], [2.0, 2, 4]), ([2.0, 3, 8, 9], [1.0, 2, 3, 2])
    (found,) = aggregate({"a": scores(*a), "b": scores(*b)}, higher).improvements
    shares = [
        mannwhitneyu(right, left).statistic / (len(left) * len(right))
        for left, right in zip(a, b, strict=True)
    ]
    expected = statistics.mean(shares)
    assert found.probability.value == pytest.approx(expected if higher else 1 - expected)
    assert found.probability.low < found.probability.value < found.probability.high


@pytest.mark.parametrize(("columns", "quantile"), [(2, 1.960), (4, 2.569), (10, 3.164)])
def test_critical_difference_has_the_published_quantiles(columns: int, quantile: float) -> None:
    """The quantiles are those of Demsar's Table 5 (a)."""
    expected = quantile * math.sqrt(columns * (columns + 1) / (6 * 14))
    assert critical_difference(columns, 14) == pytest.approx(expected, rel=5e-4)


def test_friedmans_test_is_its_formula() -> None:
    rows = [[0.1, 0.2, 0.3], [0.5, 0.8, 0.9], [0.3, 0.1, 0.7], [0.2, 0.4, 0.5]]
    found = aggregate(
        {name: scores(*([row[i]] for row in rows)) for i, name in enumerate("abc")}, True
    )
    ranks = [column.rank for column in found.columns]
    statistic = 12 * 4 / (3 * 4) * (sum(rank**2 for rank in ranks) - 3 * 4**2 / 4)
    # The chi-squared distribution with 2 degrees of freedom is exponential
    assert found.p == pytest.approx(math.exp(-statistic / 2))
    assert found.num_rows == 4


def test_equal_columns_are_not_distinguished() -> None:
    same = scores([0.5], [0.7])
    found = aggregate(dict.fromkeys("abc", same), True)
    assert found.p == 1.0 and {column.groups for column in found.columns} == {(1,)}
    two = aggregate(dict.fromkeys("ab", same), True)
    assert two.p is None and two.critical_difference is None


def test_groups_are_largest_sets_within_the_critical_difference() -> None:
    ranks = [3.0, 1.0, 1.5, 4.0]
    assert rank_groups(ranks, 1.6, True) == [(2, 3), (1,), (1, 2), (3,)]
    assert rank_groups(ranks, 0.1, True) == [(3,), (1,), (2,), (4,)]
    assert rank_groups(ranks, 9.0, True) == [(1,)] * 4
    assert rank_groups(ranks, 0.1, False) == [(1,)] * 4


def test_without_a_significant_friedman_test_no_ranks_are_distinguished() -> None:
    columns = {"a": [1, 2, 3, 1], "b": [0, 1, 0, 0], "c": [3, 3, 2, 3], "d": [2, 0, 1, 2]}
    found = aggregate(
        {name: scores(*([float(value)] for value in values)) for name, values in columns.items()},
        True,
    )
    ranks = [column.rank for column in found.columns]
    assert found.p is not None and found.critical_difference is not None
    assert found.p > 0.05 and ranks[-1] - ranks[0] > found.critical_difference
    assert {column.groups for column in found.columns} == {(1,)}
