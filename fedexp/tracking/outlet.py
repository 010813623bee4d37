"""Output that a run outlives: whoever reads it may leave (``| head``), or was never there (``>&-``).

What a run makes are files, and a reader that goes away has not asked for it to end; so it goes on in silence, and its exit
code is its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Meanwhile neither ``sys.stdout`` nor ``sys.stderr`` fails: once it cannot be written, what follows is dropped.

    What the stream's encoding lacks is written as an escape. Nested and overlapping uses (threads) end with the last one.
    """
    _STREAMS.enter()
    try:
        yield
    finally:
        _STREAMS.leave()


class _WrappedStreams:
    """The process's streams, wrapped from the first use to the end of the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._before: tuple[Any, Any] = (None, None)

    def enter(self) -> None:
        with self._lock:
            self._number += 1
            if self._number > 1:
                return
            self._before = sys.stdout, sys.stderr
            if None in self._before:
                _occupy_standard_descriptors()
            sys.stdout, sys.stderr = map(_UnbreakableStream, self._before)

    def leave(self) -> None:
        with self._lock:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()  # what breaks shall break here
            self._number -= 1
            if not self._number:
                sys.stdout, sys.stderr = self._before


_STREAMS = _WrappedStreams()


class _UnbreakableStream:
    """A text stream, or None where there is none."""

    def __init__(self, stream: Any) -> None:
        self._stream = _NullStream() if stream is None else stream

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
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
        with contextlib.suppress(
            OSError, ValueError
        ):  # what it has buffered would fail again when Python ends
            if (number := self._stream.fileno()) in (1, 2):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
        self._stream = _NullStream()


class _NullStream(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _occupy_standard_descriptors() -> None:
    """Open what is closed of the standard descriptors, or a run's file would get the number that libraries print to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # the files of child processes, too
    os.close(fd)
