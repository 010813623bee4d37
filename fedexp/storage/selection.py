"""Selection and ordering of stored runs by conditions.

An example of two conditions is ``method=fedavg partition.alpha<0.5``. The module needs
no torch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedexp.core.errors import ConfigError, nearest
from fedexp.storage.stored_run import StoredRun

ABSENT = object()
_CLAUSE = re.compile(r"([\w./-]+)(!=|<=|>=|=|<|>)(.+)")
_PARTS = re.compile(r"[./]")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def in_result(*keys: str) -> Callable[[StoredRun], Any]:
    """Return a function that reads a nested value of a result, None if it is absent."""

    def read(run: StoredRun) -> Any:
        value: Any = run.result
        for key in keys:
            value = (value or {}).get(key)
        return value

    return read


FACTS: Mapping[str, Callable[[StoredRun], Any]] = {
    "name": lambda run: run.name,
    "status": lambda run: run.status,
    "headline": lambda run: run.headline["value"] if run.headline else None,
    "seconds": in_result("seconds", "total"),
    "size": lambda run: run.size,
    "updated": lambda run: run.updated.isoformat(timespec="seconds"),
    "method": lambda run: run.choice("method"),
    "dataset": lambda run: run.choice("dataset"),
    "total/bytes_up": in_result("bytes", "up"),
    "total/bytes_down": in_result("bytes", "down"),
    "total/local_steps": in_result("local_steps"),
}
"""Properties of a run that are keys in conditions and tables. ``seconds`` is the time
of the whole run, with evaluation and logging."""


@dataclass(frozen=True)
class Condition:
    """A condition that compares the value of a key with given values.

    Args:
        key: Key of a run (see `value_of`).
        sign: Sign of the comparison.
        values: Values to compare with. With ``=`` one of them must match. With ``!=``
            none of them may match.
    """

    key: str
    sign: str
    values: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Condition:
        """Parse ``key=a,b``, ``key!=a``, ``key<0.5`` and so on.

        Raises:
            ConfigError: The text is not a condition.
        """
        found = _CLAUSE.fullmatch(text)
        if found is None or found.group(3).startswith("="):
            raise ConfigError(
                f"'{text}' is not a condition on runs",
                expected="key=value, key=a,b, key!=value, 'key<value', 'key>=value' "
                "(< and > in quotes, or the shell interprets them)",
            )
        key, sign, value = found.groups()
        several = sign in ("=", "!=") and not value.startswith("[")
        return cls(key, sign, tuple(value.split(",")) if several else (value,))

    def __call__(self, run: StoredRun) -> bool:
        """Return whether `run` meets the condition.

        A run without the key meets only ``!=``.
        """
        value = value_of(run, self.key)
        if self.sign in _ORDERS:
            return self._precedes(value)
        return any(_is(value, text) for text in self.values) == (self.sign == "=")

    def _precedes(self, value: Any) -> bool:
        text, order = self.values[0], _ORDERS[self.sign]
        if not is_number(value):
            return isinstance(value, str) and order(value, text)
        if (number := _number(text)) is None:
            raise ConfigError(
                f"'{self.key}' is a number in stored runs",
                expected=f"{self.key}{self.sign}NUMBER",
                got=text,
            )
        return bool(order(value, number))


def value_of(run: StoredRun, key: str) -> Any:
    """Return the value of `run` under `key`, or `ABSENT`.

    A key is a property of the run (such as ``status``), a config group, a dotted key of
    the config or a metric. The first of them that has this name counts. The value of a
    config group is the chosen option. The value of a metric is its last value.
    """
    if key in FACTS:
        return FACTS[key](run)
    if run.choices.get(key) is not None:
        return run.choices[key]

    node: Any = run.config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return (run.result.get("metrics") or {}).get(key, ABSENT)
        node = node[part]

    return node


def text_of(value: Any) -> str:
    """Return a value as it is typed in a condition."""
    if value is ABSENT:
        return "-"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer():  # 1.0 equals 1
        value = int(value)
    return str(value).replace(", ", ",")


def check_keys(runs: Sequence[StoredRun], keys: Sequence[str]) -> None:
    """Check that each key exists in at least one of `runs`.

    Raises:
        ConfigError: A key exists in none of them. The message names the nearest key.
    """
    for key in keys:
        if not runs or any(value_of(run, key) is not ABSENT for run in runs):
            continue

        near = nearest_key(key, {name for run in runs for name in _keys(run)})
        raise ConfigError(
            f"no run has the key '{key}'",
            expected=f"{', '.join(FACTS)}, a group, a metric, "
            "or a key of the config such as partition.alpha",
            do=f"did you mean '{near}'?"
            if near
            else "look at fedexp-runs show RUN and the run's config.yaml",
        )


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the key or metric of `known` that `key` most likely means, or None.

    The last part of a name is enough, such as ``alpha`` or ``acc``. If several names
    end in it, the shortest is returned.
    """
    names = sorted(known, key=lambda name: (len(_PARTS.split(name)), name))
    ends: dict[str, str] = {}
    for name in names:
        ends.setdefault(_PARTS.split(name)[-1], name)
    return ends.get(key) or nearest(key, names) or ends.get(nearest(key, ends) or "")


def select(runs: Sequence[StoredRun], clauses: Sequence[str]) -> list[StoredRun]:
    """Return the runs that meet all conditions in `clauses`, in the order of `runs`."""
    conditions = [Condition.of(text) for text in clauses]
    check_keys(runs, [condition.key for condition in conditions])
    return [run for run in runs if all(condition(run) for condition in conditions)]


def ordered(runs: Sequence[StoredRun], key: str) -> list[StoredRun]:
    """Return the runs sorted by their value of `key`.

    Numbers come first, from large to small. Then come texts from A to Z, then runs
    without a value.
    """
    check_keys(runs, [key])

    def place(run: StoredRun) -> tuple[int, float, str]:
        value = value_of(run, key)
        if is_number(value):
            return 0, math.inf if math.isnan(value) else -value, ""
        return (2, 0.0, "") if value in (None, ABSENT) else (1, 0.0, text_of(value))

    return sorted(runs, key=place)


def dotted_items(
    node: Mapping[str, Any], prefix: str = "", empty: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of nested mappings.

    Args:
        node: The mappings.
        prefix: Text before every key.
        empty: Whether an empty mapping is a value. Otherwise it is left out.
    """
    for key, value in node.items():
        if isinstance(value, Mapping) and (value or not empty):
            yield from dotted_items(value, f"{prefix}{key}.", empty)
        else:
            yield f"{prefix}{key}", value


def _keys(run: StoredRun) -> Iterator[str]:
    yield from FACTS
    yield from (group for group, option in run.choices.items() if option is not None)
    yield from run.result.get("metrics") or {}
    yield from (
        key
        for key, _ in dotted_items(
            {**run.resolved_config.values, "contents": run.resolved_config.contents}
        )
    )


def _is(value: Any, text: str) -> bool:
    number = _number(text)
    if number is not None and is_number(value):
        return bool(value == number)
    if value is None or isinstance(value, bool):
        return text_of(value) == text.lower()
    if isinstance(value, list) and value == _list(text):
        return True
    return value is not ABSENT and text_of(value) == text.replace(", ", ",")


def _list(text: str) -> Any:
    """Return the list that a condition contains, or None if the text is not a list."""
    try:
        return OmegaConf.to_container(OmegaConf.create(text)) if text.startswith("[") else None
    except (YAMLError, OmegaConfBaseException):
        return None


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number. A bool does not count as a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
