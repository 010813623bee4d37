"""Tests of the verdicts on cells with scipy's tests.

The verdicts also say how many seeds would decide a cell.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scipy import stats

from fedexp.tables.report.report import Conclusion, Direction
from fedexp.tables.verdicts import Difference, Judgement, judge, mean_interval

# With this many runs of the paper, its number has no sampling error.
MANY = 10**9


def cases() -> Iterator[tuple[list[float], float, float]]:
    """Yield our values, the paper's value and the tolerance, around every border.

    There are 2 to 6 values.
    """
    numbers = np.random.default_rng(0)
    for n in (2, 3, 5, 6):
        for spread in (0.01, 0.3, 1.0, 4.0):
            for distance in (0.0, 1.0, 3.0, 4.9, 5.1, 8.0, 30.0):
                sign = numbers.choice([-1, 1])
                yield list(70 + sign * distance + spread * numbers.standard_normal(n)), 70.0, 5.0


def like(values: Sequence[float], n: int) -> list[float]:
    """Return n numbers with the mean and the sample standard deviation of `values`."""
    made = np.arange(n) - (n - 1) / 2
    return list(statistics.mean(values) + made * statistics.stdev(values) / made.std(ddof=1))


def expected(
    interval: tuple[float, float], p_below: float, p_above: float, tolerance: float, n: int
) -> str:
    """Return the verdict from two one-sided p values and the 95 % interval."""
    low, high = interval
    if max(p_below, p_above) <= 0.05:
        return "reproduced"
    if low > tolerance or high < -tolerance:
        return "different"
    centred = abs(low + high) / 2 <= tolerance and high - low <= 4 * tolerance
    return "close" if centred and n >= 3 else "undecided"


def test_against_the_one_sample_tests_where_the_papers_number_is_no_draw() -> None:
    found = set()
    for values, paper, tolerance in cases():
        said = judge(values, paper, None, tolerance, MANY)
        t = stats.ttest_1samp(values, paper)
        low, high = (float(edge) - paper for edge in t.confidence_interval(0.95))
        assert said.interval == pytest.approx((low, high), rel=1e-6)
        p_below = stats.ttest_1samp(values, paper - tolerance, alternative="greater").pvalue
        p_above = stats.ttest_1samp(values, paper + tolerance, alternative="less").pvalue
        assert said.verdict == expected((low, high), p_below, p_above, tolerance, len(values))
        found.add(said.verdict)
    assert found == {"reproduced", "close", "different", "undecided"}


def test_against_the_pooled_test_where_the_papers_number_is_one_run() -> None:
    """One run adds nothing to the pooled variance.

    The standard error is s sqrt(1/n + 1), with n - 1 degrees of freedom.
    """
    found = set()
    for values, paper, tolerance in cases():
        said = judge(values, paper, None, tolerance)
        ours = statistics.mean(values), statistics.stdev(values), len(values)

        def p(
            shift: float, side: str, ours: tuple[float, float, int] = ours, paper: float = paper
        ) -> float:
            return float(
                stats.ttest_ind_from_stats(*ours, paper + shift, 0.0, 1, alternative=side).pvalue
            )

        assert said.interval is not None
        low, high = said.interval
        # If the difference is shifted by an end of its interval, it is just
        # significant.
        for edge in (low, high):
            assert p(edge, "two-sided") == pytest.approx(0.05, abs=1e-9)
        assert said.verdict == expected(
            (low, high), p(-tolerance, "greater"), p(tolerance, "less"), tolerance, len(values)
        )
        found.add(said.verdict)
    assert found == {"reproduced", "close", "different", "undecided"}


@pytest.mark.parametrize("sd", [0.2, 1.5, 6.0])
@pytest.mark.parametrize("runs", [2, 3, 10])
def test_against_welchs_test_where_the_paper_prints_a_deviation(sd: float, runs: int) -> None:
    for values, paper, tolerance in cases():
        said = judge(values, paper, sd, tolerance, runs)
        ours = statistics.mean(values), statistics.stdev(values), len(values)

        def p(
            shift: float,
            side: str,
            ours: tuple[float, float, int] = ours,
            theirs: tuple[float, float, int] = (paper, sd, runs),
        ) -> float:
            mean, *rest = theirs
            return float(
                stats.ttest_ind_from_stats(
                    *ours, mean + shift, *rest, equal_var=False, alternative=side
                ).pvalue
            )

        assert said.interval is not None
        low, high = said.interval
        for edge in (low, high):
            assert p(edge, "two-sided") == pytest.approx(0.05, abs=1e-9)
        assert said.verdict == expected(
            (low, high), p(-tolerance, "greater"), p(tolerance, "less"), tolerance, len(values)
        )


def test_more_runs_of_the_papers_narrow_the_interval() -> None:
    values = [70.0, 71.0, 73.0]
    widths = [np.ptp(judge(values, 70.0, None, 5.0, runs).interval or ()) for runs in (1, 3, MANY)]
    assert widths[0] == pytest.approx(widths[2] * 2) and widths[1] == pytest.approx(
        widths[2] * math.sqrt(2)
    )


@pytest.mark.parametrize(("values", "verdict", "direction"), [
    # The interval is inside the tolerance.
    ([70.1, 70.0, 69.9], "reproduced", None),
    # The interval is outside the tolerance.
    ([80.1, 80.0, 79.9], "different", "higher"),
    ([60.1, 60.0, 59.9], "different", "lower"),
    # It crosses a border, and the mean is inside.
    ([70.0, 74.0, 72.0], "close", None),
    # The interval is wider than four tolerances.
    ([66.0, 78.0, 72.0], "undecided", None),
    # Two runs are too few for "close".
    ([70.5, 73.5], "undecided", None),
    # It crosses a border, and the mean is outside.
    ([73.0, 81.0, 77.0], "undecided", None),
    ([70.0, 84.0], "undecided", None),
    ([70.0], "undecided", None),
    ([75.1], "undecided", None),
])  # fmt: skip
def test_inside_outside_and_across(
    values: list[float], verdict: str, direction: str | None
) -> None:
    said = judge(values, 70.0, None, 5.0, 3)
    assert (said.verdict, said.direction) == (verdict, direction)
    assert (said.interval is None) == (len(values) == 1)
    assert bool(said.reason) == (verdict != "reproduced") and not said.deterministic


@pytest.mark.parametrize(("half_width", "verdict"), [(9.99, "close"), (10.01, "undecided")])
def test_close_needs_an_interval_of_at_most_twice_the_tolerance(
    half_width: float, verdict: str
) -> None:
    spread = half_width / stats.t.ppf(0.975, 3) * math.sqrt(4)
    values = [4.5 + v for v in like([0.0, 1.0, 2.0, 3.0], 4)]
    values = [
        74.5 + (v - statistics.mean(values)) * spread / statistics.stdev(values) for v in values
    ]
    said = judge(values, 70.0, None, 5.0, MANY)
    assert said.interval is not None
    assert said.interval[1] - said.interval[0] == pytest.approx(2 * half_width)
    assert said.verdict == verdict


@pytest.mark.parametrize(
    ("distance", "verdict", "direction"),
    [
        (4.0, "reproduced", None),
        (5.0, "reproduced", None),
        (6.0, "different", "higher"),
        (-6.0, "different", "lower"),
    ],
)
def test_no_spread_is_told_by_the_number_alone_and_flagged(
    distance: float, verdict: Conclusion, direction: Direction | None
) -> None:
    assert judge([70 + distance] * 3, 70.0, None, 5.0) == Judgement(
        verdict,
        "" if verdict == "reproduced" else judge([70 + distance] * 3, 70.0, None, 5.0).reason,
        direction,
        (distance, distance),
        deterministic=True,
    )
    assert not judge([70 + distance], 70.0, None, 5.0).deterministic


def test_no_spread_of_ours_leaves_the_deviation_that_the_paper_prints() -> None:
    said = judge([72.0] * 3, 70.0, 6.0, 5.0, 3)
    half = stats.t.ppf(0.975, 2) * 6 / math.sqrt(3)
    assert (
        said.verdict == "undecided"
        and said.deterministic
        and said.interval == pytest.approx((2 - half, 2 + half))
    )


@pytest.mark.parametrize(("values", "paper", "verdict"), [
    ([math.inf] * 3, math.inf, "reproduced"),
    ([math.inf, math.inf, 12.0], math.inf, "undecided"),
    ([12.0, 13.0, 14.0], math.inf, "different"),
    ([math.inf] * 2, 12.0, "different"),
    ([12.5, math.inf, 14.0], 12.0, "undecided"),  # Nothing is known about the mean.
    ([math.inf], math.inf, "undecided"),
    ([math.inf], 12.0, "undecided"),
    ([math.nan, 70.0], 70.0, "undecided"),
])  # fmt: skip
def test_targets_that_are_never_reached(values: list[float], paper: float, verdict: str) -> None:
    said = judge(values, paper, None, 5.0)
    assert said.verdict == verdict and said.interval is None
    if verdict == "undecided":
        missed = sum(map(math.isinf, values))
        assert said.reason in (
            "one seed",
            "a run's number is NaN",
            f"{missed} of {len(values)} runs miss the target",
        )


def test_numbers_that_diverged_do_not_overflow() -> None:
    assert judge([1e300, 1.1e300, 9e299], 70.0, None, 5.0).verdict in ("different", "undecided")
    assert judge([1e300, 1.1e300, 9e299], 70.0, 2.0, 5.0).verdict in ("different", "undecided")


def test_a_verdict_is_of_the_number_whichever_is_better() -> None:
    """If our number and the paper's change signs, the verdict is the opposite one."""
    turned = {"higher": "lower", "lower": "higher", None: None}
    for values, paper, tolerance in cases():
        one, other = (
            judge(values, paper, None, tolerance, 3),
            judge([-v for v in values], -paper, None, tolerance, 3),
        )
        assert other.verdict == one.verdict and other.direction == turned[one.direction]
        assert one.interval == pytest.approx(
            tuple(-edge for edge in reversed(other.interval or ()))
        )


