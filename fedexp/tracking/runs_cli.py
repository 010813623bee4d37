"""The ``fedexp-runs`` command: list, show, diff, clean. Reads run folders; needs no torch."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import ConfigError, FedexpError, StorageError

if TYPE_CHECKING:
    from rich.console import Console

_FOLDER = re.compile(r"[0-9a-f]{8}(\.\d+)?")  # <codehash8>, or <codehash8>.<k> for files that were set aside
_COLOURS = {"done": "green", "running": "cyan", "failed": "red", "stale": "yellow", "interrupted": "yellow"}
_SHOWN_MATCHES = 8


def main() -> None:
    """Console entry point."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line; returns the exit code (2 for errors of the user's, told without a traceback)."""
    from fedexp.cli import guarded

    options = _parser().parse_args(arguments)
    try:
        return guarded(lambda: options.run(options))
    except BrokenPipeError:  # `fedexp-runs list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedexp-runs", description="What runs there are, and what they weigh.")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--root", type=Path, default=Path("outputs"), help="output_root of the runs (%(default)s)")
    commands = parser.add_subparsers(required=True, metavar="command")

    listing = commands.add_parser("list", parents=[shared], help="all runs, newest first")
    listing.add_argument("--json", action="store_true", help="machine-readable: one JSON list")
    listing.set_defaults(run=_list)

    what = "a run folder, or a part of its name that no other run has"
    show = commands.add_parser("show", parents=[shared], help="one run: result, costs, files")
    show.add_argument("name", metavar="run", help=what)
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", parents=[shared], help="what differs between two runs")
    diff.add_argument("a", help=what)
    diff.add_argument("b", help=what)
    diff.set_defaults(run=_diff)

    clean = commands.add_parser(
        "clean",
        parents=[shared],
        help="delete what is not needed; shows what it would do unless --yes is given",
        description="Deletes the kinds of files that are named. A run that is being executed is never touched.",
    )
    clean.add_argument("--failed", action="store_true", help="runs that failed")
    clean.add_argument("--stale", action="store_true", help="runs that died without a word (their process is gone)")
    clean.add_argument("--old-code", action="store_true", help="runs that today's code would not reuse")
    clean.add_argument("--set-aside", action="store_true", help="files that reuse=false moved aside (<code>.<k>)")
    clean.add_argument("--checkpoints", action="store_true", help="checkpoints of runs that are done")
    clean.add_argument("--memo", action="store_true", help="stored client work; it is trained again when needed")
    clean.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    clean.set_defaults(run=_clean)
    return parser


@dataclass(frozen=True)
class StoredRun:
    """A run folder as it lies on disk; every property may be absent or damaged, none of them raises for it."""

    path: Path

    @property
    def name(self) -> str:
        """``<method>-<dataset>-<confighash8>/<codehash8>``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def is_aside(self) -> bool:
        """Earlier files, moved aside by reuse=false."""
        return "." in self.path.name

    @cached_property
    def state(self) -> dict[str, Any]:
        """``status.json``."""
        return _mapping(self.path / "status.json")

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``; empty without one."""
        return _mapping(self.path / "result.json")

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
    def status(self) -> str:
        """That of status.json; ``stale`` where it says running and nobody holds the lock; ``unknown`` without one."""
        status = str(self.state.get("status", "unknown"))
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
            raise StorageError("this run is being executed", where=str(self.path), got=owner) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def choices(self) -> dict[str, Any]:
        """The option of each config group."""
        found = self.result.get("choices") or self.config.get("choices")
        return found if isinstance(found, dict) else {}

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
        return self.result.get("rounds", self.state.get("round")), self.state.get("rounds", self.config.get("rounds"))

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
        return _weigh(self.path)

    def is_of_other_code(self) -> bool:
        """Whether today's code has another fingerprint. False where that cannot be told: a plug-in that is not found."""
        from fedexp.storage.identity import code_hash

        if not self.config or not all(_is_importable(module) for module in _plugin_modules(self.config)):
            return False
        return code_hash(self.config)[:8] != self.path.name.partition(".")[0]


def find_runs(root: Path) -> list[StoredRun]:
    """All runs under ``<root>/runs``, newest first."""
    folders = (path for path in (root / "runs").glob("*/*") if _is_run(path))
    return sorted((StoredRun(path) for path in folders), key=lambda run: (run.updated, run.name), reverse=True)


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
            f"'{name}' fits {len(matches)} runs", expected="a part of one name only", got=", ".join(shown + more)
        )
    runs.sort(key=lambda run: not run.is_aside)  # what was set aside is the last to be suggested
    known = {key: run.name for run in runs for key in (run.name, run.path.parent.name, run.path.name)}
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    raise FedexpError(
        f"no run '{name}'",
        where=str(root / "runs"),
        expected="a run folder, or a part of its name",
        do=f"did you mean '{known[near[0]]}'?" if near else "fedexp-runs list shows what there is (--root: elsewhere)",
    )


