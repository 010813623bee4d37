"""Rank agreement between two orders of the same methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def tied(values: Sequence[float], tie: float) -> list[float]:
    """Make values equal that are closer together than `tie`.

    The sorted values form groups: neighbours that are closer than `tie` are in the same
    group. Every value becomes the smallest value of its group.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = list(values)
    for before, here in itertools.pairwise(order):
        if values[here] - values[before] < tie:
            found[here] = found[before]
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1. Equal values share the mean of their ranks."""
    return [
        sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2
        for value in values
    ]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's coefficient, which is Pearson's correlation of the ranks.

    The result is None if there are fewer than two values, or if all values of `a` or
    all values of `b` are equal.
    """
    x, y = ranks(a), ranks(b)
    if len(x) < 2:
        return None
    mean = (len(x) + 1) / 2
    xx, yy = sum((v - mean) ** 2 for v in x), sum((v - mean) ** 2 for v in y)
    if not xx or not yy:
        return None
    return sum((v - mean) * (w - mean) for v, w in zip(x, y, strict=True)) / math.sqrt(xx * yy)
