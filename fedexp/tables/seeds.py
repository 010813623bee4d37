"""Comparisons of columns on runs that are paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.stats import ttest_rel

from fedexp.tables.verdicts import LEVEL

# Seeds of a run. Two runs of different columns are a pair if their seeds are equal.
Seeds = tuple[object, ...]
# Numbers that differ by at most this share of the largest one differ only by rounding.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Comparison:
    """The difference between columns b and a (b minus a) on their common seeds.

    Args:
        a: Key of the first column.
        b: Key of the second column.
        seeds: Common seeds.
        difference: Mean of the paired differences, None without pairs.
        interval: 95 % interval (Student's t).
        p: Two-sided p value, adjusted if several comparisons were made. Both `p` and
            `interval` are None if there are fewer than two pairs, if all differences
            are equal, or if a difference is not finite.
    """

    a: str
    b: str
    seeds: tuple[Seeds, ...]
    difference: float | None
    interval: tuple[float, float] | None = None
    p: float | None = None

    @property
    def verdict(self) -> str:
        """The result of the test."""
        if len(self.seeds) < 2:
            return (
                f"no test: {len(self.seeds) or 'no'} common "
                f"seed{'' if len(self.seeds) == 1 else 's'}"
            )
        assert self.difference is not None
        if not math.isfinite(self.difference):
            return "no test: a value is not finite"
        if self.p is None:
            return "no test: the differences do not vary"
        if self.p >= LEVEL:
            return "undecided"
        return f"{self.b} {'higher' if self.difference > 0 else 'lower'}"


def compare(
    a: str, b: str, left: Mapping[Seeds, float], right: Mapping[Seeds, float]
) -> Comparison:
    """Compare column b with column a.

    Args:
        a: Key of the first column.
        b: Key of the second column.
        left: Values of a by seeds.
        right: Values of b by seeds.
    """
    common = tuple(seeds for seeds in left if seeds in right)
    differences = [right[seeds] - left[seeds] for seeds in common]
    mean = sum(differences) / len(common) if common else None
    if len(common) < 2 or not all(map(math.isfinite, differences)):
        return Comparison(a, b, common, mean)
    largest = max(abs(column[seeds]) for column in (left, right) for seeds in common)
    if max(differences) - min(differences) <= ROUNDING * largest:
        return Comparison(a, b, common, mean)
    tested = ttest_rel([right[seeds] for seeds in common], [left[seeds] for seeds in common])
    low, high = tested.confidence_interval(1 - LEVEL)
    return Comparison(a, b, common, mean, (float(low), float(high)), float(tested.pvalue))


def adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Adjust the p values for the number of comparisons by Holm's method.

    Reference:
        Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    tested = sorted((c.p, number) for number, c in enumerate(comparisons) if c.p is not None)
    found, least = list(comparisons), 0.0
    for rank, (p, number) in enumerate(tested):
        least = max(least, min(1.0, p * (len(tested) - rank)))
        found[number] = replace(found[number], p=least)
    return found
