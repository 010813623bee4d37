"""Progress of a run: a bar if the output is a terminal, and plain lines otherwise."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from fedexp.tracking.numbers import number_text

# Minimum seconds between plain lines. After each tenth of the rounds, a line is printed
# even if less time has passed.
_LINE_SECONDS = 1.0
_BAR_SECONDS = 0.1  # minimum seconds between changes of the bar within a round
_SERVER_SECONDS = 10.0  # seconds between reports on the work of the server


class Progress:
    """A display of the progress of a run.

    It shows finished rounds, clients within the round, the headline metric and the time
    left.

    Args:
        title: Description of the run.
        rounds: Maximum number of rounds.
        done: Number of rounds that earlier attempts finished.
        shown: Whether anything is shown.
        name: Name of the run if it shares the terminal with other runs, else "". If
            there is a name, the run's lines begin with it. There is then no bar,
            because the lines of other runs would break the bar.
    """

    def __init__(
        self, title: str, rounds: int, done: int = 0, shown: bool = True, name: str = ""
    ) -> None:
        self._title = title
        self._rounds = rounds
        self._done = done
        self._silent = not shown
        self._name = name
        self._bar: Any = None
        self._task: Any = None
        self._shown = 0.0
        self._began = time.monotonic()
        self._first = done
        self._pending_line = ""  # line of the last round, if it was not printed
        # Time when the last client of the current step finished. None before that.
        self._server_since: float | None = None
        self._ended = threading.Event()
        self._server_thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty() and not self._silent and not self._name:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            # The bar fits into 80 columns. The title, which may be long, has a separate
            # line.
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

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._server_thread is not None:
            self._server_thread.join(1.0)
        if self._bar is not None:
            self._bar.stop()
        elif self._pending_line:  # the run ended early
            print(self._pending_line, flush=True)

    def client(self, done: int, of: int) -> None:
        """Show that a client finished.

        The call takes almost no time. When the last client of a step has finished, the
        server's work begins, and its time is measured.

        Args:
            done: Number of finished clients.
            of: Number of clients of the step.
        """
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
        """Show that a step finished.

        Args:
            row: Metrics of the step.
            headline: Name of the metric to show. If it was not measured in this step, a
                bar keeps its last value, and a plain line omits it.
            within: Number of the step in its round, from 0. None if the step is the
                last one of the round.
        """
        self._server_since = None
        if within is not None:
            self._within(row["round"], within + 1)
            return
        self._done = row["round"]
        if self._silent:
            return
        if self._bar is not None:
            known = {"facts": f"{headline} {number_text(row[headline])}"} if headline in row else {}
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
        """Report how long the server has been working, until the run ends.

        A separate thread does this, because the server's work may be one long call (for
        example matching).
        """
        while not self._ended.wait(_SERVER_SECONDS):
            since, now = self._server_since, time.monotonic()
            if since is None or now - since < _SERVER_SECONDS:
                continue
            self._report(self._done + 1, f"server {_clock(now - since)}")

    def _within(self, round: int, step: int) -> None:
        """Show a step within a round, unless the display changed a moment before."""
        now = time.monotonic()
        if self._silent or now - self._shown < (
            _LINE_SECONDS if self._bar is None else _BAR_SECONDS
        ):
            return
        self._shown = now
        self._report(round, f"step {step}")

    def _report(self, round_number: int, text: str) -> None:
        """Show `text` about an unfinished round, in the bar or as a plain line."""
        if self._bar is None:
            line = f"round {round_number}/{self._rounds}, {text}"
            print(named(self._name, line), flush=True)
        else:
            self._bar.update(self._task, clients=text)

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            print(text, flush=True)


def named(name: str, text: str) -> str:
    """Return `text` as a line that begins with the run's name.

    If the run does not share the terminal, its name is "", and the line is `text`.
    """
    return f"{name}: {text}" if name else text


def _facts(row: dict[str, Any], headline: str) -> str:
    shown = [name for name in (headline, "train/loss") if name in row]
    return "  ".join(f"{name} {number_text(row[name])}" for name in shown)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
