"""Access to stored runs: finding them, reading them and checking their locks.

The module needs no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError, FedexpError, StorageError, nearest
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import damaged, parse_yaml, read_json, refused

# Name of a run folder: <codehash8>, or <codehash8>.<k> if it was set aside.
_FOLDER = re.compile(r"[0-9a-f]{8}(\.\d+)?")
_SHOWN_MATCHES = 8
# File with the user's modules of a run, which `fedexp.storage.sources` writes.
SOURCES = "sources.json"


@dataclass(frozen=True)
class StoredRun:
    """A run folder on disk.

    No property raises an error if the file behind it is absent or damaged.
    """

    path: Path

    @property
    def name(self) -> str:
        """Name of the run: ``<method>-<dataset>-<confighash16>/<codehash8>``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def is_aside(self) -> bool:
        """Whether the folder contains files that ``reuse=false`` moved aside."""
        return "." in self.path.name

    @cached_property
    def state(self) -> dict[str, Any]:
        """Contents of ``status.json``, empty if it is absent or damaged."""
        return read_mapping(self.path / "status.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        """Contents of ``result.json``, empty if it is absent or damaged."""
        return read_mapping(self.path / "result.json")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of ``config.yaml``, empty if it is absent or damaged."""
        try:
            return self.read_config()
        except StorageError:
            return {}

    def read_config(self) -> dict[str, Any]:
        """Return the contents of ``config.yaml``, which is read once.

        The result is empty if the file is absent and the run is not finished, or was
        made by an old version that stores no digest of the file.

        Raises:
            StorageError: The file is damaged or cannot be read, or is not the one that
                a finished run used. Or a finished run has no such file.
        """
        if isinstance(self._config_or_error, StorageError):
            raise self._config_or_error
        return self._config_or_error

    @cached_property
    def _config_or_error(self) -> dict[str, Any] | StorageError:
        try:
            return self._parse_config()
        except StorageError as error:
            return error

    def _parse_config(self) -> dict[str, Any]:
        import yaml

        path = self.path / "config.yaml"
        advice = "restore the file, or restart the run with reuse=false"
        if not self.result:
            advice = "run the same overrides again, which writes the file again"
        if path.is_fifo():  # opening it would wait for a writer
            raise damaged(path, "it is a named pipe", advice)
        digest = self.result.get("config_sha256")
        try:
            content = path.read_bytes()
        except OSError as error:
            if digest is None:
                return {}
            is_absent = isinstance(error, FileNotFoundError)
            raise StorageError(
                f"no {path.name}" if is_absent else f"{path.name} cannot be read",
                where=str(path),
                got=None if is_absent else error.strerror,
                do=advice,
            ) from None

        if digest is not None and hashlib.sha256(content).hexdigest() != digest:
            raise damaged(path, "it is not the config of the finished run", advice)
        try:
            value = parse_yaml(content.decode())
        except (yaml.YAMLError, ValueError) as error:
            raise damaged(path, "it is not YAML", advice) from error
        if not isinstance(value, dict):
            raise damaged(path, "it is not a mapping", advice)
        return value

    @cached_property
    def resolved_config(self) -> ResolvedConfig:
        """The config that ``config.yaml`` stores, empty if it is absent or damaged."""
        return ResolvedConfig.from_stored(self.config)

    @cached_property
    def status(self) -> str:
        """Status of the run.

        It is the status in ``status.json``, with these exceptions:

        - ``stale``: the status in the file is running, but no process holds the lock.
        - ``done``: there is a result, but no status. Also if there is a result, and the
          status in the file is failed, interrupted, or running without a lock: the
          process died, or the disk was full, after the result had been written.
        - ``unknown``: there is no result, and the status is done or absent.
        - ``damaged``: the result of a finished run is damaged, or there is no result
          and ``status.json`` is damaged.
        """
        status = str(self.state.get("status", "done" if self.result else "unknown"))
        if not self.result and status in ("unknown", "done") and damage(self.path):
            return "damaged"
        if not self.result and status == "done":
            return "unknown"
        dead = status == "running" and not self.is_locked()
        if self.result and (dead or status in ("failed", "interrupted")):
            return "done"
        return "stale" if dead else status

    def is_locked(self) -> bool:
        """Return whether a process works in this folder now."""
        try:
            with self.lock():
                return False
        except (StorageError, OSError):
            # An OSError is raised if the folder belongs to another user and cannot be
            # locked.
            return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder.

        A folder of files that were set aside has no lock, because no run writes to it.

        Raises:
            StorageError: Another process holds the lock.
        """
        from filelock import FileLock, Timeout

        if not (self.path / "lock").exists():
            yield
            return

        lock = FileLock(self.path / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise StorageError(
                "this run is being executed",
                where=str(self.path),
                got=f"process {self.state.get('pid', '?')} on {self.state.get('host', '?')}",
            ) from None

        try:
            yield
        finally:
            lock.release()

    @property
    def choices(self) -> dict[str, Any]:
        """The chosen option of each config group."""
        found = self.result.get("choices") or self.config.get("choices")
        return found if isinstance(found, dict) else {}

    def choice(self, group: str) -> str:
        """Return the run's option of `group`, which is ``method`` or ``dataset``.

        If the chosen option is not known, the matching part of the folder's name is
        returned.
        """
        method, _, dataset = self.path.parent.name.rpartition("-")[0].partition("-")
        return str(self.choices.get(group) or {"method": method, "dataset": dataset}[group])

    @property
    def overrides(self) -> list[str]:
        """Overrides as they were typed."""
        return list(self.result.get("overrides") or self.config.get("overrides") or [])

    @property
    def headline(self) -> dict[str, Any] | None:
        """Metric, rule and value of the main result, or None until the run is done."""
        return self.result.get("headline") if self.status == "done" else None

    @property
    def rounds(self) -> tuple[Any, Any]:
        """Number of finished rounds and of requested rounds, None if unknown."""
        return self.result.get("rounds", self.state.get("round")), self.state.get(
            "rounds", self.config.get("rounds")
        )

    @cached_property
    def updated(self) -> datetime.datetime:
        """Time of the last status or, without a status, of the folder's last change."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            moment = datetime.datetime.fromisoformat(self.state["updated"])
            return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return datetime.datetime.fromtimestamp(self.path.stat().st_mtime, datetime.UTC)

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return weigh(self.path)

    def is_of_other_code(self) -> bool:
        """Return whether the present code differs from the code of the run.

        Fingerprints of the code are compared. The result is False if they cannot be
        compared because the config is missing, or because a plug-in or a module that
        it imported is not found or cannot be read.
        """
        from fedexp.storage.identity import code_hash, find_module, targets

        if str(Path.cwd()) not in sys.path and "" not in sys.path:
            # The command `fedexp` also looks in the working directory for the user's
            # modules.
            sys.path.insert(0, str(Path.cwd()))
        modules = {*targets(self.config), *own_code(self.path)[0]}
        if not self.config or not all(map(find_module, modules)):
            return False
        try:
            return code_hash(self.config)[:8] != self.path.name.partition(".")[0]
        except (SyntaxError, ValueError, OSError):
            return False


def own_code(folder: Path) -> tuple[dict[str, str], dict[str, str | None]]:
    """Return the user code of a run as (sha256 by module, commit by folder).

    Both are empty if the run has no user code, or if its ``sources.json`` is damaged.
    """
    found = read_mapping(folder / SOURCES)
    modules, commits = found.get("modules") or {}, found.get("commits") or {}
    try:
        return {name: str(facts["sha256"]) for name, facts in modules.items()}, dict(commits)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, {}


def resume_condition(config: Mapping[str, Any]) -> str:
    """Return the condition under which the same command resumes an unfinished run.

    With ``reuse=false``, each start of a run moves its earlier files aside.

    Args:
        config: Values of the run's config. They may be empty.
    """
    return "" if config.get("reuse", True) else " without reuse=false"


def find_runs(root: Path) -> list[StoredRun]:
    """Return all runs in ``<root>/runs``, newest first.

    Raises:
        StorageError: The folder's path is too long, or the folder cannot be read.
    """
    try:
        folders = [path for path in (root / "runs").glob("*/*") if _is_run(path)]
    except OSError as error:
        if (known := refused(error, root)) is None:
            raise
        raise known from error
    return sorted(
        (StoredRun(path) for path in folders),
        key=lambda run: (run.updated, run.name),
        reverse=True,
    )


def _is_run(path: Path) -> bool:
    return path.is_dir() and _FOLDER.fullmatch(path.name) is not None


def find_run(root: Path, name: str) -> StoredRun:
    """Return the run at path `name`, or the run whose name contains `name`.

    Raises:
        FedexpError: There is no such run, or more than one.
    """
    path, matches = Path(name), []
    try:
        is_folder = path.is_dir()
    except OSError:  # the name is too long for a path
        is_folder = False
    if is_folder:
        if (path / "status.json").exists() or (path / "config.yaml").exists():
            return StoredRun(path.resolve())
        matches = [StoredRun(child.resolve()) for child in sorted(path.iterdir()) if _is_run(child)]

    runs = find_runs(root)
    wanted = name.strip("/")
    matches = matches or [run for run in runs if run.name == wanted]
    matches = matches or [run for run in runs if wanted in run.name]
    current = [run for run in matches if not run.is_aside]
    if len(matches) == 1 or len(current) == 1:
        return (current or matches)[0]

    if matches:
        shown = [run.name for run in matches[:_SHOWN_MATCHES]]
        more = [f"and {len(matches) - len(shown)} more"] if len(matches) > len(shown) else []
        raise ConfigError(
            f"'{name}' matches {len(matches)} runs",
            expected="a part of one run's name only",
            got=", ".join(shown + more),
            do="fedexp-runs list shows the overrides of each run, and selects runs by conditions",
        )

    runs.sort(key=lambda run: not run.is_aside)  # runs set aside are suggested last
    known = {
        key: run.name
        for run in runs
        for key in (
            run.name,
            run.name.partition("-")[0],
            run.path.parent.name.rpartition("-")[0],
            run.path.parent.name,
            run.path.name,
        )
    }
    near = nearest(name, known)
    raise FedexpError(
        f"no run '{name}'",
        where=str(root / "runs"),
        expected="a run folder, or a part of its name",
        do=f"did you mean '{known[near]}'?"
        if near
        else "fedexp-runs list shows all runs (--root for another folder)",
    )


def warnings_of_configs(runs: Iterable[StoredRun]) -> Iterator[str]:
    """Yield a warning for each run whose ``config.yaml`` cannot be used."""
    for run in runs:
        try:
            run.read_config()
        except StorageError as error:
            todo = error.facts["to do"]
            yield f"the config of {run.name} is not used: {error.what} ({todo})"


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if it is absent or damaged."""
    try:
        value = read_json(path)
    except (OSError, StorageError):
        return {}
    return value if isinstance(value, dict) else {}


def damage(folder: Path, *names: str) -> str:
    """Return a message that names a damaged file of a run, or "" if none is damaged.

    A file that cannot be read for another reason (permissions) counts as undamaged.

    Args:
        folder: Folder of the run.
        *names: Names of the files to check. Without names, ``result.json`` and
            ``status.json`` are checked.
    """
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
    """Return the size of a file or folder in bytes."""
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may be writing to the folder
                total += (Path(folder) / name).lstat().st_size
    return total
