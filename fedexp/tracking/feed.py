"""A background thread that calls a logger, so that a tracker cannot slow down a run.

An error of the tracker (such as W&B) cannot stop the run either, unless
``logger.strict`` is set.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from fedexp.core.errors import FedexpError
from fedexp.tracking.logger import Logger, RunInfo

Call = Callable[[], None]
_LAST_SECONDS = 5.0  # seconds that an abandoned logger has to free its resources


class Feed:
    """A queue of calls to a logger, which one daemon thread executes in order.

    If a call raises an error or takes longer than ``logger.timeout`` seconds, the
    logger is switched off and one warning is shown. The run goes on, and the process
    can exit. With ``logger.strict`` there is no warning. Instead, the next call of
    `open` or `log` raises `FedexpError`.

    Args:
        logger: Logger to feed.
        warn: Callback that shows the user one line: a warning, or a note of the logger.
            It is called in the thread that calls this object's methods.

    Attributes:
        failure: Reason why the logger was switched off, or None while it works.
    """

    def __init__(self, logger: Logger, warn: Callable[[str], None]) -> None:
        self._logger, self._warn = logger, warn
        self._calls: queue.SimpleQueue[tuple[str, Call]] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Call that is running, and the time of its start.
        self._busy: tuple[str, float] | None = None
        self.failure: str | None = None
        self._reported = False
        self._opened = False
        self._logger.note = self._notes.put

        self._thread = threading.Thread(target=self._work, name="fedexp-logger", daemon=True)
        self._thread.start()

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin logging.

        Args:
            run: Description of the run.
            history: Rows that earlier attempts at the run wrote. Empty for a new run.
        """
        rows = [dict(row) for row in history]
        self._put("open", lambda: self._logger.open(run, rows))

    def log(self, row: dict[str, Any]) -> None:
        """Log one step. The call returns at once."""
        row = dict(row)  # the caller may change its own row afterwards
        self._put("log", lambda: self._logger.log(row))

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """End logging.

        The method waits at most ``logger.timeout`` seconds for the queued calls. If the
        logger is then abandoned (`Logger.abandon`), the method may wait a few more
        seconds. It never raises an error, because the run has already ended.

        Args:
            status: ``done``, ``failed`` or ``interrupted``.
            result: Result of the run, or None if the run has no result.
        """
        self._watch()
        if self.failure is None:
            self._calls.put(("close", lambda: self._logger.close(status, result)))

        deadline = time.monotonic() + self._logger.timeout
        while self._thread.is_alive() and not self._hangs():
            self._thread.join(0.02)
            self._watch()
            if time.monotonic() > deadline and self._thread.is_alive():
                self.failure = (
                    self.failure or f"it had not finished {self._logger.timeout:g} s after the run"
                )
                break

        self._watch()
        self._report(strict=False)
        with contextlib.suppress(Exception):  # the logger's failure is known already
            if self._thread.is_alive() and self._logger.abandon():
                self._thread.join(_LAST_SECONDS)

    def _put(self, name: str, call: Call) -> None:
        self._watch()
        self._report(strict=self._logger.strict)
        if self.failure is None:
            self._calls.put((name, call))

    def _watch(self) -> None:
        """Record a failure if the running call takes too long."""
        if (name := self._hangs()) and self.failure is None:
            self.failure = f"{name} took longer than {self._logger.timeout:g} s"

    def _hangs(self) -> str:
        """Return the name of the running call if it takes too long, else ""."""
        name, since = self._busy or ("", math.inf)
        return name if time.monotonic() - since > self._logger.timeout else ""

    def _report(self, strict: bool) -> None:
        while not self._notes.empty():
            self._warn(self._notes.get())

        if self.failure is None or self._reported:
            return

        self._reported = True
        name = type(self._logger).__name__
        if strict:
            raise FedexpError(
                f"logger {name} failed: {self.failure}",
                where="logger",
                do="set logger.strict=false",
            )

        self._warn(
            f"warning: logger {name} is switched off: {self.failure}. "
            "The run goes on, and its files are complete."
        )

    def _work(self) -> None:
        name = ""
        while self.failure is None and name != "close":
            name, call = self._calls.get()
            if self.failure is not None:  # a failure was recorded while this thread waited
                break
            self._busy = (name, time.monotonic())
            try:
                call()
                self._opened = self._opened or name == "open"
            except BaseException as error:  # noqa: BLE001 - trackers raise anything
                # SystemExit is caught too, because a tracker must not end the run.
                first = (str(error) or "no message").splitlines()[0]
                self.failure = self.failure or f"{name}: {type(error).__name__}: {first}"
            self._busy = None
        if self.failure is not None and self._opened and name != "close":
            # Free the tracker's files and processes. An error here is ignored, because
            # the logger's failure was reported already.
            self._busy = ("close", time.monotonic())
            with contextlib.suppress(BaseException):
                self._logger.close("failed", None)
