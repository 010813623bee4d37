"""Output that a run outlives: whoever reads it may leave (``| head``), or was never there (``>&-``).

What a run makes are files, and a reader that goes away has not asked for it to end; so it goes on in silence, and its exit
code is its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Meanwhile neither ``sys.stdout`` nor ``sys.stderr`` fails: once it cannot be written, what follows is dropped."""
    before = sys.stdout, sys.stderr
    if None in before:
        _occupy()
    sys.stdout, sys.stderr = (s if isinstance(s, _Lasting) else _Lasting(s) for s in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()  # what breaks shall break here
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream, or None where there is none."""

    def __init__(self, stream: Any) -> None:
        self._stream = _Nowhere() if stream is None else stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except (OSError, ValueError):
            self._leave()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._leave()

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except ValueError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # what it has buffered would fail again when Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        self._stream = _Nowhere()


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _occupy() -> None:
    """Open what is closed of the standard descriptors, or a run's file would get the number that libraries print to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
