"""Errors that say what is wrong, where, what was expected, what came instead, and what to do."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from typing import Any


class FedexpError(Exception):
    """An error a user can act on. The command line prints it without a traceback.

    Args:
        what: one sentence that says what is wrong.
        where: config key, file, client or round it belongs to.
        expected, got: the rule and the value that broke it.
        do: the next step.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: Any = None,
        got: Any = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.facts = {"where": where, "expected": expected, "got": got, "to do": do}

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {name + ':':<10}{value}" for name, value in self.facts.items() if value is not None]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:  # processes send each other errors
        return (_rebuild, (type(self), self.what, self.facts, "".join(traceback.format_exception(self))))


class RemoteError(Exception):
    """The traceback of an error in another process, as text: the cause of that error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuild(cls: type[FedexpError], what: str, facts: dict[str, Any], trace: str) -> FedexpError:
    error = cls(what)
    error.facts = facts
    error.__cause__ = RemoteError(trace)
    return error


class ConfigError(FedexpError):
    """A config that cannot be run; raised before any training."""


class DataError(FedexpError):
    """Data that are absent, damaged or cannot be partitioned as asked."""


class ClientError(FedexpError):
    """A client's work failed or returned something that must not be aggregated."""


class StorageError(FedexpError):
    """A run folder, checkpoint or memo entry that cannot be used."""


def suggest(name: str, options: Iterable[str]) -> str:
    """'did you mean ...?' for the nearest of `options` that is not `name`, or the list of them where nothing is near."""
    known = sorted({*options} - {name})
    if (near := nearest(name, known)) is not None:
        return f"did you mean '{near}'?"
    return f"use one of: {', '.join(known)}" if known else "remove it"


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that `name` most likely is: of like letters, or its words' initials (learning_rate: lr); None: none is near."""
    known = sorted(options)
    initials = "".join(word[:1] for word in name.split("_"))
    if len(initials) > 1 and initials in known:
        return initials
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)
