"""Verdicts on our runs against a number that a paper prints.

A number is reproduced, close, different, or undecided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t

from fedexp.tables.report.report import Conclusion, Direction

# Significance level of every test.
LEVEL = 0.05
# Largest number of seeds that a verdict proposes.
_MOST_SEEDS = 20
# Two conditions of the verdict `close`: the smallest number of runs, and the largest
# half-width of the 95 % interval, as a multiple of the tolerance.
_CLOSE_RUNS, _CLOSE_WIDTH = 3, 2.0


@dataclass(frozen=True)
class Judgement:
    """A verdict with its reasons.

    `fedexp.tables.report.report.Cell` also has all of these fields.

    Args:
        verdict: The verdict.
        reason: Reason for the verdict, empty for ``reproduced``.
        direction: For ``different``, whether our mean is higher or lower.
        interval: 95 % interval of our mean minus the paper's, None if there is none.
        settles: For ``undecided``, text that tells how many seeds would lead to another
            verdict if mean and spread stayed the same.
        deterministic: Whether all runs gave the same number.
    """

    verdict: Conclusion
    reason: str
    direction: Direction | None = None
    interval: tuple[float, float] | None = None
    settles: str = ""
    deterministic: bool = False


@dataclass(frozen=True)
class Difference:
    """Our mean minus the paper's, and its standard error.

    The paper's number is also random, because it is the mean of `paper_runs` runs. If
    the paper prints the standard deviation of these runs, it is used for them (Welch's
    test). If the paper prints none, the standard deviation of our runs is used for the
    paper's runs, too.

    Args:
        d: Difference of the means.
        s: Sample standard deviation of our runs.
        n: Number of our runs.
        paper_sd: Standard deviation as printed, or None.
        paper_runs: Number of the paper's runs.
    """

    d: float
    s: float
    n: int
    paper_sd: float | None
    paper_runs: int

    @property
    def se(self) -> float:
        if self.paper_sd is None:
            return self.s * math.sqrt(1 / self.n + 1 / self.paper_runs)
        return math.hypot(self.s / math.sqrt(self.n), self.paper_sd / math.sqrt(self.paper_runs))

    @property
    def df(self) -> float:
        """The degrees of freedom of Student's t.

        They are n - 1 if the paper prints no standard deviation. Otherwise they follow
        from the equation of Welch and Satterthwaite. If the paper prints a standard
        deviation for a single run, it is treated as if it came from two runs.
        """
        if self.paper_sd is None or not self.se:
            return self.n - 1
        # Share of our runs in the variance of the difference.
        ours = (self.s / math.sqrt(self.n) / self.se) ** 2
        return 1 / (ours**2 / (self.n - 1) + (1 - ours) ** 2 / max(1, self.paper_runs - 1))

    def half_width(self, confidence: float) -> float:
        """Return half the width of the two-sided interval around `d`."""
        return float(t.ppf((1 + confidence) / 2, self.df)) * self.se if self.se else 0.0

    def equivalent(self, tolerance: float) -> bool:
        """Return whether the 90 % interval is within the tolerance.

        This is the procedure of two one-sided tests (TOST).
        """
        return abs(self.d) + self.half_width(1 - 2 * LEVEL) <= tolerance

    def beyond(self, tolerance: float) -> bool:
        """Return whether the whole 95 % interval is beyond the tolerance, on one side.

        The interval is then above the tolerance, or below minus the tolerance.
        """
        return abs(self.d) - self.half_width(1 - LEVEL) > tolerance

    def close(self, tolerance: float) -> bool:
        """Return whether the difference is small, and known well enough.

        The difference must be within the tolerance. There must be at least three runs,
        and the half-width of the 95 % interval must be at most twice the tolerance.
        """
        return (
            abs(self.d) <= tolerance
            and self.n >= _CLOSE_RUNS
            and self.half_width(1 - LEVEL) <= _CLOSE_WIDTH * tolerance
        )

    def with_seeds(self, n: int) -> Difference:
        return Difference(self.d, self.s, n, self.paper_sd, self.paper_runs)


def judge(
    values: Sequence[float],
    paper: float,
    paper_sd: float | None,
    tolerance: float,
    paper_runs: int = 1,
) -> Judgement:
    """Judge our numbers against the paper's number.

    The number is

    - ``reproduced`` if the 90 % interval of the difference is within the tolerance.
    - ``different`` if the 95 % interval is beyond the tolerance.
    - ``close`` if it is neither of these, and `Difference.close` is true.
    - ``undecided`` otherwise, for a single run, and if a number is NaN.

    An infinite number means that a run never reaches a target. If the paper's number is
    infinite, it is ``reproduced`` if no run of ours reaches the target.

    Args:
        values: Our numbers, one per run. There is at least one.
        paper: The paper's number.
        paper_sd: The standard deviation that the paper prints, or None.
        tolerance: Tolerance in the unit of the numbers.
        paper_runs: Number of runs behind the paper's number.
    """
    if any(math.isnan(value) for value in values):
        return Judgement("undecided", "a run's number is NaN")
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return Judgement("undecided", "one seed")
    if math.isinf(paper) or any(map(math.isinf, values)):
        return _infinite(values, paper)
    s = statistics.stdev(values) if len(set(values)) > 1 else 0.0
    found = Difference(mean - paper, s, n, paper_sd, paper_runs)
    half = found.half_width(1 - LEVEL)
    interval = (found.d - half, found.d + half)
    if found.equivalent(tolerance):
        return Judgement("reproduced", "", interval=interval, deterministic=not s)

    if found.beyond(tolerance):
        reason = (
            f"the 95 % interval of the difference, {_interval_text(interval)}, is beyond "
            f"the tolerance {tolerance:g}"
        )
        direction: Direction = "higher" if found.d > 0 else "lower"
        return Judgement("different", reason, direction, interval, deterministic=not s)

    reason = f"the difference is {found.d:+.3g}, 95 % interval {_interval_text(interval)}"
    if found.close(tolerance):
        return Judgement("close", reason, interval=interval, deterministic=not s)
    settles = _settles(found, tolerance)
    return Judgement("undecided", f"{reason}; {settles}", None, interval, settles, not s)


def _infinite(values: Sequence[float], paper: float) -> Judgement:
    """Judge several runs if the paper's runs or some of ours never reach the target."""
    missed = sum(map(math.isinf, values))
    if missed == len(values) and math.isinf(paper):
        return Judgement("reproduced", "")
    if missed == len(values):
        return Judgement("different", "no run of ours reaches the target", "higher")
    if not missed:
        reason = "every run of ours reaches a target that the paper's does not"
        return Judgement("different", reason, "lower")
    return Judgement("undecided", f"{missed} of {len(values)} runs miss the target")


