"""How far a table's runs are, told on the terminal while they run, whoever executes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedexp.storage.stored_run import read_mapping
from fedexp.tables.report.layout import duration

_INTERVAL = 0.5  # seconds between two readings of the run folders


@dataclass
class _LaunchedRun:
    """A job that was launched: its column, its folder, how often it had been tried before."""

    method: str
    folder: Path
    attempts: int
    seconds: float | None = None  # once it has ended


class ProgressMonitor:
    """Says on the terminal how many of a table's runs are done and how long the rest will take, whoever executes them.

    Args:
        name: of the table; jobs: (column, run folder) of those to run; done: how many others are there already.
    """

    def __init__(self, name: str, jobs: Sequence[tuple[str, Path]], done: int) -> None:
        self._name, self._done, self._failed = name, done, 0
        self._total = done + len(jobs)
        self._jobs = [_LaunchedRun(method, folder, _attempts(folder)) for method, folder in jobs]
        self._began = time.monotonic()
        self._over = threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch while the block runs."""
        thread = threading.Thread(target=self._watch, name="fedexp-table", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL):
            if self.update():
                print(self.progress_line(), flush=True)

    def update(self) -> bool:
        """Whether a job has ended since the last look."""
        ended = False
        for job in self._jobs:
            if job.seconds is not None:
                continue
            state = read_mapping(job.folder / "status.json")
            if state.get("status") == "done" and (job.folder / "result.json").exists():
                seconds = (
                    read_mapping(job.folder / "result.json").get("seconds", {}).get("total", 0.0)
                )
                job.seconds, ended = float(seconds), True
                self._done += 1
            elif state.get("status") == "failed" and _attempts(job.folder) > job.attempts:
                job.seconds, ended = 0.0, True
                self._failed += 1
        return ended

    def progress_line(self) -> str:
        """``table demo/digits: 3 of 5 runs done, 1 failed, about 12 s left``."""
        left = self.seconds_left(time.monotonic() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        rest = f", about {duration(left)} left" if left else ""
        return f"table {self._name}: {self._done} of {self._total} runs done{failed}{rest}"

    def seconds_left(self, elapsed: float) -> float:
        """Of the jobs that have not ended, by what their column's cost so far, at the pace so far; `elapsed` in seconds.

        A row's first column trains the clients and the others recall them, so a mean over all would mislead.
        """
        ended = [job for job in self._jobs if job.seconds]
        if not ended:
            return 0.0
        spent = sum(job.seconds or 0.0 for job in ended)
        every = spent / len(ended)
        expected = 0.0
        for job in self._jobs:
            if job.seconds is None:
                like = [other.seconds or 0.0 for other in ended if other.method == job.method]
                expected += sum(like) / len(like) if like else every
        return expected * elapsed / spent


def _attempts(folder: Path) -> int:
    return int(read_mapping(folder / "status.json").get("attempt", 0))
