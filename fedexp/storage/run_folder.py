"""Folder of a run. Its files are the record of the run.

The folder's name contains the hashes of the run's config and code. The folder is locked
while a process works in it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from fedexp.core.errors import StorageError
from fedexp.core.paths import user_path
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import (
    damaged,
    delete_path,
    file_sha256,
    read_json,
    read_jsonl,
    stale_files,
    write_json,
)
from fedexp.storage.identity import code_hash, config_hash
from fedexp.storage.stored_run import StoredRun, damage, read_mapping, resume_condition

RunStatus = Literal["queued", "running", "done", "failed", "interrupted"]


_IDENTITY = "identity.json"
_LONGEST = 80  # maximum characters of a method's or data set's name in a folder's name


class RunFolder:
    """The files of one run.

    Each file is replaced atomically. After a crash between two files, the run can
    resume.

    Args:
        path: Path of the folder.
        hashes: The ``config`` and ``code`` hashes of the run in full length. `acquire`
            and `result` raise a `StorageError` if the folder belongs to another run.
            None disables this check.
    """

    def __init__(self, path: Path, hashes: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.hashes = dict(hashes or {})
        self._lock = FileLock(path / "lock")

    @classmethod
    def of(cls, config: ResolvedConfig) -> RunFolder:
        """Return the folder of a resolved config.

        It is ``<output_root>/runs/<method>-<dataset>-<confighash16>/<codehash8>``.
        """
        hashes = {"config": config_hash(config), "code": code_hash(config.values)}
        method, dataset = config["method"], config.choices.get("dataset", "data")
        name = f"{_plain(method)}-{_plain(dataset)}-{hashes['config'][:16]}"
        runs = user_path(config["output_root"], "output_root").resolve() / "runs"
        return cls(runs / name / hashes["code"][:8], hashes)

    def acquire(self, on_running: Literal["wait", "fail"], announce: Any) -> None:
        """Lock this folder for this process.

        The system frees the lock when the process dies, for whatever reason.

        Args:
            on_running: What to do if another process executes the run: wait for it, or
                fail.
            announce: Callback that shows the user a line.

        Raises:
            StorageError: The folder cannot be used, belongs to another run, or is in
                use.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            owner = self._state()
            who = "another process"
            # The owner writes its status a moment after it has locked the folder.
            if owner.get("status") == "running":
                who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            if on_running == "fail":
                raise StorageError(
                    "this very run is already being executed",
                    where=str(self.path),
                    got=who,
                    do="wait for it, or use on_running=wait to receive its result",
                ) from None

            announce(f"the same run is being executed by {who}: waiting for its result")
            self._lock.acquire()
        except OSError as error:
            raise self._unusable(error) from error

        try:
            for path in [*stale_files(self.path, ours=True), *stale_files(self.path.parent)]:
                delete_path(path)
            if self.hashes:
                self._compare(self._identity(), _IDENTITY)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise self._unusable(error) from error
            raise

        if what := damage(self.path, "status.json"):
            announce(f"{what}: it is written again")

    def _identity(self) -> Any:
        """Return the hashes in ``identity.json``, which is written if it is absent."""
        try:
            return self.once(_IDENTITY, self.hashes)
        except StorageError as error:
            # The usual advice, `reuse=false`, does not help, because this file is read
            # in any case.
            do = "delete the file, then run the same command again, which writes it again"
            raise damaged(self.path / _IDENTITY, do=do) from error

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"the run folder cannot be used: {error.strerror or error}",
            where=str(self.path),
            do="set output_root to a writable folder",
        )

    def _compare(self, found: Any, name: str) -> None:
        if self.hashes and found != self.hashes:
            raise StorageError(
                "the folder belongs to another run, whose hashes begin alike",
                where=str(self.path / name),
                expected=self.hashes,
                got=found,
                do="move that folder away, or set another output_root",
            )

    def release(self) -> None:
        self._lock.release()

    def result(self) -> dict[str, Any] | None:
        """Return the stored result of a finished run, or None if there is none.

        Raises:
            StorageError: The result is damaged or belongs to another run.
        """
        path = self.path / "result.json"
        stored: dict[str, Any] | None = read_json(path)
        if stored is None:
            return None
        if not isinstance(stored, dict) or not {"status", "hashes"} <= set(stored):
            raise damaged(path)
        if stored["status"] != "done":
            return None
        self._compare(stored["hashes"], path.name)
        return stored

    def set_aside(self) -> Path | None:
        """Move earlier contents to ``<name>.<k>`` next to this folder.

        The number k is the first free one, from 1. The lock file and ``identity.json``
        stay.

        Returns:
            The new folder, or None if there were no contents.
        """
        contents = [entry for entry in self.path.iterdir() if entry.name not in ("lock", _IDENTITY)]
        if not contents:
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        aside.mkdir()
        # The result and then the checkpoint are moved first. If a crash interrupts the
        # moves, the remaining files then belong to a run that can be resumed or
        # started.
        first = {"result.json": 0, "checkpoint": 1}
        for entry in sorted(contents, key=lambda entry: first.get(entry.name, 2)):
            entry.replace(aside / entry.name)
        return aside

    def set_status(self, status: RunStatus, **facts: Any) -> None:
        previous = self._state()
        write_json(
            self.path / "status.json",
            {
                "status": status,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "attempt": previous.get("attempt", 0),
                "round": previous.get("round", 0),
                "rounds": previous.get("rounds"),
                "updated": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "error": None,
                **facts,
            },
        )

    def set_ended(self, status: Literal["failed", "interrupted"], **facts: Any) -> None:
        """Store how the run ended, as `set_status` does.

        If no file can be written, for example on a full disk, the word "running" in the
        old file is replaced in place.
        """
        try:
            self.set_status(status, **facts)
        except OSError:
            with contextlib.suppress(OSError), (self.path / "status.json").open("rb+") as file:
                text = file.read().replace(b'"running"', f'"{status}"'.encode())
                file.seek(0)
                file.write(text)
                file.truncate()

    def set_done(self) -> None:
        """Set the status to done if the result exists.

        This also repairs the status if a crash occurred after the result was written.
        """
        result = self.result()
        if result is not None and self._state().get("status") != "done":
            self.set_status("done", round=result["rounds"], rounds=result["rounds"])

    @property
    def attempt(self) -> int:
        return int(self._state().get("attempt", 0))

    def _state(self) -> dict[str, Any]:
        """Return the contents of status.json, empty if it is absent or damaged.

        A damaged file is not an error, because the next change of the status writes the
        whole file again.
        """
        return read_mapping(self.path / "status.json")

    def once(self, name: str, value: Any) -> Any:
        """Write `value` to JSON file `name` unless the file exists.

        Returns:
            The value in the file.
        """
        stored = read_json(self.path / name)
        if stored is None:
            write_json(self.path / name, value, seal=True)
            return value
        return stored


