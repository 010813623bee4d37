"""What is known of whole tables without composing their thousands of configs again: where their runs lie, and how these stand.

The index is a file in the user's cache folder (``XDG_CACHE_HOME``). An entry holds as long as the config files, the package's
sources, the table's own file, the overrides and the working directory stay as they are; how runs stand is read from their folders
every time. Of a built-in table only those runs are composed that a stored run may be, by the options and the seed that both name,
and one of every data set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir, user_conf_dir
from fedexp.core.errors import FedexpError
from fedexp.storage.files import write_json
from fedexp.storage.identity import versions
from fedexp.storage.run_folder import RunFolder, standing
from fedexp.storage.stored_run import find_runs, read_mapping

if TYPE_CHECKING:
    from fedexp.tables.lookup import CellRun

FAILED = ("failed", "damaged")  # statuses of runs that were there and gave nothing
_VERSION = 3
# Groups whose option tells runs apart: no two runs of built-in tables with other options here have one scientific config.
_GROUPS = (
    "method",
    "trainer",
    "aggregator",
    "partition",
    "dataset",
    "model",
    "server_optimizer",
    "task",
)
_Stored = dict[str, list[dict[str, Any]]]  # seed -> each stored run's options of those groups


class Index:
    """The rows of ``fedexp-table list``.

    Args:
        overrides: the user's.
        tell: is told one line before a table is composed, which takes seconds.
    """

    def __init__(self, overrides: Sequence[str], tell: Callable[[str], None]) -> None:
        self._overrides, self._tell = list(overrides), tell
        at = hashlib.blake2b(f"{Path.cwd()}\0{overrides}".encode(), digest_size=8).hexdigest()
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = home / "fedexp" / f"tables-{at}.json"
        stored = read_mapping(self._path)
        self._tables: dict[str, Any] = (
            stored.get("tables", {}) if stored.get("version") == _VERSION else {}
        )
        self._seconds: dict[str, Any] = (
            stored.get("seconds", {}) if self._tables else {}
        )  # of results, by file
        self._options: dict[str, Any] = (
            stored.get("options", {}) if self._tables else {}
        )  # of stored runs, by folder
        self._stored_runs: dict[Path, _Stored] = {}
        self._changed = False
        self._shared = _surroundings()

    def row(self, name: str, path: Path) -> dict[str, Any]:
        """How the runs of table `name`, whose file is `path`, stand; a table whose file is wrong says so as its state."""
        key = f"{self._shared} {_stamp(path)}"
        entry = self._tables.get(name)
        if entry is None or entry["key"] != key:
            self._tell(f"composing runs of table {name}")
            entry, lasting = _entry(name, self._overrides, lazy=path.is_relative_to(conf_dir()))
            self._tables.pop(name, None)
            if lasting:
                self._tables[name] = {**entry, "key": key}
                self._changed = True
        if entry["waiting"]:
            self._look_up(entry)
        return self._row(entry)

    def save(self) -> None:
        """Write what is new; a folder that cannot be written loses nothing but time."""
        if self._changed:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(
                    self._path,
                    {
                        "version": _VERSION,
                        "tables": self._tables,
                        "seconds": self._seconds,
                        "options": self._options,
                    },
                )

    def _look_up(self, entry: dict[str, Any]) -> None:
        """Compose those of the waiting runs that a stored run may be."""
        stored = self._stored(Path(entry["root"]))
        fitting = [overrides for overrides in entry["waiting"] if _may_be_stored(overrides, stored)]
        for overrides in fitting:
            try:
                folder = RunFolder.of(compose(overrides)).path
            except FedexpError as error:
                entry["unready"] = f"its config cannot be composed: {error.what}"
                continue
            entry["folders"].append(str(folder))
            entry["waiting"].remove(overrides)
            self._changed = True

    def _stored(self, root: Path) -> _Stored:
        """The options and the seeds of the runs under `root`."""
        if root not in self._stored_runs:
            stored: _Stored = defaultdict(list)
            for run in find_runs(root):
                path = str(run.path)
                if path not in self._options and run.config and run.choices:
                    self._options[path] = [
                        run.config.get("seed"),
                        {group: run.choices.get(group) for group in _GROUPS},
                    ]
                    self._changed = True
                if path in self._options:
                    seed, options = self._options[path]
                    stored[str(seed)].append(options)
            self._stored_runs[root] = stored
        return self._stored_runs[root]

    def _row(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        stands = [self._stand(folder) for folder in entry["folders"]]
        statuses = [status for status, _ in stands]
        done, failed = statuses.count("done"), sum(map(statuses.count, FAILED))
        runs = entry["about"]["runs"]
        state = (
            "done"
            if done == runs
            else f"{failed} failed"
            if failed
            else "missing"
            if not done
            else "in part"
        )
        if entry["broken"]:
            state = f"broken: {entry['broken']}"
        elif entry["unready"]:
            state = f"{state}; {entry['unready']}"
        there = {
            name: all(Path(file).exists() for file in files)
            for name, files in entry["data"].items()
        }
        absent = dict.fromkeys(entry["unknown"], False)
        seconds = sum(seconds for _, seconds in stands)
        return {
            **entry["about"],
            "done": done,
            "failed": failed,
            "data": there | absent,
            "seconds": seconds,
            "state": state,
        }

    def _stand(self, folder: str) -> tuple[str, float]:
        """A run's status, and what it cost."""
        if not Path(folder).is_dir():
            return "missing", 0.0
        stamp = _stamp(Path(folder, "result.json"))
        known = self._seconds.get(folder)
        if known is not None and known[0] == stamp:
            return "done", known[1]
        result, state = standing(RunFolder(Path(folder)))
        if not result:
            return str(state.get("status", "missing")), 0.0
        seconds = float(result["seconds"]["total"])
        self._seconds[folder] = [stamp, seconds]
        self._changed = True
        return "done", seconds


