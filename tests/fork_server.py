"""Forked processes that need no seconds of imports to start.

The standard library's fork server imports `tests.preloaded` (torch, Hydra and fedexp)
once per session and forks a process for every request. The process has separate
signals, folder, environment, output and exit code. It shares only the imports.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """A forked process that calls ``work(*arguments)``.

    It has the methods of `subprocess.Popen` that the tests use.

    Args:
        folder: Working directory of the process.
        work: A module-level function, because it is pickled by name.
        arguments: Arguments of `work`.
    """

    def __init__(self, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
        self._told = [_fresh(folder, name) for name in ("out", "err")]
        asked = (str(folder), dict(os.environ), [str(path) for path in self._told], work, arguments)
        self._process = _FORKS.Process(target=_begin, args=asked)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, -N if signal N ended the process, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signum)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return the texts of stdout and stderr.

        Raises:
            TimeoutError: The process did not end in time. It is killed.
        """
        self._process.join(timeout)
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            raise TimeoutError(f"process {self.pid} was still running after {timeout} s")
        out, err = (path.read_text() for path in self._told)
        return out, err


def fedexp_command(folder: Path, *arguments: str) -> Forked:
    """Start ``python -m fedexp ARGUMENTS`` in `folder`."""
    return Forked(folder, _run_module, "fedexp", *arguments)


def run_script(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    printed: Path,
    seconds: float,
) -> int:
    """Run a console script of this package in a forked process.

    Args:
        words: Name of the script and its arguments.
        folder: Working directory of the process.
        environment: All environment variables of the process.
        printed: File to which stdout and stderr are appended.
        seconds: Time after which the process gets SIGTERM. If it goes on, it is killed.

    Returns:
        The exit code, -N if signal N ended the process, and 124 after `seconds`, as the
        command ``timeout`` returns.
    """
    asked = (str(folder), dict(environment), [str(printed)] * 2, _run_script, tuple(words))
    process = _FORKS.Process(target=_begin, args=asked)
    process.start()
    process.join(seconds)
    if process.exitcode is not None:
        return process.exitcode

    process.terminate()
    process.join(30)
    process.kill()
    return 124


def _fresh(folder: Path, name: str) -> Path:
    number, path = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
    os.close(number)
    return Path(path)


def _run_module(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_script(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    (script,) = entry_points(group="console_scripts", name=name)
    try:
        script.load()()
    finally:
        # Processes of multiprocessing end without calling the functions of atexit.
        atexit._run_exitfuncs()


def _begin(
    folder: str,
    environment: Mapping[str, str],
    told: list[str],
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    # If the tests run under nohup, SIGHUP is ignored, and the process would inherit
    # this.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(told, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    work(*arguments)