def _settles(found: Difference, tolerance: float) -> str:
    """Tell how many seeds with the same mean and spread would settle the verdict."""

    def is_decided(n: int) -> bool:
        more = found.with_seeds(n)
        return more.equivalent(tolerance) or more.beyond(tolerance) or more.close(tolerance)

    for n in range(found.n + 1, _MOST_SEEDS + 1):
        if is_decided(n):
            return f"{n} seeds would settle it"
    # Many finite numbers of seeds are tested. It would not be enough to test infinitely
    # many seeds, because Welch's interval may be narrower for fewer seeds.
    enough = any(is_decided(_MOST_SEEDS * 2**power) for power in range(1, 32))
    return (
        f"more than {_MOST_SEEDS} seeds would settle it"
        if enough
        else "no number of seeds would settle it"
    )


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3g} to {interval[1]:+.3g}"


def mean_interval(values: Sequence[float], paper_runs: int) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of differences, None for a single one.

    Args:
        values: Finite differences from the paper's numbers, at least one.
        paper_runs: Number of runs behind the paper's numbers.
    """
    if len(values) < 2:
        return None
    found = Difference(
        statistics.mean(values), statistics.stdev(values), len(values), None, paper_runs
    )
    half = found.half_width(1 - LEVEL)
    return found.d - half, found.d + half
