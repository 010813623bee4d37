"""A run's folder: addressed by content, locked while someone works in it, and the truth of what happened."""

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
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import (
    damaged,
    file_sha256,
    litter,
    read_json,
    read_jsonl,
    sweep,
    write_json,
)
from fedexp.storage.identity import code_hash, config_hash
from fedexp.storage.stored_run import StoredRun, damage, read_mapping

Status = Literal["queued", "running", "done", "failed", "interrupted"]


_IDENTITY = "identity.json"
_LONGEST = 80  # letters of a name in a folder's


class RunFolder:
    """Files of one run. Single files are replaced atomically; a crash in between leaves a run that resumes.

    Args:
        hashes: the whole ``config`` and ``code`` hashes of the run; a folder of another run is refused with a `StorageError`.
    """

    def __init__(self, path: Path, hashes: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.hashes = dict(hashes or {})
        self._lock = FileLock(path / "lock")

    @classmethod
    def of(cls, config: ResolvedConfig) -> RunFolder:
        """``<output_root>/runs/<method>-<dataset>-<confighash16>/<codehash8>`` of a resolved config."""
        hashes = {"config": config_hash(config), "code": code_hash(config.values)}
        name = f"{_plain(config['method'])}-{_plain(config.choices.get('dataset', 'data'))}-{hashes['config'][:16]}"
        root = Path(config["output_root"]).expanduser().resolve()
        return cls(root / "runs" / name / hashes["code"][:8], hashes)

    def acquire(self, on_running: Literal["wait", "fail"], announce: Any) -> None:
        """Become the one process that works here; the system frees the lock when a process dies, however it dies."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            owner = self._state()
            who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            if on_running == "fail":
                raise StorageError(
                    "this very run is already being executed",
                    where=str(self.path),
                    got=who,
                    do="wait for it, or leave on_running=wait to be given its result",
                ) from None
            announce(f"the same run is being executed by {who}: waiting for its result")
            self._lock.acquire()
        except OSError as error:
            raise self._unusable(error) from error
        try:
            for path in [*litter(self.path, ours=True), *litter(self.path.parent)]:
                sweep(path)
            if self.hashes:
                self._compare(self.once(_IDENTITY, self.hashes), _IDENTITY)
        except OSError as error:
            self.release()
            raise self._unusable(error) from error
        except BaseException:
            self.release()
            raise
        if what := damage(self.path, "status.json"):
            announce(f"{what}: it is written anew")

    def _unusable(self, error: OSError) -> StorageError:
        return StorageError(
            f"the run folder cannot be used: {error.strerror or error}",
            where=str(self.path),
            do="set output_root to a folder that can be written",
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
        """The stored result of a finished run; a `StorageError` where it is damaged, or another run's."""
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
        """Move earlier contents to ``<name>.<k>`` next to this folder (lock and identity stay); None where there were none."""
        contents = [entry for entry in self.path.iterdir() if entry.name not in ("lock", _IDENTITY)]
        if not contents:
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        aside.mkdir()
        for entry in sorted(contents, key=_first_of_all):
            entry.replace(aside / entry.name)
        return aside

    def set_status(self, status: Status, **facts: Any) -> None:
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
        """As `set_status`; where no file can be written any more, one word of the old one is replaced in its place."""
        try:
            self.set_status(status, **facts)
        except OSError:
            with contextlib.suppress(OSError), (self.path / "status.json").open("rb+") as file:
                text = file.read().replace(b'"running"', f'"{status}"'.encode())
                file.seek(0)
                file.write(text)
                file.truncate()

    def set_done(self) -> None:
        """The result is there: say so, also after a crash between the two."""
        result = self.result()
        if result is not None and self._state().get("status") != "done":
            self.set_status("done", round=result["rounds"], rounds=result["rounds"])

    @property
    def attempt(self) -> int:
        return int(self._state().get("attempt", 0))

    def _state(self) -> dict[str, Any]:
        """What status.json says, which is written anew all the time: nothing where it is damaged."""
        return read_mapping(self.path / "status.json")

    def once(self, name: str, value: Any) -> Any:
        """Write `value` to JSON file `name` unless it exists; returns what the file holds."""
        stored = read_json(self.path / name)
        if stored is None:
            write_json(self.path / name, value, seal=True)
            return value
        return stored


def _plain(name: object) -> str:
    """`name` as a part of one folder's name: an option may lie in a subfolder of its group, and a method be called anything."""
    return re.sub(r"[^\w.+=-]+", "_", str(name))[:_LONGEST].lstrip(".")


def _first_of_all(entry: Path) -> int:
    """Order of setting aside: wherever a crash stops it, what is left is a run that can resume or begin."""
    return {"result.json": 0, "checkpoint": 1}.get(entry.name, 2)


def rows_of(folder: Path, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` that a finished run's `result` was made from; a `StorageError` where they were altered."""
    path = folder / "metrics.jsonl"
    digest = result.get("metrics_sha256")
    if digest is not None and (not path.exists() or file_sha256(path) != digest):
        raise damaged(path)
    return read_jsonl(path)


def trace_rows(path: Path) -> list[dict[str, Any]]:
    """The iterations in ``trace/<round>.json``, none where it is absent."""
    stored = read_json(path) or []
    rows: list[dict[str, Any]] = (
        stored["rows"] if isinstance(stored, dict) else stored
    )  # a list: of earlier versions
    return rows


class Journal:
    """``metrics.jsonl`` (deterministic) and ``timing.jsonl`` of a run.

    Args:
        folder: the run's.
        mark: what `mark` was when the resumed checkpoint was saved; what lies beyond is cut off and computed again, to the
            same bytes.

    Raises:
        StorageError: what the checkpoint covers is not there as it was written.
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
                do="restore the file, or start afresh with reuse=false",
            )
        self._digest = hashlib.sha256(path.read_bytes()[:offset])
        if digest is not None and self._digest.hexdigest() != digest:
            raise damaged(path)
        os.truncate(path, offset)
        self.rows: list[dict[str, Any]] = read_jsonl(path)
        self._metrics = path.open("ab")
        timing = folder / "timing.jsonl"
        timing.touch()
        os.truncate(timing, timing.read_bytes().rfind(b"\n") + 1)  # a line that a crash cut short
        self._timing = timing.open("a")
        self._attempt = attempt

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        line = (json.dumps(row) + "\n").encode()
        self._metrics.write(line)
        self._metrics.flush()
        self._digest.update(line)

    def time(self, round: int, step: int, seconds: dict[str, float], **facts: Any) -> None:
        """What a step took by phase, and other facts that another run of it need not repeat."""
        row = {
            "round": round,
            "step": step,
            "attempt": self._attempt,
            "seconds": {k: round_6(v) for k, v in seconds.items()},
            **facts,
        }
        self._timing.write(json.dumps(row) + "\n")
        self._timing.flush()

    @property
    def mark(self) -> tuple[int, str]:
        """Bytes of metrics so far and their sha256, which a checkpoint stores."""
        return self._metrics.tell(), self._digest.hexdigest()

    def secure(self) -> None:
        """Flush the metrics to disk."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()


def round_6(value: float) -> float:
    return round(value, 6)


def standing(run: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's result, empty unless it is done and whole, and its status; both are empty where there is no run."""
    state = read_mapping(run.path / "status.json")
    dead = (
        state.get("status") == "running" and not StoredRun(run.path).is_locked()
    )  # before a result is looked for
    try:
        result = run.result() or {}
    except StorageError as error:
        return {}, {"status": "damaged", "error": error.what}
    if not result and not state and (what := damage(run.path)):
        state = {"status": "damaged", "error": what}
    if not result and dead:
        state = {
            "status": "failed",
            "error": "its process died without a result; launched again it resumes",
        }
    return result, state
