"""What our runs say of a number that a paper prints: equivalence within a tolerance, a difference beyond it, or neither."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t

from fedexp.tables.report.report import Conclusion

LEVEL = 0.05  # of every test
_MOST_SEEDS = 20  # more are not asked for


@dataclass(frozen=True)
class Judgement:
    """Args: see `fedexp.tables.report.report.Cell`."""

    verdict: Conclusion
    reason: str
    interval: tuple[float, float] | None = None
    near: bool | None = None
    settles: str = ""
    deterministic: bool = False


@dataclass(frozen=True)
class Difference:
    """Ours less the paper's, and how well n runs know it.

    The paper's number is a draw, too: the mean of `paper_runs` runs that spread as ours do or, where it prints a deviation, as
    that says (Welch's test).

    Args:
        d: difference of the means; s: sample standard deviation of our n runs.
        paper_sd: as printed, or None.
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
        """n - 1, or Welch's and Satterthwaite's where both sides have a deviation; one run that has one counts as two."""
        if self.paper_sd is None or not self.se:
            return self.n - 1
        ours = (self.s / math.sqrt(self.n) / self.se) ** 2  # its share of the variance
        return 1 / (ours**2 / (self.n - 1) + (1 - ours) ** 2 / max(1, self.paper_runs - 1))

    def half_width(self, confidence: float) -> float:
        """Of the two-sided interval around `d`."""
        return float(t.ppf((1 + confidence) / 2, self.df)) * self.se if self.se else 0.0

    def equivalent(self, tolerance: float) -> bool:
        """Two one-sided tests: the 90 % interval lies within the tolerance."""
        return abs(self.d) + self.half_width(1 - 2 * LEVEL) <= tolerance

    def beyond(self, tolerance: float) -> bool:
        """The 95 % interval lies wholly beyond the tolerance, on one side."""
        return abs(self.d) - self.half_width(1 - LEVEL) > tolerance

    def with_seeds(self, n: int) -> Difference:
        return Difference(self.d, self.s, n, self.paper_sd, self.paper_runs)


def judge(
    values: Sequence[float],
    paper: float,
    paper_sd: float | None,
    tolerance: float,
    paper_runs: int = 1,
) -> Judgement:
    """The verdict on at least one value of ours.

    `higher` and `lower` are of the number, whichever is better. An infinite number of the paper (a target that is never
    reached) is reproduced if every run of ours misses it, too.
    """
    if any(math.isnan(value) for value in values):
        return Judgement("inconclusive", "a run's number is NaN")
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return Judgement(
            "inconclusive", "one seed", near=mean == paper or abs(mean - paper) <= tolerance
        )
    if math.isinf(paper) or any(map(math.isinf, values)):
        return _infinite(values, paper)
    s = statistics.stdev(values) if len(set(values)) > 1 else 0.0
    found = Difference(mean - paper, s, n, paper_sd, paper_runs)
    half = found.half_width(1 - LEVEL)
    interval = (found.d - half, found.d + half)
    if found.equivalent(tolerance):
        return Judgement("reproduced", "", interval, deterministic=not s)
    if found.beyond(tolerance):
        side: Conclusion = "higher" if found.d > 0 else "lower"
        reason = f"the 95 % interval of the difference, {_interval_text(interval)}, lies beyond the tolerance {tolerance:g}"
        return Judgement(side, reason, interval, deterministic=not s)
    near = abs(found.d) <= tolerance
    settles = _settles(found, tolerance, near)
    reason = f"{'near' if near else 'far'}: the difference is {found.d:+.3g}, 95 % interval {_interval_text(interval)}; {settles}"
    return Judgement("inconclusive", reason, interval, near, settles, not s)


def _infinite(values: Sequence[float], paper: float) -> Judgement:
    """Of several runs, where the paper or some of ours never reach the target."""
    missed = sum(map(math.isinf, values))
    if missed == len(values) and math.isinf(paper):
        return Judgement("reproduced", "")
    if missed == len(values):
        return Judgement("higher", "no run of ours reaches the target")
    if not missed:
        return Judgement("lower", "every run of ours reaches a target that the paper's does not")
    return Judgement("inconclusive", f"{missed} of {len(values)} runs miss the target")


def _settles(found: Difference, tolerance: float, near: bool) -> str:
    """How many seeds of the same mean and spread would have settled it."""
    settled = Difference.equivalent if near else Difference.beyond
    for n in range(found.n + 1, _MOST_SEEDS + 1):
        if settled(found.with_seeds(n), tolerance):
            return f"{n} seeds would settle it"
    # Neither can be ruled out by the limit alone: Welch's interval may be narrower on the way there.
    enough = any(
        settled(found.with_seeds(_MOST_SEEDS * 2**power), tolerance) for power in range(1, 32)
    )
    return (
        f"more than {_MOST_SEEDS} seeds would settle it"
        if enough
        else "no number of seeds would settle it"
    )


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3g} to {interval[1]:+.3g}"


def mean_interval(values: Sequence[float], paper_runs: int) -> tuple[float, float] | None:
    """Of 95 % for the mean of at least one finite difference, the paper's side being a mean of `paper_runs`; None below two."""
    if len(values) < 2:
        return None
    found = Difference(
        statistics.mean(values), statistics.stdev(values), len(values), None, paper_runs
    )
    half = found.half_width(1 - LEVEL)
    return found.d - half, found.d + half
