"""A logger that raises, exits or hangs is switched off after one warning.

The run continues, and the process can end.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedexp.core.errors import FedexpError
from fedexp.tracking.feed import Feed
from fedexp.tracking.logger import Logger, RunInfo

ROWS = [{"round": r, "test/global/acc": r / 10} for r in (1, 2, 3)]


@dataclass
class Scripted(Logger):
    """A logger that does `trouble` in the call named `where`.

    It records its calls and their threads.
    """

    where: str = ""
    trouble: Any = field(default=lambda: None)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def _call(self, name: str, value: Any) -> None:
        self.calls.append((name, value))
        self.threads.add(threading.get_ident())
        if name == self.where:
            self.trouble()

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        self._call("open", history)

    def log(self, row: dict[str, Any]) -> None:
        self._call("log", row)

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        self._call("close", status)


def boom() -> None:
    raise ConnectionError("no route\nto host")


def run_info(folder: Path) -> RunInfo:
    return RunInfo(
        "id", "method=fedavg seed=0", None, {"method": "fedavg"}, folder, ("fedavg",), resumed=False
    )


def feed_all(logger: Logger, folder: Path) -> list[str]:
    """Log a whole run and return the warnings."""
    warnings: list[str] = []
    feed = Feed(logger, warnings.append)
    feed.open(run_info(folder), ROWS[:1])
    for row in ROWS[1:]:
        feed.log(row)
    feed.close("done", None)
    return warnings


def wait_for_failure(feed: Feed) -> None:
    feed._thread.join(10)
    assert not feed._thread.is_alive()


def test_calls_arrive_in_order_in_one_other_thread(tmp_path: Path) -> None:
    logger = Scripted()
    assert feed_all(logger, tmp_path) == []
    assert logger.calls == [
        ("open", ROWS[:1]),
        ("log", ROWS[1]),
        ("log", ROWS[2]),
        ("close", "done"),
    ]
    assert len(logger.threads) == 1
    assert threading.get_ident() not in logger.threads


def test_the_caller_may_go_on_changing_its_row(tmp_path: Path) -> None:
    held = threading.Event()
    logger = Scripted(where="open", trouble=held.wait)
    feed = Feed(logger, print)
    feed.open(run_info(tmp_path), [])
    row = dict(ROWS[0])
    feed.log(row)
    row.clear()
    held.set()
    feed.close("done", None)
    assert logger.calls[1] == ("log", ROWS[0])


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_one_warning_for_a_logger_that_raises(tmp_path: Path, where: str) -> None:
    logger = Scripted(where=where, trouble=boom)
    warnings = feed_all(logger, tmp_path)
    assert len(warnings) == 1
    assert "Scripted is switched off" in warnings[0]
    assert f"{where}: ConnectionError: no route" in warnings[0]
    assert "\n" not in warnings[0]


def test_a_logger_cannot_end_the_run_by_exiting(tmp_path: Path) -> None:
    assert len(feed_all(Scripted(where="log", trouble=lambda: sys.exit(3)), tmp_path)) == 1


def test_a_logger_that_failed_is_told_to_free_what_it_holds_and_then_left_alone(
    tmp_path: Path,
) -> None:
    logger = Scripted(where="log", trouble=boom)
    feed_all(logger, tmp_path)
    assert logger.calls == [("open", ROWS[:1]), ("log", ROWS[1]), ("close", "failed")]
    logger = Scripted(where="open", trouble=boom)
    feed_all(logger, tmp_path)
    assert logger.calls == [("open", ROWS[:1])]


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_one_warning_for_a_logger_that_hangs(tmp_path: Path, where: str) -> None:
    held = threading.Event()
    logger = Scripted(where=where, trouble=held.wait, timeout=0.05)
    warnings = feed_all(logger, tmp_path)
    held.set()
    assert len(warnings) == 1
    assert "0.05 s" in warnings[0]


def test_a_logger_that_still_hangs_at_the_end_is_abandoned_once_and_may_free_what_it_holds(
    tmp_path: Path,
) -> None:
    @dataclass
    class Freed(Scripted):
        held: threading.Event = field(default_factory=threading.Event)

        def abandon(self) -> bool:
            self.calls.append(("abandon", None))
            self.held.set()
            return True

    logger = Freed(where="log", timeout=0.05)
    logger.trouble = lambda: logger.held.wait(20)
    assert len(feed_all(logger, tmp_path)) == 1
    # After `abandon` freed the resource, the logger is closed
    assert [name for name, _ in logger.calls] == ["open", "log", "abandon", "close"]
    raising = Freed(where="log", trouble=boom)
    feed_all(raising, tmp_path)
    assert [name for name, _ in raising.calls] == ["open", "log", "close"]


def test_a_hanging_call_is_noticed_while_the_run_goes_on(tmp_path: Path) -> None:
    held = threading.Event()
    warnings: list[str] = []
    feed = Feed(Scripted(where="open", trouble=held.wait, timeout=0.01), warnings.append)
    feed.open(run_info(tmp_path), [])
    while not warnings:
        feed.log(ROWS[0])
    feed.log(ROWS[1])
    feed.close("done", None)
    held.set()
    assert warnings == [warnings[0]]
    assert "open took longer than 0.01 s" in warnings[0]


def test_the_wait_at_the_end_is_bounded_as_a_whole(tmp_path: Path) -> None:
    """Many calls shorter than the timeout must not add up to a long wait."""
    pause = threading.Event()
    logger = Scripted(where="log", trouble=lambda: pause.wait(0.04), timeout=0.1)
    warnings: list[str] = []
    feed = Feed(logger, warnings.append)
    feed.open(run_info(tmp_path), [])
    for number in range(1, 101):
        feed.log({"round": number})
    feed.close("done", None)
    pause.set()
    assert len(warnings) == 1
    assert sum(name == "log" for name, _ in logger.calls) < 100


@pytest.mark.parametrize("where", ["open", "log"])
def test_strict_raises_at_the_next_call_and_only_there(tmp_path: Path, where: str) -> None:
    warnings: list[str] = []
    feed = Feed(Scripted(where=where, trouble=boom, strict=True), warnings.append)
    feed.open(run_info(tmp_path), [])
    if where == "log":
        feed.log(ROWS[0])
    wait_for_failure(feed)
    with pytest.raises(FedexpError, match=f"logger Scripted failed: {where}: ConnectionError"):
        feed.log(ROWS[1])
    feed.log(ROWS[2])
    feed.close("failed", None)
    assert warnings == []


def test_strict_does_not_undo_a_finished_run(tmp_path: Path) -> None:
    assert len(feed_all(Scripted(where="close", trouble=boom, strict=True), tmp_path)) == 1


def test_notes_of_a_logger_are_told_from_the_run_s_thread(tmp_path: Path) -> None:
    logger = Scripted(where="open")
    logger.trouble = lambda: logger.note("Continuing offline")
    assert feed_all(logger, tmp_path) == ["Continuing offline"]


def test_the_process_ends_while_a_logger_hangs(tmp_path: Path) -> None:
    program = f"""
        import threading
        from pathlib import Path
        from fedexp.tracking.feed import Feed
        from fedexp.tracking.local import LocalLogger
        from fedexp.tracking.logger import RunInfo

        class Hanging(LocalLogger):
            def log(self, row):
                threading.Event().wait()

        feed = Feed(Hanging(timeout=0.05), print)
        feed.open(RunInfo("id", "name", None, {{}}, Path({str(tmp_path)!r}), (), False), [])
        feed.log({{"round": 1}})
        feed.close("done", None)
        print("end of the program")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "end of the program"
    assert done.stdout.count("switched off") == 1