def _entry(name: str, overrides: Sequence[str], lazy: bool = False) -> tuple[dict[str, Any], bool]:
    """What the index keeps of a table's full variant, and whether it may: not what a user's own code or files decide.

    Args:
        lazy: compose one run of every data set; the others wait.
    """
    from fedexp.tables.cells import planned_cells
    from fedexp.tables.lookup import Finder
    from fedexp.tables.schema import load_table

    found: dict[str, Any] = {
        "broken": "",
        "unready": "",
        "folders": [],
        "data": {},
        "unknown": [],
        "waiting": [],
        "root": "",
    }
    empty = {
        "paper": "",
        "source": "",
        "title": "",
        "cells": 0,
        "without_method": 0,
        "runs": 0,
        "flop": None,
        "forms": [],
    }
    try:
        table = load_table(name)
        cells = planned_cells(table, extra=overrides)
    except FedexpError as error:
        where = error.facts.get("where")
        return {
            **found,
            "about": {"table": name, **empty},
            "broken": error.what + (f" ({where})" if where else ""),
        }, True
    every = {job.overrides: job for slot in cells for job in slot.jobs}
    first = {_value(overrides, "dataset"): job for overrides, job in every.items()}
    now = list((first if lazy else every).values())
    runs = list(map(Finder(), now))
    about = {
        "table": name,
        "paper": table.paper,
        "source": table.source,
        "title": table.title,
        "cells": len(cells),
        "without_method": sum(not slot.jobs for slot in cells),
        "runs": len(every),
        "flop": table.flop,
        "forms": ["full", *(variant for variant in ("reduced", "smoke") if table.smaller(variant))],
    }
    data, unknown = _data(runs)
    composed = [run for run in runs if run.config]
    found |= {
        "about": about,
        "unready": min((run.error for run in runs if not run.config), default=""),
        "folders": [str(run.folder) for run in composed],
        "data": data,
        "unknown": unknown,
        "waiting": [
            list(overrides)
            for overrides in every
            if overrides not in {job.overrides for job in now}
        ],
        "root": next((run.config["output_root"] for run in composed), ""),
    }
    return found, len(composed) == len(runs) and all(_is_lasting(run.config) for run in composed)


def _is_lasting(config: Mapping[str, Any]) -> bool:
    from fedexp.storage.identity import targets

    files = config["contents"] or config["client_models"]["path"] or _may_name_a_file(config)
    return not files and all(module.startswith("fedexp.") for module in targets(config))


def _may_be_stored(overrides: Sequence[str], stored: _Stored) -> bool:
    named = {group: name for group in _GROUPS if (name := _value(overrides, group)) is not None}
    same_seed = stored[str(_value(overrides, "seed"))]
    return any(
        all(options[group] == name for group, name in named.items()) for options in same_seed
    )


def _value(overrides: Sequence[str], key: str) -> str | None:
    """What `overrides` set `key` to; None where they do not."""
    return next(
        (override.partition("=")[2] for override in overrides if override.startswith(f"{key}=")),
        None,
    )


def _may_name_a_file(config: Mapping[str, Any]) -> bool:
    """Whether ``architectures.clients``, which is composed into a list, may have been read from a file.

    Its overrides say so; or a file of the user's own config that speaks of architectures.
    """
    key = "architectures.clients="
    own = [override for override in config["overrides"] if override.lstrip("+").startswith(key)]
    listed = all(override.partition("=")[2].startswith(("[", "{", "null")) for override in own)
    mine = user_conf_dir()
    may = mine is not None and any(
        "architectures" in path.read_text() for path in mine.rglob("*.yaml")
    )
    return bool(config["architectures"]["clients"]) and not (listed and not may)


def _data(runs: Iterable[CellRun]) -> tuple[dict[str, list[str]], list[str]]:
    """The files of every data set that a table needs, and those whose files cannot be said."""
    from fedexp.core.build import build
    from fedexp.data.dataset import Dataset

    files: dict[str, list[str]] = {}
    unknown: list[str] = []
    for run in runs:
        name = str(run.config.get("choices", {}).get("dataset"))
        if not run.config or name in files or name in unknown:
            continue
        try:
            dataset = build(Dataset, run.config["dataset"], "dataset")  # type: ignore[type-abstract]
            files[name] = [
                str(file)
                for file in dataset.expected_files(Path(run.config["data_root"]).expanduser())
            ]
        except FedexpError:
            unknown.append(name)
    return files, unknown


def _surroundings() -> str:
    """A hash of all that decides where runs lie, but for tables' own files: config files, sources, torch, data."""
    state = hashlib.blake2b(digest_size=16)
    folders = [(conf_dir(), "*.yaml"), (Path(__file__).resolve().parents[1], "*.py")]
    if (mine := user_conf_dir()) is not None:
        folders.append((mine, "*.yaml"))
    for folder, pattern in folders:
        for path in sorted(folder.rglob(pattern)):
            if path.relative_to(folder).parts[0] != "table":
                state.update(f"{path} {_stamp(path)}\n".encode())
    state.update(f"{versions()} {os.environ.get('FEDEXP_DATA')}".encode())
    return state.hexdigest()


def _stamp(path: Path) -> str | None:
    """A file's size and time; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return json.dumps([found.st_size, found.st_mtime_ns])
