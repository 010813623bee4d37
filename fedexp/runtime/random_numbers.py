"""Guard against plug-ins that draw from a process's global random-number generators.

The random numbers of a run come from generators whose seeds are derived from names
(`fedexp.core.seeds`). A run that draws from a global generator could not be resumed
bit-exactly. Its results would also differ between engines, although such runs have the
same run ID. The guard therefore stops the run at the first client or step that draws
from a global generator.

The guard compares the states of the generators before and after the work of a plug-in.
It therefore detects every draw, also one by an unseeded `DataLoader` or in a library.
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

_MT19937_BYTES = 624 * 4 + 4  # 624 words of state, and the position in them

GeneratorStates = dict[str, object]  # state of each generator, by name of the generator


def generator_states(watch_python: bool = True) -> GeneratorStates:
    """Return the states of the global generators of torch, NumPy and Python.

    The call does not draw from the generators.

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
    """Return the state of NumPy's global generator.

    The result is only compared for equality. `numpy.random.get_state` takes longer than
    a training step of a small client. NumPy's default generator, a Mersenne Twister, is
    therefore read from memory: 624 words of 32 bits and the position in them. NumPy's
    public attribute ``ctypes.state_address`` gives the address. If a user has replaced
    the default generator, the attribute ``state`` is read.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return (
        ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if isinstance(generator, np.random.MT19937)
        else repr(generator.state)
    )


class WatchedPlugins(NamedTuple):
    """The plug-ins that `GlobalRandomGuard` watches.

    Args:
        paths: Class paths by config group.
        watch_python: Whether the generator of Python (`random`) is watched. It is
            watched only if a plug-in is in a user's module that imports `random`. The
            reason is that threads of trackers draw from this generator, too.
    """

    paths: Mapping[str, str]
    watch_python: bool

    @classmethod
    def of(cls, paths: Mapping[str, str]) -> WatchedPlugins:
        return cls(paths, imports_random(tuple(path.rpartition(".")[0] for path in paths.values())))


class GlobalRandomGuard:
    """A guard that detects whether plug-ins use a global generator.

    It compares the generators' states with their states when the guard was created.
    """

    def __init__(self, plugins: WatchedPlugins) -> None:
        self._plugins = plugins
        self._before = generator_states(plugins.watch_python)

    def changed_generators(self) -> list[str]:
        """Return the names of the generators whose state has changed.

        A state changes if numbers are drawn or if the generator is seeded.
        """
        after = generator_states(self._plugins.watch_python)
        return (
            []
            if after == self._before
            else [name for name in after if after[name] != self._before[name]]
        )

    def make_error(
        self, where: str, do: str, error: type[FedexpError] = FedexpError
    ) -> FedexpError:
        """Return the error that names the plug-ins and the changed generators.

        Args:
            where: Text for the message that states where the plug-ins ran.
            do: Advice for the message.
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
    """Raise an error if plug-ins use a global generator in the ``with`` block.

    Args:
        paths: Class paths of the plug-ins by config group.
        where: Text for the message that states where the plug-ins ran.
        do: Advice for the message.
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
