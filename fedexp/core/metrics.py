"""The deviation of the values of a metric."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def deviation(values: Sequence[float], *, is_sample: bool) -> float:
    """Return the standard deviation of values, NaN if one of them is not finite.

    Args:
        values: At least one value. A sample has at least two.
        is_sample: Whether to divide by n - 1 instead of n.
    """
    # For an infinite value, the functions of statistics raise an AttributeError
    if not all(map(math.isfinite, values)):
        return math.nan
    return (statistics.stdev if is_sample else statistics.pstdev)(values)