def _list(options: argparse.Namespace) -> int:
    runs = find_runs(options.root)
    if options.json:
        print(json.dumps([_facts(run) for run in runs], indent=2))
        return 0
    if not runs:
        print(f"no runs under {options.root / 'runs'}")
        return 0
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("folder", "method", "dataset", "status", "headline", "rounds", "age", "size", "overrides"):
        right = column in ("rounds", "age", "size")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for run in runs:
        colour = _COLOURS.get(run.status, "white")
        table.add_row(
            _plain(run.name),
            _plain(_choice(run, "method")),
            _plain(_choice(run, "dataset")),
            f"[{colour}]{run.status}[/{colour}]",
            _headline(run),
            _rounds(run),
            _age(run.updated),
            _size(run.size),
            _plain(" ".join(o for o in run.overrides if not o.startswith(("method=", "dataset=", "output_root=")))),
        )
    console = _console()
    console.print(table)
    console.print(f"{len(runs)} runs, {_size(sum(run.size for run in runs))} under {options.root / 'runs'}")
    return 0


def _facts(run: StoredRun) -> dict[str, Any]:
    done, asked = run.rounds
    return {
        "folder": str(run.path.resolve()),
        "name": run.name,
        "method": _choice(run, "method"),
        "dataset": _choice(run, "dataset"),
        "status": run.status,
        "error": run.state.get("error"),
        "set_aside": run.is_aside,
        "headline": run.headline,
        "round": done,
        "rounds": asked,
        "updated": run.updated.isoformat(timespec="seconds"),
        "bytes": run.size,
        "overrides": run.overrides,
    }


def _show(options: argparse.Namespace) -> int:
    from rich.table import Table

    run = find_run(options.root, options.name)
    result = run.result
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def add(name: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            table.add_row(name, _plain(value))

    add("status", f"{run.status}, attempt {run.state.get('attempt', '?')}, {_age(run.updated)} ago")
    add("error", run.state.get("error"))
    add("overrides", " ".join(run.overrides))
    add("choices", _pairs({group: option for group, option in run.choices.items() if option is not None}))
    add("headline", f"{_headline(run)} ({run.headline['rule']})" if run.headline else None)
    add("rounds", _rounds(run))
    add("rounds to target", result.get("rounds_to_target"))
    for group, title in (("metrics", "last"), ("mean_last_10", "mean of last 10"), ("best", "best (oracle)")):
        add(title, _pairs(result.get(group)))
    add("seconds", _pairs(result.get("seconds")))
    add("traffic", ", ".join(f"{way} {_size(count)}" for way, count in (result.get("bytes") or {}).items()))
    add("local steps", result.get("steps"))
    add("partition", _pairs(result.get("partition")))
    add("hashes", _pairs(result.get("hashes")))
    add("numerics", _pairs(result.get("numerics") or _mapping(run.path / "numerics.json")))
    add("environment", _pairs(result.get("environment") or _mapping(run.path / "environment.json")))
    files = sorted(path for path in run.path.iterdir() if path.name != "lock")
    add("files", ", ".join(f"{path.name}{'/' if path.is_dir() else ''} {_size(_weigh(path))}" for path in files))
    add("size", _size(run.size))
    console = _console()
    console.print(run.name, style="bold")
    console.print(table)
    console.print(f"folder: {run.path}", markup=False, soft_wrap=True)
    return 0


def _diff(options: argparse.Namespace) -> int:
    from rich import box
    from rich.table import Table

    from fedexp.storage.identity import scientific

    a, b = find_run(options.root, options.a), find_run(options.root, options.b)
    sides = [dict(_flat(run.config)) for run in (a, b)]
    deciding = set().union(*(dict(_flat(scientific(run.config))) for run in (a, b)))
    keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if key.partition(".")[0] != "overrides"]
    differing = [key for key in keys if sides[0].get(key, _ABSENT) != sides[1].get(key, _ABSENT)]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(_plain(a.name), overflow="fold")
    table.add_column(_plain(b.name), overflow="fold")

    def add(name: str, left: Any, right: Any, style: str | None = None) -> None:
        table.add_row(_plain(name), _plain(left), _plain(right), style=style)

    def compare(name: str, left: Any, right: Any) -> None:
        add(name, left, "the same" if left == right and left is not None else right)

    for key in sorted(differing, key=lambda key: (key not in deciding, keys.index(key))):
        left, right = (_shown(side.get(key, _ABSENT)) for side in sides)
        decides = key in deciding
        add(key if decides else f"{key} (no effect on results)", left, right, None if decides else "dim")
    if not differing:
        add("config", "the same", "the same")
    table.add_section()
    for name in ("config", "code"):
        compare(f"{name} hash", *((run.result.get("hashes") or {}).get(name, _hash(run, name)) for run in (a, b)))
    compare("partition sha256", *((run.result.get("partition") or {}).get("sha256", "-") for run in (a, b)))
    compare("numerics", *(_pairs(_mapping(run.path / "numerics.json")) or "-" for run in (a, b)))
    add("status", a.status, b.status)
    add("rounds", _rounds(a), _rounds(b))
    add("headline", _headline(a), _headline(b))
    console = _console()
    console.print(table)
    if a.headline and b.headline and a.headline["metric"] == b.headline["metric"]:
        console.print(f"{a.headline['metric']}: {b.headline['value'] - a.headline['value']:+.4f} from first to second")
    return 0


