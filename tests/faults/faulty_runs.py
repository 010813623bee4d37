"""Functions for `campaign.py` that launch runs, inject faults and compare files.

The processes are forked from one that has made all imports. This module does not depend
on the cases. A process kills itself with kill -9 at a numbered event, or it receives a
signal from outside.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import multiprocessing.util
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from tests.fork_server import Forked
from tests.killing import kill

# Names of files that may differ. They contain attempts and costs, are derived from
# other files, or are read only by a resumed run. result.json is compared by its values
VARYING = (
    "lock",
    "run.log",
    "timing.jsonl",
    "status.json",
    "environment.json",
    "config.yaml",
    "curve.png",
    "result.json",
)
VARYING += ("identity.json", "numerics.json", "data.json")
COSTS = (
    "seal",
    "seconds",
    "memory",
    "peak",
    "environment",
    "engine_notes",
    "attempts",
    "folder",
    "overrides",
    "config_sha256",
    "phases",
    "rate",
    "per_second",
)
# Time limit in seconds for a run that takes one second
PATIENCE = 120


@dataclass(frozen=True)
class Fault:
    """A fault that a process injects into itself.

    Args:
        kind: ``none`` means that there is no fault. ``count`` counts events and writes
            the numbers to `counts`. ``file`` and ``pass`` mean that the process dies at
            an event of this kind. ``full`` means that the disk is full from a flush on.
            ``size`` limits the size of files. ``deaf`` means that nothing reads the
            output. ``mute`` means that there is no output.
        at: Number of the event, from 0, or a number of bytes.
        after: Whether the process dies after the event.
        counts: File for the numbers of events.
    """

    kind: str = "none"
    at: int = 0
    after: bool = False
    counts: str = ""


def job(arguments: list[str], fault: Fault) -> None:
    """Run ``fedexp ARGUMENTS`` in a separate session.

    torch, Hydra and fedexp were imported before this process was forked.
    """
    os.setsid()
    from fedexp.commands.run import run_command
    from fedexp.running import execute

    execute.draw_curve = lambda rows, path, title: None  # type: ignore[assignment] # takes longer than the run
    if "engine=workers" in arguments:
        multiprocessing.util.spawnv_passfds = _fork_instead  # type: ignore[attr-defined]
        # multiprocessing made this process, which therefore shares the tests' tracker
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        forkserver.ensure_running()
    counts = _armed(fault)
    code = run_command(arguments)
    if fault.kind == "count":
        Path(fault.counts).write_text(json.dumps(counts))
    sys.exit(code)


def _fork_instead(path: bytes, args: list[str], kept: list[int]) -> int:
    """Fork this process where multiprocessing would start an interpreter.

    This replaces `multiprocessing.util.spawnv_passfds`. It saves the imports.

    Args:
        path: Path of the interpreter.
        args: Its arguments. The last one is the program.
        kept: File descriptors that the new process keeps.
    """
    pid = os.fork()
    if pid == 0:
        try:
            bounds = [2, *sorted(kept), 4096]
            for low, high in itertools.pairwise(bounds):
                os.closerange(low + 1, high)
            exec(args[-1], {})
        finally:
            os._exit(0)
    return pid


def _armed(fault: Fault) -> dict[str, int]:
    """Set up `fault`.

    Returns:
        The numbers of events, which continue to be counted.
    """
    import torch

    from fedexp.core import trainer
    from fedexp.storage.run_folder import Journal

    counts, ours = {"file": 0, "pass": 0, "flush": 0}, os.getpid()

    def watch(place: Any, name: str, kind: str, flush: bool = False) -> None:
        whole = getattr(place, name)

        def watched(*args: Any, **more: Any) -> Any:
            if os.getpid() != ours:
                return whole(*args, **more)

            number, flushed = counts[kind], counts["flush"]
            counts[kind] += 1
            counts["flush"] += flush
            if fault.kind == "full" and flush and flushed >= fault.at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            dies = fault.kind == kind and number == fault.at
            if dies and not fault.after:
                os.kill(ours, signal.SIGKILL)

            result = whole(*args, **more)
            if dies:
                os.kill(ours, signal.SIGKILL)
            return result

        setattr(place, name, watched)

    watch(os, "fsync", "file", flush=True)
    watch(Journal, "append", "file", flush=True)
    for place, name in ((os, "truncate"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")):
        watch(place, name, "file")
    for place, name in ((trainer, "run_backward"), (torch.autograd, "grad")):
        watch(place, name, "pass")

    if fault.kind == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, fault.at))
    if fault.kind == "mute":
        sys.stdout = None  # type: ignore[assignment] # as the interpreter has it
        os.close(1)
    if fault.kind == "deaf":
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(read), os.close(write)
    return counts


def facts(outputs: Path) -> dict[str, Any]:
    """Return everything that must be equal in two executions of a run.

    This includes the digests of files, and the values of result.json except costs.
    """
    found: dict[str, Any] = {}
    for folder in sorted(path.parent for path in outputs.glob("runs/*/*/result.json")):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in VARYING and not name.startswith("checkpoint/"):
                found[f"{folder.parent.name}/{name}"] = hashlib.sha256(
                    path.read_bytes()
                ).hexdigest()[:16]

        try:
            found[folder.parent.name] = _steady(json.loads((folder / "result.json").read_text()))
        except ValueError:
            found[folder.parent.name] = "damaged"
    return found


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _steady(inner)
            for key, inner in value.items()
            if not any(cost in key for cost in COSTS)
        }
    return value


def differences(a: dict[str, Any], b: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


@dataclass
class Ended:
    """The exit code and the output of a process."""

    code: int | None
    said: str

    @property
    def words(self) -> bool:
        return "Traceback" not in self.said

    @property
    def told(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return f"exit code {self.code}: {' | '.join(lines[-3:])[:300]}"


class Place:
    """A working folder and the processes that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, folder / "outputs"
        self.sessions: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, arguments: list[str], fault: Fault = Fault()) -> Forked:
        """Launch a run.

        The times of unfinished files of earlier processes are changed, so that the run
        deletes them as old files. Containers may have the same machine name.
        """
        for path in _unfinished(self.outputs):
            os.utime(path, (time.time() - 7200,) * 2)
        process = Forked(self.folder, job, arguments, fault)
        self.sessions.append(process.pid)
        return process

    def run(self, arguments: list[str], fault: Fault = Fault()) -> Ended:
        return self.end(self.start(arguments, fault))

    def end(self, process: Forked) -> Ended:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except TimeoutError:
            return Ended(None, "HANGS")
        return Ended(process.returncode, out + err)

    def left(self) -> str:
        """Return the names of all processes and files that were left behind.

        After the last launch, none may be left, and the result must be empty.
        """
        deadline = time.monotonic() + 10
        while (
            orphans := [pid for sid in self.sessions for pid in members(sid)]
        ) and time.monotonic() < deadline:
            time.sleep(0.02)

        for pid in orphans:
            kill(pid)

        left = [f"{len(orphans)} orphans"] if orphans else []
        left += [str(path.relative_to(self.folder)) for path in _unfinished(self.outputs)]
        left += [
            f"/dev/shm/{path.name}"
            for path in Path("/dev/shm").iterdir()
            if path.name not in SHARED_MEMORY
        ]
        return ", ".join(left)


SHARED_MEMORY = {path.name for path in Path("/dev/shm").iterdir()}


def _unfinished(outputs: Path) -> list[Path]:
    return [path for path in outputs.rglob("*") if path.name.endswith((".part", ".deleted"))]


def members(session: int) -> list[int]:
    """Return the IDs of the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def read_all(outputs: str) -> None:
    """Read all data of every run, as a script of a user or a report would."""
    import torch

    from fedexp.api import Run
    from fedexp.commands.errors import run_guarded
    from fedexp.storage.run_folder import trace_rows
    from fedexp.storage.tensors import load_tree

    def read() -> int:
        for path in Path(outputs).glob("runs/*/*/status.json"):
            run = Run(path.parent)
            _ = run.result, run.metrics, run.models, run.partition
            for rows in path.parent.glob("trace/*.json"):
                trace_rows(rows)
            for weights in path.parent.glob("trace/*.safetensors"):
                load_tree(weights, torch.device("cpu"))
        return 0

    os.setsid()
    sys.exit(run_guarded(read))
