"""One thread that feeds a logger, so that a tracker can neither stop nor slow a run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from fedexp.core.errors import FedexpError
from fedexp.tracking.logger import Logger, RunInfo

Call = Callable[[], None]


class Feed:
    """Calls `logger` in a daemon thread, in order.

    A call that raises, or takes longer than ``logger.timeout``, switches the logger off after one warning; the run goes
    on and the process can exit. With ``logger.strict`` it raises at the run's next call instead.
    """

    def __init__(self, logger: Logger, warn: Callable[[str], None]) -> None:
        self._logger, self._warn = logger, warn
        self._calls: queue.SimpleQueue[tuple[str, Call] | None] = queue.SimpleQueue()
        self._busy: tuple[str, float] | None = None  # the call under way and since when
        self._failure: str | None = None
        self._told = False
        self._thread = threading.Thread(target=self._work, name="fedexp-logger", daemon=True)
        self._thread.start()

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        self._put("open", lambda: self._logger.open(run, history))

    def log(self, row: dict[str, Any]) -> None:
        self._put("log", lambda: self._logger.log(row))

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """End, waiting for what is queued as long as each call keeps within the timeout."""
        strict, self._logger.strict = self._logger.strict, False  # the run is over: nothing is left to stop
        self._put("close", lambda: self._logger.close(status, result))
        self._calls.put(None)
        while self._thread.is_alive() and self._failure is None:
            self._thread.join(0.01)
            self._watch()
        self._tell()
        self._logger.strict = strict

    def _put(self, name: str, call: Call) -> None:
        self._watch()
        self._tell()
        if self._failure is None:
            self._calls.put((name, call))

    def _watch(self) -> None:
        """Notice a call that hangs."""
        busy = self._busy
        if busy is not None and time.monotonic() - busy[1] > self._logger.timeout and self._failure is None:
            self._failure = f"{busy[0]} took longer than {self._logger.timeout:g} s"

    def _tell(self) -> None:
        if self._failure is None or self._told:
            return
        self._told = True
        name = type(self._logger).__name__
        if self._logger.strict:
            raise FedexpError(f"logger {name} failed: {self._failure}", where="logger", do="set logger.strict=false")
        self._warn(f"warning: logger {name} is switched off: {self._failure}. The run goes on; its files are complete.")

    def _work(self) -> None:
        while (item := self._calls.get()) is not None and self._failure is None:
            name, call = item
            self._busy = (name, time.monotonic())
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run outlives it
                self._failure = self._failure or f"{name}: {type(error).__name__}: {error}"
            self._busy = None
