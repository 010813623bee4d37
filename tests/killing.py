"""A function that sends SIGKILL to one process."""

import os
import signal


def kill(pid: int) -> None:
    """Kill one process, and nothing else.

    `os.kill` takes 0 for all processes of the caller's group and -1 for all processes.
    A worker that has not started yet has the process id 0.

    Raises:
        ProcessLookupError: No process has this id.
        ValueError: `pid` is not the id of one process that may be killed.
    """
    if pid < 2:
        raise ValueError(f"{pid} is not the id of a process that a test may kill")
    os.kill(pid, signal.SIGKILL)
