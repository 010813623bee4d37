"""Verdicts on cells against scipy's own tests, and what they say of how many seeds
would settle them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scipy import stats

from fedexp.tables.verdicts import Difference, Judgement, judge, mean_interval

MANY = 10**9  # runs of the paper's: as if its number were no draw


def cases() -> Iterator[tuple[list[float], float, float]]:
    """(ours, paper, tolerance) around every border, n = 2 to 6."""
    numbers = np.random.default_rng(0)
    for n in (2, 3, 5, 6):
        for spread in (0.01, 0.3, 1.0, 4.0):
            for distance in (0.0, 1.0, 3.0, 4.9, 5.1, 8.0, 30.0):
                sign = numbers.choice([-1, 1])
                yield list(70 + sign * distance + spread * numbers.standard_normal(n)), 70.0, 5.0


def like(values: Sequence[float], n: int) -> list[float]:
    """N numbers with the mean and the sample standard deviation of `values`."""
    made = np.arange(n) - (n - 1) / 2
    return list(statistics.mean(values) + made * statistics.stdev(values) / made.std(ddof=1))


def expected(low: float, high: float, p_below: float, p_above: float, tolerance: float) -> str:
    """The verdict by two one-sided tests' p values, and by the 95 % interval."""
    if max(p_below, p_above) <= 0.05:
        return "reproduced"
    return "higher" if low > tolerance else "lower" if high < -tolerance else "inconclusive"


def test_against_the_one_sample_tests_where_the_papers_number_is_no_draw() -> None:
    found = set()
    for values, paper, tolerance in cases():
        said = judge(values, paper, None, tolerance, MANY)
        t = stats.ttest_1samp(values, paper)
        low, high = (float(edge) - paper for edge in t.confidence_interval(0.95))
        assert said.interval == pytest.approx((low, high), rel=1e-6)
        p_below = stats.ttest_1samp(values, paper - tolerance, alternative="greater").pvalue
        p_above = stats.ttest_1samp(values, paper + tolerance, alternative="less").pvalue
        assert said.verdict == expected(low, high, p_below, p_above, tolerance)
        found.add(said.verdict)
    assert found == {"reproduced", "higher", "lower", "inconclusive"}


