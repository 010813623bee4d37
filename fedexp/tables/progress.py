"""The progress of a table's runs on the terminal, for every Hydra launcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedexp.storage.stored_run import read_mapping
from fedexp.tables.grouping import grouped
from fedexp.tables.report.layout import duration

# Seconds between two readings of the run folders.
_INTERVAL = 0.5


@dataclass
class _LaunchedRun:
    """A launched job.

    It has the column, the folder of the run, and the identity of the status file that
    an earlier run or attempt left in the folder.
    """

    method: str
    folder: Path
    earlier: tuple[int, int] | None
    # Computing time in seconds (0 if the run failed), None until the run has ended.
    seconds: float | None = None


class ProgressMonitor:
    """A monitor that prints the number of runs that are done, and the remaining time.

    It only reads the run folders, so it works for every Hydra launcher. The states that
    the folders have when the monitor is made are those of earlier runs, and do not
    count.

    Args:
        name: Name of the table.
        jobs: (column, run folder) of the runs to execute.
        done: Number of the table's runs that were done before the launch.
    """

    def __init__(self, name: str, jobs: Sequence[tuple[str, Path]], done: int) -> None:
        self._name, self._done, self._failed = name, done, 0
        self._total = done + len(jobs)
        self._jobs = [_LaunchedRun(method, folder, _identity(folder)) for method, folder in jobs]
        self._began = time.monotonic()
        self._over = threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Watch the run folders while the ``with`` block is executed."""
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
        """Read the run folders. Return whether a job has ended since the last call."""
        ended = False

        for job in self._jobs:
            if job.seconds is not None or _identity(job.folder) == job.earlier:
                continue
            state = read_mapping(job.folder / "status.json")
            if state.get("status") == "done" and (job.folder / "result.json").exists():
                seconds = (
                    read_mapping(job.folder / "result.json").get("seconds", {}).get("total", 0.0)
                )
                job.seconds, ended = float(seconds), True
                self._done += 1
            elif state.get("status") == "failed":
                job.seconds, ended = 0.0, True
                self._failed += 1

        return ended

    def progress_line(self) -> str:
        """Return ``table demo/digits: 3 of 5 runs done, 1 failed, about 12 s left``."""
        left = self.seconds_left(time.monotonic() - self._began)
        failed = f", {self._failed} failed" if self._failed else ""
        rest = f", about {duration(left)} left" if left else ""
        return f"table {self._name}: {self._done} of {self._total} runs done{failed}{rest}"

    def seconds_left(self, elapsed: float) -> float:
        """Estimate the remaining seconds at the present pace.

        The estimated cost of a job is the mean over the jobs of its column that are
        done. If no job of its column is done, it is the mean over all jobs that are
        done. Costs differ between columns, because the first column of a row trains the
        clients, and the other columns reuse the trained clients.

        Args:
            elapsed: Seconds since the start.
        """
        costs = grouped((job.method, job.seconds) for job in self._jobs if job.seconds)
        ended = [job.seconds for job in self._jobs if job.seconds]
        if not ended:
            return 0.0
        left = [costs.get(job.method, ended) for job in self._jobs if job.seconds is None]
        return sum(sum(own) / len(own) for own in left) * elapsed / sum(ended)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes when ``status.json`` is written, None without it."""
    try:
        found = (folder / "status.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
