"""Rank agreement between two orders of the same methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def tied(values: Sequence[float], tie: float) -> list[float]:
    """`values` with those that lie closer together than `tie`, or are linked by such neighbours, set to one value: their
    smallest."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = list(values)
    for before, here in itertools.pairwise(order):
        if values[here] - values[before] < tie:
            found[here] = found[before]
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    return [
        sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2
        for value in values
    ]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks; None where there are fewer than two or one side is all tied."""
    x, y = ranks(a), ranks(b)
    if len(x) < 2:
        return None
    mean = (len(x) + 1) / 2
    xx, yy = sum((v - mean) ** 2 for v in x), sum((v - mean) ** 2 for v in y)
    if not xx or not yy:
        return None
    return sum((v - mean) * (w - mean) for v, w in zip(x, y, strict=True)) / math.sqrt(xx * yy)