def _hash(run: StoredRun, name: str) -> str:
    """The short hash that is in the folder's name."""
    return run.path.parent.name.rpartition("-")[2] if name == "config" else run.path.name.partition(".")[0]


def _clean(options: argparse.Namespace) -> int:
    kinds = ("failed", "stale", "old_code", "set_aside", "checkpoints", "memo")
    if not any(getattr(options, kind) for kind in kinds):
        flags = ", ".join("--" + kind.replace("_", "-") for kind in kinds)
        raise ConfigError("nothing was chosen to be deleted", expected=f"one or more of {flags}")
    freed = 0
    for run in find_runs(options.root):
        target, reason = _disposable(run, options)
        if target is None:
            continue
        size = _weigh(target)
        try:
            with run.lock():
                if StoredRun(run.path).state != run.state:  # launched again since we looked
                    raise StorageError("this run has just been executed", where=str(run.path))
                if options.yes:
                    _delete(target)
        except StorageError:
            print(f"{'kept':<12} {_size(size):>8}  {target}  (being executed)")
            continue
        freed += size
        print(f"{_verb(options)} {_size(size):>8}  {target}  ({reason})")
        if options.yes:
            with contextlib.suppress(OSError):  # other runs of the same config are still there
                run.path.parent.rmdir()
    if options.memo:
        count, size = _clean_memo(options.root / "memo", options.yes)
        freed += size
        print(f"{_verb(options)} {_size(size):>8}  {options.root / 'memo'}  ({count} stored client results)")
    print(f"{_size(freed)} freed" if options.yes else f"{_size(freed)} would be freed: add --yes to delete")
    return 0


def _verb(options: argparse.Namespace) -> str:
    return "deleted     " if options.yes else "would delete"


def _disposable(run: StoredRun, options: argparse.Namespace) -> tuple[Path | None, str]:
    """What of `run` the flags cover, and why."""
    if options.set_aside and run.is_aside:
        return run.path, "set aside"
    if options.failed and run.status == "failed":
        return run.path, "failed"
    if options.stale and run.status == "stale":
        return run.path, "stale"
    if options.old_code and run.is_of_other_code():
        return run.path, "made by other code"
    checkpoint = run.path / "checkpoint"
    if options.checkpoints and run.status == "done" and checkpoint.is_dir():
        return checkpoint, "checkpoint of a run that is done"
    return None, ""


def _delete(folder: Path) -> None:
    """Rename, then delete: a half-deleted run is never taken for a run."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _clean_memo(folder: Path, delete: bool) -> tuple[int, int]:
    """(entries, bytes) of the memo, deleted if asked. Runs cope with entries that vanish; folders and locks stay."""
    count = size = 0
    for entry in folder.glob("*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat().st_size
            count += 1
            if delete:
                entry.unlink()
    return count, size


def _plugin_modules(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"].rpartition(".")[0]
        for value in node.values():
            yield from _plugin_modules(value)


def _is_importable(module: str) -> bool:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where `fedexp` looks for the user's modules, too
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _mapping(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where it is absent or damaged."""
    from fedexp.storage.files import read_json

    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _weigh(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may be writing
                total += (Path(folder) / name).lstat().st_size
    return total


_ABSENT = object()


def _shown(value: Any) -> str:
    return "-" if value is _ABSENT else "null" if value is None else str(value)


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _choice(run: StoredRun, group: str) -> str:
    """Method or data set: what was chosen, else what the folder's name says."""
    head = run.path.parent.name.rpartition("-")[0]
    method, _, dataset = head.partition("-")
    return str(run.choices.get(group) or {"method": method, "dataset": dataset}[group])


def _headline(run: StoredRun) -> str:
    return f"{run.headline['metric']} {run.headline['value']:.4f}" if run.headline else "-"


def _rounds(run: StoredRun) -> str:
    done, asked = run.rounds
    if done is None:
        return "-"
    return str(done) if asked in (None, done) else f"{done}/{asked}"


def _pairs(values: Any) -> str:
    """A mapping on one line; numbers short."""
    if not isinstance(values, Mapping):
        return ""
    return ", ".join(
        f"{key} {_pairs(value) if isinstance(value, Mapping) else f'{value:.4g}' if isinstance(value, float) else value}"
        for key, value in values.items()
        if value is not None
    )


def _age(moment: datetime.datetime) -> str:
    seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - moment).total_seconds())
    for limit, length, unit in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _plain(value: Any) -> str:
    """Text for a table cell; brackets of overrides are no markup."""
    from rich.markup import escape

    return escape(str(value))


def _console() -> Console:
    from rich.console import Console

    # rich wraps cells at 80 columns where there is no terminal; a table in a file is better wide than wrapped
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=220, no_color=True, highlight=False)
