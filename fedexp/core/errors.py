"""Errors with five parts: what, where, expected, got, and what to do."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from typing import Any


class FedexpError(Exception):
    """An error that a user can fix. The command line prints it without a traceback.

    Args:
        what: One sentence that names the problem.
        where: Config key, file, client or round.
        expected: The rule that was broken.
        got: The value that broke it.
        do: The next step.
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
        facts = [
            f"  {name + ':':<10}{_shortened(str(value))}"
            for name, value in self.facts.items()
            if value is not None
        ]
        return "\n".join([_shortened(self.what), *facts])

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes send errors to each other, so an error must be picklable.
        return (
            _rebuild,
            (type(self), self.what, self.facts, "".join(traceback.format_exception(self))),
        )


# Largest length of a part of an error message, in characters. A longer part is cut to
# its first and last 200 characters.
_LONGEST, _ENDS = 2000, 200


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_ENDS]} ... ({len(text)} characters) ... {text[-_ENDS:]}"


class RemoteError(Exception):
    """The traceback of an error in another process, as text.

    The error is raised again in this process, with this object as its ``__cause__``.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _rebuild(cls: type[FedexpError], what: str, facts: dict[str, Any], trace: str) -> FedexpError:
    error = cls(what)
    error.facts = facts
    error.__cause__ = RemoteError(trace)
    return error


class ConfigError(FedexpError):
    """A config that cannot be run. It is raised before any training."""


class DataError(FedexpError):
    """Data that are absent, damaged or cannot be partitioned as configured."""


class ClientError(FedexpError):
    """A client's job that failed, or a result that must not be aggregated."""


class StorageError(FedexpError):
    """A run folder, checkpoint or client-cache entry that cannot be used."""


def overflow(what: str) -> FedexpError:
    """Return the error for values with NaN or infinity, computed from finite weights.

    Args:
        what: Name of the values, in the plural.
    """
    return FedexpError(
        f"{what} are not finite",
        do="the clients' weights are as large as after a training that diverged: lower local.lr",
    )


def suggest(name: str, options: Iterable[str]) -> str:
    """Return advice that names the option nearest to `name`, other than `name` itself.

    If no option is near, the advice lists all options.
    """
    known = sorted({*options} - {name})
    if (near := nearest(name, known)) is not None:
        return f"did you mean '{near}'?"
    return f"use one of: {', '.join(known)}" if known else "remove it"


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option that `name` most likely means, or None.

    Capitals and separators are ignored. These rules are tried in order, and the first
    option that is found is returned:

    1. The option has the same letters as `name`.
    2. The option equals the initials of the words of `name` (``lr`` for
       ``learning_rate``).
    3. The option has similar letters.
    4. The initials of the option (``weight_decay`` for ``wd``) or its first word
       (``skip_client`` for ``skip``) equal `name`, and no other option fits this rule.
    """
    # If several options have the same letters, the first in alphabetical order is used.
    by_letters = {_letters(option): option for option in sorted(options, reverse=True)}
    known = sorted(by_letters.values())
    if (same := by_letters.get(_letters(name))) is not None:
        return same
    if len(initials := _initials(name)) > 1 and initials in known:
        return initials
    if near := difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.6):
        return by_letters[near[0]]
    long = [
        o for o in known if _initials(o) == name.lower() or o.lower().startswith(f"{name.lower()}_")
    ]
    return long[0] if len(name) > 1 and len(long) == 1 else None


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "") or name


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.lower().split("_"))
