"""Guard against plug-ins that draw from a process's global random-number generators.

The random numbers of a run are a function of names (`fedexp.core.seeds`). A run that
draws from a global generator could not be resumed bit-exactly. Its results would differ
between engines, so one run ID would have several results. Such a run is therefore
stopped at the first client or step that draws.

The guard compares the states of the generators before and after the work of a plug-in.
It therefore detects every draw, also by an unseeded `DataLoader` or in a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fedexp.core.device import global_generator_states
from fedexp.core.errors import FedexpError
from fedexp.core.user_code import is_ours
from fedexp.storage.identity import imports_random

_MT19937_BYTES = 624 * 4 + 4  # the words of the state and the position among them

GeneratorStates = dict[str, object]  # generator name to state, to be compared


def generator_states(watch_python: bool = True) -> GeneratorStates:
    """Return the states of the global generators of torch, NumPy and Python.

    Nothing is drawn.

    Args:
        watch_python: Whether the generator of Python is included.
    """
    found: GeneratorStates = {
        "torch": global_generator_states(),
        "NumPy": _numpy_state(),
    }
    if watch_python:
        found["Python"] = random.getstate()
    return found


def _numpy_state() -> object:
    """Return the state of NumPy's global generator, to be compared for equality.

    `numpy.random.get_state` takes longer than a training step of a small client. The
    state of a Mersenne Twister is therefore copied from memory. NumPy's public
    attribute ``ctypes.state_address`` gives the address, which holds 624 words of 32
    bits and the position among them. If a user has installed another bit generator, its
    ``state`` is read.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return (
        ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if isinstance(generator, np.random.MT19937)
        else repr(generator.state)
    )


class WatchedPlugins(NamedTuple):
    """The plug-ins that work in a guarded block.

    Args:
        paths: Class paths by config group.
        watch_python: Whether the generator of Python is compared. Threads of trackers
            draw from this generator too. It is therefore compared only if a user's
            module among the plug-ins imports `random`.
    """

    paths: Mapping[str, str]
    watch_python: bool

    @classmethod
    def of(cls, paths: Mapping[str, str]) -> WatchedPlugins:
        return cls(paths, imports_random(tuple(path.rpartition(".")[0] for path in paths.values())))


class GlobalRandomGuard:
    """A guard that detects whether `plugins` use a global generator.

    It compares the generators' states with those at its creation.
    """

    def __init__(self, plugins: WatchedPlugins) -> None:
        self._plugins = plugins
        self._before = generator_states(plugins.watch_python)

    def changed_generators(self) -> list[str]:
        """Return the names of the generators that were drawn from or seeded."""
        after = generator_states(self._plugins.watch_python)
        return (
            []
            if after == self._before
            else [name for name in after if after[name] != self._before[name]]
        )

    def make_error(
        self, where: str, do: str, error: type[FedexpError] = FedexpError
    ) -> FedexpError:
        """Return the error that names the plug-ins and the generators.

        Args:
            where: Place of the work, for the message.
            do: Advice, for the message.
            error: Type of the error.
        """
        own = {
            group: path for group, path in self._plugins.paths.items() if not is_ours(path)
        } or self._plugins.paths
        who = " or ".join(f"{group} {path.rpartition('.')[2]}" for group, path in own.items())
        return error(
            f"{who} draws from {' and '.join(self.changed_generators())}'s global generator: "
            "the run could not be repeated or resumed",
            where=where,
            expected="random numbers that are a function of names, from separate generators",
            do=do,
        )


@contextlib.contextmanager
def forbid_global_random(
    paths: Mapping[str, str], where: str, do: str, error: type[FedexpError] = FedexpError
) -> Iterator[None]:
    """Raise an error if the plug-ins of `paths` use a global generator in this context.

    Args:
        paths: Class paths by config group.
        where: Place of the work, for the message.
        do: Advice, for the message.
        error: Type of the error.

    Raises:
        FedexpError: A generator was drawn from or seeded. The type is `error`.
    """
    guard = GlobalRandomGuard(WatchedPlugins.of(paths))
    yield
    if guard.changed_generators():
        raise guard.make_error(where, do, error)


def class_path(plugin: object) -> str:
    """Return the dotted path of a plug-in's class."""
    kind = type(plugin)
    return f"{kind.__module__}.{kind.__qualname__}"
