"""Metrics by their names: their direction, and the deviation of their values."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

# Names of metrics that are minimised, besides names that contain "loss".
_ERRORS = {"error", "error_rate", "mse", "rmse", "mae", "nll", "perplexity", "ece"}
# Endings of the metrics of several clients or of one class.
_ENDING = re.compile(r"_(mean|std|min|worst_10|of_class_\d+)$")


def is_minimised(name: str) -> bool:
    """Return whether lower values of a metric are better, by its name.

    The name contains ``loss``, or it is the name of an error, such as ``mse``. Prefixes
    (``test/global/``) do not count. The endings ``_mean``, ``_std``, ``_min``,
    ``_worst_10`` and ``_of_class_<c>`` do not count either.
    """
    return "loss" in name or _ENDING.sub("", name.rpartition("/")[2].lower()) in _ERRORS


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
