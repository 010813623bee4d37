"""Ranges of hyper-parameters, as ``fedexp-tune`` reads them from its command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from fedexp.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

# Names of ranges of numbers. For each: whether its scale is logarithmic, and whether
# its values are whole numbers.
_INTERVALS = {
    "log": (True, False),
    "uniform": (False, False),
    "int": (False, True),
    "logint": (True, True),
}
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)\)")
# Names of functions in Hydra's overrides. A call of one of them is no misspelled range.
_HYDRA = ("choice", "range", "interval", "glob", "sort", "shuffle", "tag", "int", "float", "str")
# A value counts as at the edge of a range if its distance from the end is at most this
# fraction of the range, measured on the range's scale.
_EDGE = 0.05
# Fractions of a range, at one of which the value is not whole (up to four digits).
_BETWEEN = (0.382, 0.3813, 0.3787)
_SYNTAX = "log(LOW,HIGH), uniform(LOW,HIGH), int(LOW,HIGH), logint(LOW,HIGH) or values: A,B,C"


@dataclass(frozen=True)
class Interval:
    """A range of numbers.

    Args:
        key: Dotted key of the config.
        low: Smallest value.
        high: Largest value.
        log: Whether values are sampled uniformly in their logarithm.
        whole: Whether only whole numbers are sampled.
        text: The range as the user wrote it.
    """

    key: str
    low: float
    high: float
    log: bool
    whole: bool
    text: str

    @property
    def checked_values(self) -> list[str]:
        """Values that are checked before the first run.

        They are both ends, and a value between them, which shows whether the key takes
        numbers that are not whole.
        """
        ends = [self._text(self.low), self._text(self.high)]
        inner = [self._text(self.low + share * (self.high - self.low)) for share in _BETWEEN]
        between = next((text for text in inner if not float(text).is_integer()), inner[0])
        return ends if self.whole else [*ends, between]

    def suggest(self, trial: BaseTrial) -> str:
        """Sample a value. Numbers that are not whole have four significant digits."""
        if self.whole:
            whole = trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
            return self._text(whole)
        return self._text(trial.suggest_float(self.key, self.low, self.high, log=self.log))

    def edge(self, value: str) -> str | None:
        """Return ``lower`` or ``upper`` if a value is close to this edge, or None."""
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        share = (scale(float(value)) - low) / (high - low)
        if share <= _EDGE:
            return "lower"
        return "upper" if share >= 1 - _EDGE else None

    def position(self, value: str) -> float:
        """Return the coordinate of a value on the axis of a plot."""
        return float(value)

    def _text(self, value: float) -> str:
        if self.whole:
            return str(int(value))
        # Rounding must not leave the range.
        rounded = min(max(float(f"{value:.4g}"), self.low), self.high)
        return f"{rounded:g}" if float(f"{rounded:g}") == rounded else repr(rounded)


@dataclass(frozen=True)
class Choice:
    """A list of values.

    Args:
        key: Dotted key or config group.
        values: The values, as overrides write them.
        text: The list as the user wrote it.
    """

    key: str
    values: tuple[str, ...]
    text: str

    @property
    def checked_values(self) -> list[str]:
        """Values that are checked before the first run: all."""
        return [*self.values]

    @property
    def numbers(self) -> list[float] | None:
        """The values as numbers, or None if one of them is no number."""
        try:
            return [float(value) for value in self.values]
        except ValueError:
            return None

    def suggest(self, trial: BaseTrial) -> str:
        """Sample a value."""
        return str(trial.suggest_categorical(self.key, self.values))

    def edge(self, value: str) -> str | None:
        """Return the edge of the range on which a value lies.

        Returns:
            ``lower`` for the smallest value, ``upper`` for the largest value, and None
            for other values and for values that are no numbers.
        """
        numbers = self.numbers
        if numbers is None:
            return None
        if float(value) == min(numbers):
            return "lower"
        return "upper" if float(value) == max(numbers) else None

    def position(self, value: str) -> float:
        """Return the coordinate of a value on the axis of a plot.

        A value that is no number has its index as its coordinate.
        """
        return float(value) if self.numbers is not None else self.values.index(value)


Range = Interval | Choice


def parse_range(override: str) -> Range | None:
    """Return the range that an override contains, or None if it has a single value.

    Raises:
        ConfigError: The range is invalid.
    """
    key, equals, text = override.partition("=")
    if not equals:
        return None
    call = _CALL.fullmatch(text.strip())
    # With one argument, int is Hydra's conversion of a value.
    if (
        call is not None
        and call["name"] in _INTERVALS
        and (call["name"] not in _HYDRA or "," in call["arguments"])
    ):
        return _interval(key, call["name"], call["arguments"], override)
    if call is not None and call["name"] not in _HYDRA:
        near = nearest(call["name"], [*_INTERVALS, "choice", "range"])
        do = f"did you mean '{near}'?" if near else f"{key}=log(LOW,HIGH)"
        raise _invalid(override, f"'{call['name']}' is no kind of range", do)
    return _choice(key, override)


def _interval(key: str, name: str, arguments: str, override: str) -> Interval:
    log, whole = _INTERVALS[name]
    try:
        low, high = (float(part) for part in arguments.split(","))
    except ValueError:
        raise _invalid(override, f"{name} needs two numbers", f"{key}={name}(LOW,HIGH)") from None

    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise _invalid(override, "a range must begin below its end", "write the lower end first")
    if log and low <= 0:
        raise _invalid(
            override,
            f"a logarithmic range must begin above 0, got {low:g}",
            "raise its lower end, or use uniform(LOW,HIGH)",
        )
    if whole and not (low.is_integer() and high.is_integer()):
        raise _invalid(override, f"{name} needs whole numbers", "use log or uniform for others")
    return Interval(key, low, high, log, whole, override)


def _choice(key: str, override: str) -> Choice | None:
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
    except HydraException:
        # The composition reports other syntax errors with a suggestion.
        return None
    if not parsed.is_sweep_override():
        return None
    if not parsed.is_discrete_sweep():
        raise _invalid(override, "this range is not known", "write uniform(LOW,HIGH)")

    try:
        values = tuple(parsed.sweep_string_iterator())
    except HydraException:  # glob needs the names of the options, which Hydra reads later
        raise _invalid(override, "this range cannot be read here", "list the values") from None
    if len(set(values)) < len(values) or len(values) < 2:
        raise _invalid(override, "a list needs two or more values, each once", "correct the list")
    return Choice(key, values, override)


def _invalid(override: str, what: str, do: str) -> ConfigError:
    return ConfigError(what, where=override, expected=_SYNTAX, do=do)
