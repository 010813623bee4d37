"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

_LINE_SECONDS = 1.0  # plain lines: not more often than this, but at least ten a run
_BAR_SECONDS = 0.1
_SERVER_SECONDS = 10.0  # the server's work is told as often as this, where it takes so long


class Progress:
    """Rounds done, clients within the round, the headline metric, time left.

    Args:
        title: what is running; rounds: how many there will be at most; done: rounds that earlier attempts finished.
        shown: False keeps silent.
        name: of a run that shares the terminal with others: its lines begin with it, and there is no bar, which the others
            would write across.
    """

    def __init__(
        self, title: str, rounds: int, done: int = 0, shown: bool = True, name: str = ""
    ) -> None:
        self._title, self._rounds, self._done, self._silent, self._name = (
            title,
            rounds,
            done,
            not shown,
            name,
        )
        self._bar: Any = None
        self._task: Any = None
        self._shown = 0.0
        self._began = time.monotonic()
        self._first = done
        self._pending_line = ""  # the last round's line, while it was held back
        self._server_since: float | None = None  # the last client of the step under way finished
        self._ended = threading.Event()
        self._server_thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty() and not self._silent and not self._name:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            # fits 80 columns; the title, which may be long, has a line of its own
            columns = (BarColumn(bar_width=14), MofNCompleteColumn(), TextColumn("rounds"))
            facts = (TextColumn("{task.fields[clients]}"), TextColumn("{task.fields[facts]}"))
            self._bar = Bar(
                *columns, *facts, TextColumn("eta"), TimeRemainingColumn(), transient=True
            )
            self._task = self._bar.add_task(
                "", total=self._rounds, completed=self._done, clients="", facts=""
            )
            self._bar.start()
            self.note(self._title)
        if not self._silent:
            self._server_thread = threading.Thread(
                target=self._report_server_work, name="fedexp-progress", daemon=True
            )
            self._server_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._server_thread is not None:
            self._server_thread.join(1.0)
        if self._bar is not None:
            self._bar.stop()
        elif self._pending_line:  # ended early
            print(self._pending_line, flush=True)

    def client(self, done: int, of: int) -> None:
        """A client finished; nearly free. After the last one the server works."""
        if done == of:
            self._server_since = time.monotonic()
        if self._bar is None:
            return
        now = time.monotonic()
        if now - self._shown >= _BAR_SECONDS:
            self._shown = now
            self._bar.update(
                self._task, completed=self._done + done / of, clients=f"client {done}/{of}"
            )

    def step(self, row: dict[str, Any], headline: str, within: int | None) -> None:
        """A step finished; `headline` names the metric to show, with the last value where it was not measured now.

        Args:
            within: the step's number in its round, from 0; None: it ended the round.
        """
        self._server_since = None
        if within is not None:
            self._within(row["round"], within + 1)
            return
        self._done = row["round"]
        if self._silent:
            return
        if self._bar is not None:
            known = {"facts": f"{headline} {row[headline]:.4f}"} if headline in row else {}
            self._bar.update(self._task, completed=self._done, **known)
            return
        now = time.monotonic()
        finished = self._done - self._first
        left = (now - self._began) / finished * (self._rounds - self._done) if finished else 0.0
        line = f"round {self._done}/{self._rounds}  {_facts(row, headline)}  eta {_clock(left)}"
        self._pending_line = named(self._name, line)
        tenth = self._done % max(1, self._rounds // 10) == 0
        if now - self._shown >= _LINE_SECONDS or tenth or self._done == self._rounds:
            self._shown = now
            print(self._pending_line, flush=True)
            self._pending_line = ""

    def _report_server_work(self) -> None:
        """From a thread of its own, for matching and the like is one long call."""
        while not self._ended.wait(_SERVER_SECONDS):
            since, now = self._server_since, time.monotonic()
            if since is None or now - since < _SERVER_SECONDS:
                continue
            text = f"server {_clock(now - since)}"
            if self._bar is None:
                print(
                    named(self._name, f"round {self._done + 1}/{self._rounds}, {text}"), flush=True
                )
            else:
                self._bar.update(self._task, clients=text)

    def _within(self, round: int, step: int) -> None:
        """A step that does not end its round: shown now and then."""
        now = time.monotonic()
        if self._silent or now - self._shown < (
            _LINE_SECONDS if self._bar is None else _BAR_SECONDS
        ):
            return
        self._shown = now
        text = f"round {round}/{self._rounds}, step {step}"
        if self._bar is None:
            print(named(self._name, text), flush=True)
        else:
            self._bar.update(self._task, clients=f"step {step}")

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            print(text, flush=True)


def named(name: str, text: str) -> str:
    """A line of the run called `name`; of one that is alone, without a name, the text as it is."""
    return f"{name}: {text}" if name else text


def _facts(row: dict[str, Any], headline: str) -> str:
    shown = [name for name in (headline, "train/loss") if name in row]
    return "  ".join(f"{name} {row[name]:.4f}" for name in shown)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