def test_against_the_pooled_test_where_the_papers_number_is_one_run() -> None:
    """One run adds nothing to the pooled variance: s sqrt(1/n + 1), n - 1 degrees of
    freedom.
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
        # Shifted by an end of its interval, the difference is just significant
        for edge in (low, high):
            assert p(edge, "two-sided") == pytest.approx(0.05, abs=1e-9)
        assert said.verdict == expected(
            low, high, p(-tolerance, "greater"), p(tolerance, "less"), tolerance
        )
        found.add(said.verdict)
    assert found == {"reproduced", "higher", "lower", "inconclusive"}


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
            low, high, p(-tolerance, "greater"), p(tolerance, "less"), tolerance
        )


def test_more_runs_of_the_papers_narrow_the_interval() -> None:
    values = [70.0, 71.0, 73.0]
    widths = [np.ptp(judge(values, 70.0, None, 5.0, runs).interval or ()) for runs in (1, 3, MANY)]
    assert widths[0] == pytest.approx(widths[2] * 2) and widths[1] == pytest.approx(
        widths[2] * math.sqrt(2)
    )


@pytest.mark.parametrize(("values", "verdict", "near"), [
    ([70.1, 70.0, 69.9], "reproduced", None),  # inside
    ([80.1, 80.0, 79.9], "higher", None),  # outside
    ([60.1, 60.0, 59.9], "lower", None),
    ([68.0, 76.0, 72.0], "inconclusive", True),  # across, the mean inside
    ([73.0, 81.0, 77.0], "inconclusive", False),  # across, the mean outside
    ([70.0, 84.0], "inconclusive", False),
    ([70.0], "inconclusive", True),
    ([75.1], "inconclusive", False),
])  # fmt: skip
def test_inside_outside_and_across(values: list[float], verdict: str, near: bool | None) -> None:
    said = judge(values, 70.0, None, 5.0, 3)
    assert (said.verdict, said.near) == (verdict, near)
    assert (said.interval is None) == (len(values) == 1)
    assert bool(said.reason) == (verdict != "reproduced") and not said.deterministic


@pytest.mark.parametrize(
    ("distance", "verdict"),
    [(4.0, "reproduced"), (5.0, "reproduced"), (6.0, "higher"), (-6.0, "lower")],
)
def test_no_spread_is_told_by_the_number_alone_and_flagged(distance: float, verdict: str) -> None:
    assert judge([70 + distance] * 3, 70.0, None, 5.0) == Judgement(
        verdict,  # type: ignore[arg-type]
        "" if verdict == "reproduced" else judge([70 + distance] * 3, 70.0, None, 5.0).reason,
        (distance, distance),
        deterministic=True,
    )
    assert not judge([70 + distance], 70.0, None, 5.0).deterministic


def test_no_spread_of_ours_leaves_the_deviation_that_the_paper_prints() -> None:
    said = judge([72.0] * 3, 70.0, 6.0, 5.0, 3)
    half = stats.t.ppf(0.975, 2) * 6 / math.sqrt(3)
    assert (
        said.verdict == "inconclusive"
        and said.deterministic
        and said.interval == pytest.approx((2 - half, 2 + half))
    )


@pytest.mark.parametrize(("values", "paper", "verdict"), [
    ([math.inf] * 3, math.inf, "reproduced"),
    ([math.inf, math.inf, 12.0], math.inf, "inconclusive"),
    ([12.0, 13.0, 14.0], math.inf, "lower"),
    ([math.inf] * 2, 12.0, "higher"),
    ([12.5, math.inf, 14.0], 12.0, "inconclusive"),  # nothing is known of the mean
    ([math.inf], math.inf, "inconclusive"),
    ([math.inf], 12.0, "inconclusive"),
    ([math.nan, 70.0], 70.0, "inconclusive"),
])  # fmt: skip
def test_targets_that_are_never_reached(values: list[float], paper: float, verdict: str) -> None:
    said = judge(values, paper, None, 5.0)
    assert said.verdict == verdict and said.interval is None
    if verdict == "inconclusive":
        missed = sum(map(math.isinf, values))
        assert said.reason in (
            "one seed",
            "a run's number is NaN",
            f"{missed} of {len(values)} runs miss the target",
        )


def test_one_seed_is_near_where_both_never_reach_the_target() -> None:
    assert (
        judge([math.inf], math.inf, None, 5.0).near is True
        and judge([math.inf], 3.0, None, 5.0).near is False
    )


def test_numbers_that_diverged_do_not_overflow() -> None:
    assert judge([1e300, 1.1e300, 9e299], 70.0, None, 5.0).verdict in ("higher", "inconclusive")
    assert judge([1e300, 1.1e300, 9e299], 70.0, 2.0, 5.0).verdict in ("higher", "inconclusive")


def test_a_verdict_is_of_the_number_whichever_is_better() -> None:
    """Ours and the paper's with the opposite sign, as of a loss, give the opposite."""
    turned = {"higher": "lower", "lower": "higher"}
    for values, paper, tolerance in cases():
        one, other = (
            judge(values, paper, None, tolerance, 3),
            judge([-v for v in values], -paper, None, tolerance, 3),
        )
        assert other.verdict == turned.get(one.verdict, one.verdict) and other.near == one.near
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
        assert bool(said.settles) == (said.verdict == "inconclusive")
        if not said.settles:
            continue
        wanted = {"reproduced"} if said.near else {"higher", "lower"}

        def verdict(
            n: int, case: tuple[list[float], float, float] = (values, paper, tolerance)
        ) -> str:
            return judge(like(case[0], n), case[1], sd, case[2], runs).verdict

        d = Difference(
            statistics.mean(values) - paper, statistics.stdev(values), len(values), sd, runs
        )

        def settled(
            n: int, d: Difference = d, near: bool | None = said.near, tolerance: float = tolerance
        ) -> bool:
            more = d.with_seeds(n)
            return more.equivalent(tolerance) if near else more.beyond(tolerance)

        if number := re.match(r"(\d+) seeds", said.settles):
            n = int(number[1])
            assert verdict(n) in wanted and len(values) < n <= 20
            assert all(verdict(fewer) == "inconclusive" for fewer in range(len(values), n))
        elif said.settles.startswith("more than 20"):
            assert verdict(20) == "inconclusive" and any(
                settled(20 * 2**power) for power in range(1, 32)
            )
        else:
            assert (
                said.settles == "no number of seeds would settle it"
                and verdict(40) == "inconclusive"
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
