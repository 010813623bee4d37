"""Output streams whose failure does not end a run.

Writing to a stream fails if the program that reads it has ended (``| head``), or if the
stream is closed from the start (``>&-``). The results of a run are files, so they do
not need the output. The run therefore goes on silently, and its exit code does not
change. Some commands only print, such as `fedexp-runs` and `fedexp --dry-run`. They
call `require_output`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import threading
from typing import Any

# Control characters except tabs and line ends. A terminal obeys some of them.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Return a text with its control characters as escapes.

    Names and errors in stored files may come from other people. If they were printed
    without escapes, they could for example move the cursor or change the title of the
    terminal.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def lasting_output() -> _WrappedStreams:
    """Return a context in which ``sys.stdout`` and ``sys.stderr`` do not fail.

    After a failed write to a stream, later output to this stream is dropped. Characters
    that are not in a stream's encoding are written as escapes. Several contexts may be
    nested, or overlap in threads. The streams are restored when the last context ends.
    """
    return _STREAMS


def require_output() -> None:
    """Check, within `lasting_output`, that the standard output was written.

    A reader that has ended is not an error, and neither is a closed stream.

    Raises:
        OSError: It was not, for example because the disk is full.
    """
    sys.stdout.flush()
    error = getattr(sys.stdout, "error", None)
    if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        raise OSError(error.errno, os.strerror(error.errno), "standard output") from error


class _WrappedStreams(contextlib.ContextDecorator):
    """A context manager that wraps the output streams of the process.

    The streams are wrapped when the first context begins. They are restored when the
    last context ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        with self._lock:
            self._number += 1
            if self._number > 1:
                return
            self._before = sys.stdout, sys.stderr
            if None in self._before:
                _occupy_standard_descriptors()
            sys.stdout, sys.stderr = map(_UnbreakableStream, self._before)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    # An error in the flush is ignored here. Later, it would be shown.
                    stream.flush()
            self._number -= 1
            if not self._number:
                sys.stdout, sys.stderr = self._before


_STREAMS = _WrappedStreams()


class _UnbreakableStream:
    """A text stream that drops its output after a failed write.

    The wrapped stream may be None. Then all output is dropped.

    Attributes:
        error: The error of the failed write, None if there is none.
    """

    def __init__(self, stream: Any) -> None:
        self.error: Exception | None = None
        self._stream = _NullStream() if stream is None else stream

    def write(self, text: str) -> int:
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError) as error:
            self._leave(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._leave(error)

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except ValueError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _leave(self, error: Exception) -> None:
        self.error = error
        # Without this, writing the stream's buffer would fail again when Python ends.
        with contextlib.suppress(OSError, ValueError):
            if (number := self._stream.fileno()) in (1, 2):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
        self._stream = _NullStream()


class _NullStream(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def _occupy_standard_descriptors() -> None:
    """Open those of the file descriptors 0, 1 and 2 that are closed.

    They then refer to the null device. Otherwise the next file that the run opens would
    get one of these numbers, and output of libraries would be written into this file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # this also protects the files of child processes
    os.close(fd)