def _plain(name: object) -> str:
    """Return `name` without characters that are not allowed in a folder's name.

    An option in a subfolder of its group has a slash in its name, and a method may have
    any name.
    """
    return re.sub(r"[^\w.+=-]+", "_", str(name))[:_LONGEST].lstrip(".")


def rows_of(folder: Path, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` from which a result was computed.

    Args:
        folder: Folder of the run.
        result: Result of the finished run.

    Raises:
        StorageError: The file was changed.
    """
    path = folder / "metrics.jsonl"
    digest = result.get("metrics_sha256")
    if digest is not None and (not path.exists() or file_sha256(path) != digest):
        raise damaged(path)
    return object_rows(path)


def object_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, as `read_jsonl` does.

    Raises:
        StorageError: A line is damaged, or is not a JSON object.
    """
    rows = read_jsonl(path)
    if not all(isinstance(row, dict) for row in rows):
        raise damaged(path, "a line is not a JSON object")
    return rows


def trace_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in ``trace/<round>.json``, one per iteration.

    The list is empty if the file is absent.
    """
    stored = read_json(path) or []
    # A file of an earlier version is a list.
    rows: list[dict[str, Any]] = stored["rows"] if isinstance(stored, dict) else stored
    return rows


class Journal:
    """The files ``metrics.jsonl`` and ``timing.jsonl`` of a run.

    Only the values in ``metrics.jsonl`` are deterministic.

    Args:
        folder: Folder of the run.
        mark: Value of the property `mark` when the resumed checkpoint was saved, or
            None without a checkpoint. Rows that were written later are cut off, because
            the run computes them again.
        attempt: Number of the attempt, stored with timings.

    Raises:
        StorageError: The rows that the checkpoint covers are missing or changed.
    """

    def __init__(self, folder: Path, mark: tuple[int, str] | None, attempt: int) -> None:
        offset, digest = mark or (0, None)
        path = folder / "metrics.jsonl"
        path.touch()
        if path.stat().st_size < offset:
            raise StorageError(
                "metrics.jsonl is shorter than the checkpoint says",
                where=str(path),
                expected=f"at least {offset} bytes",
                got=f"{path.stat().st_size} bytes",
                do="restore the file, or restart the run with reuse=false",
            )

        self._digest = hashlib.sha256(path.read_bytes()[:offset])
        if digest is not None and self._digest.hexdigest() != digest:
            raise damaged(path)
        os.truncate(path, offset)
        self.rows: list[dict[str, Any]] = read_jsonl(path)
        self._metrics = path.open("ab")

        timing = folder / "timing.jsonl"
        timing.touch()
        # Cut off a line that a crash left incomplete.
        os.truncate(timing, timing.read_bytes().rfind(b"\n") + 1)
        self._timing = timing.open("a")
        self._attempt = attempt

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        line = (json.dumps(row) + "\n").encode()
        self._metrics.write(line)
        self._metrics.flush()
        self._digest.update(line)

    def time(self, round_number: int, step: int, seconds: dict[str, float], **facts: Any) -> None:
        """Write the seconds of a step by phase.

        Args:
            round_number: Number of the step's round, from 1.
            step: Number of the step.
            seconds: Seconds by phase.
            **facts: Further values, which may differ if the step is executed again.
        """
        row = {
            "round": round_number,
            "step": step,
            "attempt": self._attempt,
            "seconds": {k: round(v, 6) for k, v in seconds.items()},
            **facts,
        }
        self._timing.write(json.dumps(row) + "\n")
        self._timing.flush()

    @property
    def mark(self) -> tuple[int, str]:
        """The size of ``metrics.jsonl`` so far in bytes, and its sha256.

        A checkpoint stores them.
        """
        return self._metrics.tell(), self._digest.hexdigest()

    def sync(self) -> None:
        """Flush the metrics to disk."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()


def read_result_and_status(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result and the status of a run.

    Returns:
        The result and the status. The result is empty unless the run is done and the
        result is not damaged. The status is ``missing`` if the result of a finished run
        is gone. Both are empty if there is no run.
    """
    state = read_mapping(run.path / "status.json")
    # The lock is checked before the result is read. A run that finishes between these
    # two steps is therefore not mistaken for a dead run.
    dead = state.get("status") == "running" and not StoredRun(run.path).is_locked()

    try:
        result = run.result() or {}
    except StorageError as error:
        return {}, {"status": "damaged", "error": error.what}

    if not result and not state and (what := damage(run.path)):
        state = {"status": "damaged", "error": what}
    if not result and dead:
        same = f"the same command{resume_condition(StoredRun(run.path).config)}"
        state = {
            "status": "failed",
            "error": f"its process died without a result ({same} resumes it)",
        }
    if not result and state.get("status") == "done":
        state = {
            "status": "missing",
            "error": "its result.json is gone (the same command makes it again)",
        }

    return result, state
