"""Numbers as text in the lines that commands print."""

from __future__ import annotations

import math

# From this absolute value on, numbers are in scientific notation.
_LARGE = 1e5


def number_text(value: float) -> str:
    """Return a number as text, with four decimals if it is a float."""
    if abs(value) >= _LARGE and math.isfinite(value):
        return f"{value:.4e}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
