"""Record runs in forked processes, a few at a time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.fork_server import Forked
from tests.simulated_cuda.device import CAPACITY
from tests.simulated_cuda.runs import Recording, Run, record_all


class ProcessFailedError(Exception):
    """The error of a process that recorded runs and failed, with its output."""


def record_in_process(
    folder: Path, runs: Sequence[Run], limit: float, capacity: int = CAPACITY
) -> list[Recording]:
    """Execute runs one after the other in one forked process.

    Args:
        folder: Folder for the process's files.
        runs: The runs.
        limit: Seconds after which the process is killed.
        capacity: Bytes of memory of the simulated device.

    Raises:
        ProcessFailedError: The process failed or was killed.
    """
    path = folder / "recordings.json"
    process = Forked(folder, record_all, str(path), runs, capacity)
    try:
        _, error = process.communicate(limit)
    except TimeoutError as late:
        raise ProcessFailedError(str(late)) from late
    return _read(path, process, error)


def record_in_processes(
    cases: Mapping[str, Sequence[Run]], limit: float, at_once: int = 2
) -> Iterator[tuple[str, list[Recording] | ProcessFailedError]]:
    """Execute the runs of each case in one forked process.

    Args:
        cases: Runs by the name of the case.
        limit: Seconds after which a process is killed.
        at_once: Number of processes at the same time.

    Yields:
        Name and recordings of each case as soon as it is finished, or its error.
    """
    waiting = list(cases)
    running: dict[str, tuple[Forked, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                folder = Path(root, name)
                folder.mkdir()
                path = str(folder / "recordings.json")
                running[name] = Forked(folder, record_all, path, cases[name]), time.monotonic()

            time.sleep(0.02)
            for name, (process, began) in list(running.items()):
                remaining = limit - (time.monotonic() - began)
                if process.returncode is None and remaining > 0:
                    continue
                del running[name]
                try:
                    _, error = process.communicate(0)
                    yield name, _read(Path(root, name, "recordings.json"), process, error)
                except TimeoutError:
                    yield name, ProcessFailedError(f"it was still running after {limit:.0f} s")
                except ProcessFailedError as failed:
                    yield name, failed


def _read(path: Path, process: Forked, error: str) -> list[Recording]:
    if process.returncode != 0 or not path.exists():
        raise ProcessFailedError(f"exit code {process.returncode}: {error[-3000:]}")
    return [Recording.of_plain(plain) for plain in json.loads(path.read_text())]