@pytest.mark.parametrize("sd", [None, 0.5, 2.0])
@pytest.mark.parametrize("runs", [1, 3, 10])
def test_so_many_seeds_of_the_same_mean_and_spread_settle_it_and_one_less_does_not(
    sd: float | None, runs: int
) -> None:
    found = set()
    for values, paper, tolerance in cases():
        said = judge(values, paper, sd, tolerance, runs)
        assert bool(said.settles) == (said.verdict == "undecided")
        if not said.settles:
            continue
        within = abs(statistics.mean(values) - paper) <= tolerance
        wanted = {"reproduced", "close"} if within else {"different"}

        def verdict(
            n: int, case: tuple[list[float], float, float] = (values, paper, tolerance)
        ) -> str:
            return judge(like(case[0], n), case[1], sd, case[2], runs).verdict

        d = Difference(
            statistics.mean(values) - paper, statistics.stdev(values), len(values), sd, runs
        )

        def settled(
            n: int, d: Difference = d, within: bool = within, tolerance: float = tolerance
        ) -> bool:
            more = d.with_seeds(n)
            if within:
                narrow = more.half_width(0.95) <= 2 * tolerance
                return more.equivalent(tolerance) or (n >= 3 and narrow)
            return more.beyond(tolerance)

        if number := re.match(r"(\d+) seeds", said.settles):
            n = int(number[1])
            assert verdict(n) in wanted and len(values) < n <= 20
            assert all(verdict(fewer) == "undecided" for fewer in range(len(values), n))
        elif said.settles.startswith("more than 20"):
            assert verdict(20) == "undecided" and any(
                settled(20 * 2**power) for power in range(1, 32)
            )
        else:
            assert (
                said.settles == "no number of seeds would settle it" and verdict(40) == "undecided"
            )
            assert not any(settled(20 * 2**power) for power in range(1, 32))
        found.add(said.settles.partition(" ")[0])
    assert "no" in found and found - {"no", "more"}


def test_a_mean_over_rows_has_the_interval_of_students_test() -> None:
    values = [1.0, 2.5, -0.5, 3.0]
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean_interval(values, MANY) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert mean_interval(values, 4) == pytest.approx(
        tuple(1.5 + math.sqrt(2) * (edge - 1.5) for edge in interval)
    )
    assert mean_interval(values[:1], 3) is None
