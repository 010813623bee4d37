"""Runs as they lie on disk: finding them, reading them, telling whether somebody works in them. Needs no torch."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError, FedexpError, StorageError, nearest
from fedexp.core.resolved_config import ResolvedConfig

_FOLDER = re.compile(
    r"[0-9a-f]{8}(\.\d+)?"
)  # <codehash8>, or <codehash8>.<k> for files that were set aside
_SHOWN_MATCHES = 8


@dataclass(frozen=True)
class StoredRun:
    """A run folder as it lies on disk; every property may be absent or damaged, none of them raises for it."""

    path: Path

    @property
    def name(self) -> str:
        """``<method>-<dataset>-<confighash16>/<codehash8>``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def is_aside(self) -> bool:
        """Earlier files, moved aside by reuse=false."""
        return "." in self.path.name

    @cached_property
    def state(self) -> dict[str, Any]:
        """``status.json``."""
        return read_mapping(self.path / "status.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``; empty without one."""
        return read_mapping(self.path / "result.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.yaml``; empty without one."""
        import yaml

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            value = yaml.load((self.path / "config.yaml").read_text(), loader)
        except (OSError, yaml.YAMLError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def resolved_config(self) -> ResolvedConfig:
        """The config that ``config.yaml`` stores; empty without one."""
        return ResolvedConfig.from_stored(self.config)

    @cached_property
    def status(self) -> str:
        """That of status.json; ``stale`` where it says running and nobody holds the lock; ``unknown`` without one.

        ``damaged`` where the result of a run that is done, or without a result status.json, is.
        """
        status = str(self.state.get("status", "done" if self.result else "unknown"))
        if not self.result and status in ("unknown", "done") and damage(self.path):
            return "damaged"
        return "stale" if status == "running" and not self.is_locked() else status

    def is_locked(self) -> bool:
        """Whether a process works in this folder now."""
        try:
            with self.lock():
                return False
        except (StorageError, OSError):  # OSError: somebody else's folder, which we may not lock
            return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; `StorageError` where another process does. Files set aside have no lock and need none."""
        from filelock import FileLock, Timeout

        if not (self.path / "lock").exists():
            yield
            return
        lock = FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner = f"process {self.state.get('pid', '?')} on {self.state.get('host', '?')}"
            raise StorageError(
                "this run is being executed", where=str(self.path), got=owner
            ) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def choices(self) -> dict[str, Any]:
        """The option of each config group."""
        found = self.result.get("choices") or self.config.get("choices")
        return found if isinstance(found, dict) else {}

    def choice(self, group: str) -> str:
        """Method or data set: what was chosen, else what the folder's name says."""
        method, _, dataset = self.path.parent.name.rpartition("-")[0].partition("-")
        return str(self.choices.get(group) or {"method": method, "dataset": dataset}[group])

    @property
    def overrides(self) -> list[str]:
        """As they were typed."""
        return list(self.result.get("overrides") or self.config.get("overrides") or [])

    @property
    def headline(self) -> dict[str, Any] | None:
        """metric, rule and value, once the run is done."""
        return self.result.get("headline") if self.status == "done" else None

    @property
    def rounds(self) -> tuple[Any, Any]:
        """(rounds done, rounds asked for), None where unknown."""
        return self.result.get("rounds", self.state.get("round")), self.state.get(
            "rounds", self.config.get("rounds")
        )

    @cached_property
    def updated(self) -> datetime.datetime:
        """When something was last recorded."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            moment = datetime.datetime.fromisoformat(self.state["updated"])
            return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return datetime.datetime.fromtimestamp(self.path.stat().st_mtime, datetime.UTC)

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return weigh(self.path)

    def is_of_other_code(self) -> bool:
        """Whether today's code has another fingerprint. False where that cannot be told: a plug-in that is not found."""
        from fedexp.storage.identity import code_hash, find_module, targets

        if str(Path.cwd()) not in sys.path and "" not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # where `fedexp` looks for the user's modules, too
        if not self.config or not all(find_module(module) for module in targets(self.config)):
            return False
        return code_hash(self.config)[:8] != self.path.name.partition(".")[0]


def find_runs(root: Path) -> list[StoredRun]:
    """All runs under ``<root>/runs``, newest first."""
    folders = (path for path in (root / "runs").glob("*/*") if _is_run(path))
    return sorted(
        (StoredRun(path) for path in folders), key=lambda run: (run.updated, run.name), reverse=True
    )


def _is_run(path: Path) -> bool:
    return path.is_dir() and _FOLDER.fullmatch(path.name) is not None


def find_run(root: Path, name: str) -> StoredRun:
    """The run at path `name`, or the one whose name contains it; `FedexpError` where there is none or more than one."""
    path, matches = Path(name), []
    if path.is_dir():
        if (path / "status.json").exists() or (path / "config.yaml").exists():
            return StoredRun(path.resolve())
        matches = [StoredRun(child.resolve()) for child in sorted(path.iterdir()) if _is_run(child)]
    runs = find_runs(root)
    matches = matches or [run for run in runs if name.strip("/") in run.name]
    current = [run for run in matches if not run.is_aside]
    if len(matches) == 1 or len(current) == 1:
        return (current or matches)[0]
    if matches:
        shown = [run.name for run in matches[:_SHOWN_MATCHES]]
        more = [f"and {len(matches) - len(shown)} more"] if len(matches) > len(shown) else []
        raise ConfigError(
            f"'{name}' fits {len(matches)} runs",
            expected="a part of one name only",
            got=", ".join(shown + more),
        )
    runs.sort(key=lambda run: not run.is_aside)  # what was set aside is the last to be suggested
    parts = {
        run: (
            run.name,
            run.path.parent.name.rpartition("-")[0],
            run.path.parent.name,
            run.path.name,
        )
        for run in runs
    }
    known = {key: run.name for run, keys in parts.items() for key in keys}
    near = nearest(name, known)
    raise FedexpError(
        f"no run '{name}'",
        where=str(root / "runs"),
        expected="a run folder, or a part of its name",
        do=f"did you mean '{known[near]}'?"
        if near
        else "fedexp-runs list shows what there is (--root: elsewhere)",
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where it is absent or damaged."""
    from fedexp.storage.files import read_json

    try:
        value = read_json(path)
    except (OSError, StorageError):
        return {}
    return value if isinstance(value, dict) else {}


def damage(folder: Path, *names: str) -> str:
    """Says which of a run's records is damaged, of `names` or of all that are looked up later; empty if none is.

    What cannot be read for another reason (permissions) may be whole.
    """
    from fedexp.storage.files import read_json

    for name in names or ("result.json", "status.json"):
        try:
            value = read_json(folder / name)
        except StorageError:
            return f"{name} is damaged"
        except OSError:
            continue
        if value is not None and not (isinstance(value, dict) and value):
            return f"{name} is damaged"
    return ""


def weigh(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may be writing
                total += (Path(folder) / name).lstat().st_size
    return total
