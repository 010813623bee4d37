"""Random numbers that are a function of names cannot come from a process's global generators: plug-ins that use these are found.

Such a run would neither resume to the same bits nor have the same ones on another engine, and its address would stand for
several results; so it is refused, at the first client or step that does it. Compared are the generators' states before and
after a plug-in's work, which holds for every way to draw: a call of `torch.rand`, an unseeded `DataLoader`, a library's.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from fedexp.core.errors import FedexpError
from fedexp.core.user_code import is_ours
from fedexp.storage.identity import imports_random

_MT19937_BYTES = 624 * 4 + 4  # its words and its position among them

State = dict[str, object]  # of the generators by name, to be compared


def states(pythons: bool = True) -> State:
    """The states of torch's, NumPy's and, if asked for, Python's global generators. Nothing is drawn."""
    found: State = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "NumPy": _numpys(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch"] = (
            found["torch"],
            *(g.get_state().numpy().tobytes() for g in torch.cuda.default_generators),
        )
    if pythons:
        found["Python"] = random.getstate()
    return found


def _numpys() -> object:
    """Read where it lies: `numpy.random.get_state` takes longer than a small client's step."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        return _memory(generator.ctypes.state_address).raw
    return repr(generator.state)  # the user's own choice


@cache
def _memory(address: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _MT19937_BYTES).from_address(address)


class Plugins(NamedTuple):
    """What works somewhere.

    Args:
        paths: class paths, by config group.
        pythons: whether a user's module among theirs imports `random`; else Python's generator is not looked at, for
            trackers' threads draw from it, too.
    """

    paths: Mapping[str, str]
    pythons: bool

    @classmethod
    def of(cls, paths: Mapping[str, str]) -> Plugins:
        return cls(paths, imports_random(tuple(path.rpartition(".")[0] for path in paths.values())))


class Watch:
    """Sees whether `plugins` use a global generator from now on."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._before = states(plugins.pythons)

    def used(self) -> list[str]:
        """Whose generators were drawn from, or seeded."""
        after = states(self._plugins.pythons)
        return (
            []
            if after == self._before
            else [name for name in after if after[name] != self._before[name]]
        )

    def refusal(self, where: str, do: str, error: type[FedexpError] = FedexpError) -> FedexpError:
        """What is said of it; `error`: its kind."""
        own = {
            group: path for group, path in self._plugins.paths.items() if not is_ours(path)
        } or self._plugins.paths
        who = " or ".join(f"{group} {path.rpartition('.')[2]}" for group, path in own.items())
        return error(
            f"{who} draws from {' and '.join(self.used())}'s global generator: "
            "the run could be neither repeated nor resumed",
            where=where,
            expected="random numbers that are a function of names, drawn from generators of their own",
            do=do,
        )


@contextlib.contextmanager
def unused(
    paths: Mapping[str, str], where: str, do: str, error: type[FedexpError] = FedexpError
) -> Iterator[None]:
    """Refuse, with a `FedexpError` of the kind `error`, that the plug-ins of `paths` use a global generator in here."""
    watch = Watch(Plugins.of(paths))
    yield
    if watch.used():
        raise watch.refusal(where, do, error)


def class_path(plugin: object) -> str:
    """Dotted path of a plug-in's class."""
    kind = type(plugin)
    return f"{kind.__module__}.{kind.__qualname__}"
