"""The ``fedexp-runs`` command, which lists, compares, repeats and deletes runs.

It reads run folders. Only ``rerun`` and ``export --wandb`` need torch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from fedexp.analysis.presets import swapped_parts
from fedexp.commands.errors import Parser, run_guarded
from fedexp.core.errors import ConfigError, StorageError
from fedexp.storage.files import delete_path, stale_files, temporary_path, write_text
from fedexp.storage.selection import ABSENT, dotted_items, ordered, select, text_of
from fedexp.storage.sources import differences
from fedexp.storage.stored_run import (
    StoredRun,
    find_run,
    find_runs,
    own_code,
    read_mapping,
    warnings_of_configs,
    weigh,
)
from fedexp.tracking.outlet import visible
from fedexp.tracking.terminal import (
    console,
    escaped,
    headline_text,
    memory_text,
    ruled_table,
    size_text,
)

_COLOURS = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "damaged": "red",
    "stale": "yellow",
    "interrupted": "yellow",
}
# Flags of the command ``clean``, and the runs or files that each flag selects. They are
# deleted only with ``--yes``.
_CLEAN_FLAGS = {
    "--failed": "runs that failed",
    "--damaged": "runs whose result or status cannot be read",
    "--stale": "runs whose process is gone and left no error",
    "--old-code": "runs that today's code would not reuse",
    "--set-aside": "files that reuse=false moved aside (<code>.<k>)",
    "--checkpoints": "checkpoints of runs that are done",
    "--memo": "stored client work, which is trained again when needed",
}


def main() -> None:
    """Run the command as a console script."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run the command line.

    Returns:
        The exit code. It is 2 for errors of the user, which are printed without a
        traceback, and 1 if the output cannot be written.
    """
    return run_guarded(lambda: parser().run(arguments), needs_output=True)


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="fedexp-runs", description="Stored runs: their results, differences and size."
    )
    shared = Parser(add_help=False)
    shared.add_argument(
        "--root", type=Path, default=Path("outputs"), help="output_root of the runs (%(default)s)"
    )
    commands = parser.add_subparsers(required=True, dest="command")

    chosen = Parser(add_help=False)
    chosen.add_argument(
        "conditions",
        nargs="*",
        metavar="key=value",
        help="only runs that meet all of these, on any key of the config, group or metric: "
        "method=NAME,NAME 'partition.alpha<0.5' status!=done 'headline>=0.9'",
    )

    listing = commands.add_parser(
        "list", command=_list, parents=[shared, chosen], help="all runs, newest first"
    )
    listing.add_argument(
        "--sort",
        metavar="KEY",
        help="by headline, seconds, size, name, a metric or any key of the config: "
        "numbers from large to small, texts from A to Z",
    )

    listing.add_argument(
        "--json",
        action="store_true",
        help="machine-readable: one JSON list, with null for NaN and infinity",
    )

    what = "a run folder, or a part of its name that no other run has"
    show = commands.add_parser(
        "show", command=_show, parents=[shared], help="one run: result, costs, files"
    )
    show.add_argument("name", metavar="run", help=what)

    diff = commands.add_parser(
        "diff", command=_diff, parents=[shared], help="what differs between two runs"
    )
    diff.add_argument("a", help=what)
    diff.add_argument("b", help=what)

    rerun = commands.add_parser(
        "rerun",
        command=_rerun,
        parents=[shared],
        help="run a stored run's config again and compare the bits",
        description="Runs exactly the stored config again in <root>/reruns, with the numerics of "
        "the stored run, without the client cache (memo), and with logger=local. "
        "The stored run is not changed. "
        "The exit code is 1 if the results are not bit-identical.",
    )

    rerun.add_argument("name", metavar="run", help=what)
    rerun.add_argument(
        "--data-root", help="folder of the data sets (default: that of the stored run)"
    )

    export = commands.add_parser(
        "export",
        command=_export,
        parents=[shared, chosen],
        help="runs as CSV, one row each or one row per round, or to W&B afterwards",
    )
    export.add_argument(
        "--rounds", action="store_true", help="one row per run and round instead of one per run"
    )
    export.add_argument("--out", type=Path, help="the CSV file (default: standard output)")
    export.add_argument(
        "--wandb",
        choices=("offline", "online"),
        help="send finished runs to W&B instead, from their files",
    )

    export.add_argument("--project", default="fedexp", help="project of W&B (%(default)s)")
    export.add_argument("--entity", help="entity of W&B (default: that of the account)")
    export.add_argument("--group", help="group under which W&B shows them together")

    table = commands.add_parser(
        "table",
        command=_table,
        parents=[shared, chosen],
        help="a table of runs: means over seeds, paired tests",
        description="rows and cols are keys whose values distinguish rows and columns. value is a "
        "metric or a cost such as total/bytes_up (default: the headline). against=COLUMN compares "
        "the other columns with this one only. better=higher or better=lower sets which numbers "
        "are better. With --aggregate, the default is lower for losses, errors, seconds, bytes, "
        "local steps and size, and higher for other numbers.",
        epilog="example: fedexp-runs table rows=partition.alpha cols=method dataset=mnist",
    )
    table.add_argument(
        "--aggregate",
        action="store_true",
        help="also summarise the columns over the rows by means, average ranks, win rates "
        "and probabilities of improvement",
    )
    table.add_argument(
        "--out",
        type=Path,
        help="also write the table to this file, as Markdown (.md), LaTeX (.tex) or CSV (.csv, "
        "one file per block)",
    )

    plot = commands.add_parser(
        "plot",
        command=_plot,
        parents=[shared, chosen],
        help="a picture of runs: means over seeds with 95 %% intervals, as PNG, SVG and PDF",
        description="x is round, step, bytes, seconds, local_steps or a key of the config with "
        "numbers (default: round). y is a metric (default: the headline). by, rows and cols are "
        "keys, separated by commas, that distinguish curves and panels (default: by=method).",
        epilog="example: fedexp-runs plot x=round y=test/global/acc by=method "
        "cols=partition.alpha dataset=mnist",
    )
    plot.add_argument(
        "--out",
        type=Path,
        help="the file; without .png, .svg or .pdf, all three are written "
        "(default: a name in <root>/plots)",
    )
    plot.add_argument(
        "--allow",
        default="",
        metavar="KEY[,KEY]",
        help="keys in which curves may differ although the picture does not show them, "
        "e.g. local.lr of tuned methods",
    )

    clean = commands.add_parser(
        "clean",
        command=_clean,
        parents=[shared],
        help="delete what is not needed (without --yes, only shows what it would delete)",
        description="Deletes the kinds of files that are named. "
        "A run that is being executed is never touched.",
    )

    for flag, text in _CLEAN_FLAGS.items():
        clean.add_argument(flag, action="store_true", help=text)
    clean.add_argument("--yes", action="store_true", help="delete (without it nothing is deleted)")

    check = commands.add_parser(
        "check-conf",
        command=_check_conf,
        help="list the lines of configs and modules that use a path or key of version 0.1",
        description="Lists every line of YAML and Python files that uses a class path, an import "
        "or a config key which version 0.2 changed, with the new name. Nothing is written. "
        "Exit code 1 if there are such lines.",
    )
    check.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="path",
        help="a file, or a folder of configs, with which the Python files beside it are read "
        "(default: conf)",
    )
    return parser


def _list(options: argparse.Namespace) -> int:
    there = find_runs(options.root)
    if options.conditions or options.sort:
        _warn_of_unusable_configs(there)
    runs = select(there, options.conditions)
    if options.sort:
        runs = ordered(runs, options.sort)
    if options.json:
        print(json.dumps([_without_nan(_run_facts(run)) for run in runs], indent=2))
        return 0

    if not runs:
        if not there:
            print(f"no runs under {options.root / 'runs'}")
            return 0
        # scipy, which this module imports, is not needed to list runs.
        from fedexp.analysis.groups import unmet_text

        found = unmet_text(there, options.conditions)
        print(visible(f"none of {len(there)} runs meets the conditions (expected {found})"))
        return 0

    texts = ("folder", "method", "dataset", "status", "headline")
    table = ruled_table(
        *(Column(name, overflow="fold") for name in texts),
        *(
            Column(name, justify="right", overflow="fold", no_wrap=True)
            for name in ("rounds", "age", "size")
        ),
        Column("overrides", overflow="fold"),
    )
    for run in runs:
        colour = _COLOURS.get(run.status, "white")
        table.add_row(
            escaped(run.name),
            escaped(" ".join([run.choice("method"), *swapped_parts(run)])),
            escaped(run.choice("dataset")),
            f"[{colour}]{run.status}[/{colour}]",
            headline_text(run.headline),
            _rounds_text(run),
            _age_text(run.updated),
            size_text(run.size),
            escaped(
                " ".join(
                    o
                    for o in run.overrides
                    if not o.startswith(_COLUMN_KEYS) and o not in swapped_parts(run)
                )
            ),
        )

    out = console()
    out.print(table)
    count = f"{len(runs)} runs" if len(runs) == len(there) else f"{len(runs)} of {len(there)} runs"
    out.print(
        f"{count}, {size_text(sum(run.size for run in runs))} under {options.root / 'runs'}",
        markup=False,
    )

    return 0


def _run_facts(run: StoredRun) -> dict[str, Any]:
    done, asked = run.rounds
    return {
        "folder": str(run.path.resolve()),
        "name": run.name,
        "method": run.choice("method"),
        "swapped": swapped_parts(run),
        "dataset": run.choice("dataset"),
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


def _without_nan(value: Any) -> Any:
    """Return a JSON value with null in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(options: argparse.Namespace) -> int:
    run = find_run(options.root, options.name)
    columns = Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, show_header=False, box=None, pad_edge=False)
    for name, value in _shown_rows(run).items():
        if value not in (None, "", [], {}):
            table.add_row(name, escaped(value))

    out = console()
    out.print(run.name, style="bold", markup=False)
    out.print(table)
    out.print(f"folder: {run.path}", markup=False, soft_wrap=True)

    return 0


def _shown_rows(run: StoredRun) -> dict[str, Any]:
    """Return the rows that ``fedexp-runs show`` prints, by their labels.

    Rows without a value (None or empty) are not printed.
    """
    result = run.result
    modules, commits = own_code(run.path)
    files = sorted(path for path in run.path.iterdir() if path.name != "lock")
    choices = {group: option for group, option in run.choices.items() if option is not None}
    speed, share = result.get("steps_per_second"), result.get("stacked_share")
    memory = result.get("peak_memory")

    return {
        "status": f"{run.status}, attempt {run.state.get('attempt', '?')}, "
        f"{_age_text(run.updated)} ago",
        "error": run.state.get("error"),
        "overrides": " ".join(run.overrides),
        "choices": _mapping_text(choices),
        "headline": f"{headline_text(run.headline)} ({run.headline['rule']})"
        if run.headline
        else None,
        "test data in training": result.get("test_data_in_training"),
        "rounds": _rounds_text(run),
        "rounds to target": result.get("rounds_to_target"),
        "rounds to targets": _mapping_text(result.get("rounds_to")),
        "last": _mapping_text(result.get("metrics")),
        **_last_ten(result),
        "best (oracle)": _mapping_text(result.get("best")),
        "seconds": _mapping_text(result.get("seconds")),
        "traffic": ", ".join(
            f"{way} {size_text(count)}" for way, count in (result.get("bytes") or {}).items()
        ),
        "local steps": result.get("local_steps"),
        "steps a second": speed and f"{speed:.4g}",
        "stacked share": None if share is None else f"{share:.0%}",
        "engine": "; ".join(result.get("engine_notes") or ()),
        "peak memory": memory and memory_text(memory),
        "memory probe": (result.get("memory_probe") or {}).get("text"),
        "trace": (result.get("profile") or {}).get("trace"),
        "partition": _mapping_text(result.get("partition")),
        "fedexp version": result.get("fedexp_version", "0.1") if result else None,
        "hashes": _mapping_text(result.get("hashes")),
        "numerics": _mapping_text(
            result.get("numerics") or read_mapping(run.path / "numerics.json")
        ),
        "environment": _mapping_text(
            result.get("environment") or read_mapping(run.path / "environment.json")
        ),
        "own code": ", ".join(f"{name} {sha256[:8]}" for name, sha256 in modules.items()),
        "own code is in": ", ".join(
            f"{home} (commit {at or 'none'})" for home, at in commits.items()
        ),
        "files": ", ".join(
            f"{path.name}{'/' if path.is_dir() else ''} {size_text(weigh(path))}" for path in files
        ),
        "size": size_text(run.size),
    }


def _diff(options: argparse.Namespace) -> int:
    from fedexp.storage.identity import scientific

    a, b = find_run(options.root, options.a), find_run(options.root, options.b)
    for run in (a, b):
        run.read_config()
    configs = a.resolved_config, b.resolved_config
    # Overrides are not compared, because the values already include their effect.
    sides = [
        dict(
            dotted_items({**config.values, "contents": config.contents, "choices": config.choices})
        )
        for config in configs
    ]
    deciding = {key for config in configs for key, _ in dotted_items(scientific(config))}
    keys = [*dict.fromkeys([*sides[0], *sides[1]])]
    differing = [key for key in keys if sides[0].get(key, ABSENT) != sides[1].get(key, ABSENT)]

    names = (Column(escaped(run.name), overflow="fold") for run in (a, b))
    table = ruled_table(Column("", no_wrap=True), *names)

    def add(name: str, left: Any, right: Any, style: str | None = None) -> None:
        table.add_row(escaped(name), escaped(left), escaped(right), style=style)

    def compare(name: str, left: Any, right: Any) -> None:
        add(name, left, "the same" if left == right and left not in (None, "-") else right)

    for key in sorted(differing, key=lambda key: (key not in deciding, keys.index(key))):
        left, right = (text_of(side.get(key, ABSENT)) for side in sides)
        decides = key in deciding
        add(
            key if decides else f"{key} (no effect on results)",
            left,
            right,
            None if decides else "dim",
        )

    if not differing:
        add("config", "the same", "the same")
    table.add_section()

    for name in ("config", "code"):
        compare(
            f"{name} hash",
            *(
                (run.result.get("hashes") or {}).get(name, _folder_hash(run, name))
                for run in (a, b)
            ),
        )

    compare(
        "partition sha256",
        *(
            (run.result.get("partition") or {}).get("sha256")
            or read_mapping(run.path / "data.json").get("partition", "-")
            for run in (a, b)
        ),
    )
    compare(
        "numerics",
        *(_mapping_text(read_mapping(run.path / "numerics.json")) or "-" for run in (a, b)),
    )
    own = [own_code(run.path) for run in (a, b)]

    for number, label in enumerate(("own code: {}", "commit of {}")):
        for name in sorted({*own[0][number], *own[1][number]}):
            absent = "-" if number == 0 else "in no git repository"
            compare(
                label.format(name), *(str(side[number].get(name) or absent)[:20] for side in own)
            )

    add("status", a.status, b.status)
    add("rounds", _rounds_text(a), _rounds_text(b))
    add("headline", headline_text(a.headline), headline_text(b.headline))
    out = console()
    out.print(table)

    if a.headline and b.headline and a.headline["metric"] == b.headline["metric"]:
        out.print(
            f"{a.headline['metric']}: "
            f"{b.headline['value'] - a.headline['value']:+.4f} from first to second"
        )

    for line in differences(a.path, b.path):
        out.print(line, markup=False, soft_wrap=True)
    return 0


def _folder_hash(run: StoredRun, name: str) -> str:
    """Return the short hash of the config or of the code from the path of a run.

    Args:
        run: Stored run.
        name: ``config`` or ``code``.
    """
    return (
        run.path.parent.name.rpartition("-")[2]
        if name == "config"
        else run.path.name.partition(".")[0]
    )


def _rerun(options: argparse.Namespace) -> int:
    from fedexp.commands.rerun import rerun

    return rerun(find_run(options.root, options.name), options.root, options.data_root)


def _export(options: argparse.Namespace) -> int:
    from fedexp.commands.export import as_csv, rounds_as_csv, to_wandb

    there = find_runs(options.root)
    _warn_of_unusable_configs(there)
    runs = select(there, options.conditions)
    if options.wandb and options.rounds:
        raise ConfigError(
            "--rounds is for CSV files: W&B receives the rounds of every run",
            got="--wandb --rounds",
            do="leave out --rounds",
        )
    if options.wandb:
        return to_wandb(runs, options.wandb, options.project, options.entity, options.group)
    text = rounds_as_csv(runs) if options.rounds else as_csv(runs)
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
        print(f"{len(runs)} runs: {options.out}")
    return 0


def _table(options: argparse.Namespace) -> int:
    from fedexp.commands.runs_table import table

    runs = find_runs(options.root)
    _warn_of_unusable_configs(runs)
    return table(runs, options.conditions, options.aggregate, options.out)


def _plot(options: argparse.Namespace) -> int:
    from fedexp.commands.runs_plot import plot

    runs = find_runs(options.root)
    _warn_of_unusable_configs(runs)
    allowed = [key for key in options.allow.split(",") if key]
    return plot(runs, options.conditions, allowed, options.root, options.out)


def _warn_of_unusable_configs(runs: Iterable[StoredRun]) -> None:
    """Print the names of runs whose config cannot be used."""
    # The warning is printed to standard error, because a program may parse the standard
    # output.
    for text in warnings_of_configs(runs):
        print(visible(f"warning: {text}"), file=sys.stderr)


def _clean(options: argparse.Namespace) -> int:
    if not any(getattr(options, flag[2:].replace("-", "_")) for flag in _CLEAN_FLAGS):
        raise ConfigError(
            "nothing was chosen to be deleted", expected=f"one or more of {', '.join(_CLEAN_FLAGS)}"
        )
    freed = 0

    for run in find_runs(options.root):
        target, reason = _find_deletable(run, options)
        if target is None:
            continue
        try:
            size = weigh(target)
        except FileNotFoundError:
            continue  # another command has deleted it
        if target.is_symlink():
            print(visible(f"{'kept':<12} {size_text(size):>8}  {target}  (a symbolic link)"))
            continue

        try:
            with run.lock():
                # The state differs if the run was launched again in the meantime.
                if StoredRun(run.path).state != run.state:
                    raise StorageError("this run has just been executed", where=str(run.path))
                if options.yes:
                    _delete(target)
        except FileNotFoundError:
            continue  # another command has deleted it
        except StorageError:
            print(visible(f"{'kept':<12} {size_text(size):>8}  {target}  (being executed)"))
            continue

        freed += size
        print(visible(f"{_action_text(options)} {size_text(size):>8}  {target}  ({reason})"))
        if options.yes:
            # The parent folder may contain other runs of the same config.
            with contextlib.suppress(OSError):
                run.path.parent.rmdir()

    for left in _stale_paths(options.root):
        size = weigh(left)
        freed += size
        print(
            visible(
                f"{_action_text(options)} {size_text(size):>8}  {left}  "
                "(left by a process that was killed)"
            )
        )
        if options.yes:
            delete_path(left)

    if options.memo:
        count, size = _clean_client_cache(options.root / "memo", options.yes)
        freed += size
        print(
            f"{_action_text(options)} {size_text(size):>8}  {options.root / 'memo'}  "
            f"({count} stored client results)"
        )

    print(
        f"{size_text(freed)} freed"
        if options.yes
        else f"{size_text(freed)} would be freed: add --yes to delete"
    )

    return 0


def _check_conf(options: argparse.Namespace) -> int:
    from fedexp.commands.check_conf import check_conf

    return check_conf(options.paths or [Path("conf")])


def _action_text(options: argparse.Namespace) -> str:
    return "deleted     " if options.yes else "would delete"


def _find_deletable(run: StoredRun, options: argparse.Namespace) -> tuple[Path | None, str]:
    """Return the folder of `run` that the flags select for deletion, and the reason.

    The result is (None, "") if no flag selects a folder.
    """
    if options.set_aside and run.is_aside:
        return run.path, "set aside"
    if run.status in ("failed", "damaged", "stale") and getattr(options, run.status):
        return run.path, run.status
    if options.old_code and run.is_of_other_code():
        return run.path, "made by other code"
    checkpoint = run.path / "checkpoint"
    if options.checkpoints and run.status == "done" and checkpoint.is_dir():
        return checkpoint, "checkpoint of a run that is done"
    return None, ""


def _stale_paths(root: Path) -> Iterator[Path]:
    idle = (run.path for run in find_runs(root) if not run.is_locked())
    tables = (path for path in (root / "tables").rglob("*") if path.is_dir())
    for folder in itertools.chain(
        root.glob("runs/*"), idle, root.glob("memo/??"), [root / "sources"], tables
    ):
        yield from stale_files(folder)


def _delete(folder: Path) -> None:
    """Rename a folder and then delete it.

    Without the new name, an incompletely deleted folder could be mistaken for a run.
    """
    renamed = temporary_path(folder, "deleted")
    # A process with the same ID may have left a folder of this name.
    delete_path(renamed)
    folder.rename(renamed)
    shutil.rmtree(renamed)


def _clean_client_cache(folder: Path, delete: bool) -> tuple[int, int]:
    """Return the number of entries of the client cache (memo), and their size in bytes.

    If `delete` is true, the entries are also deleted. This is safe while runs use the
    cache. Folders and locks are not deleted.
    """
    count = size = 0
    for entry in folder.glob("*/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            size += entry.stat().st_size
            count += 1
            if delete:
                entry.unlink()
    return count, size


_COLUMN_KEYS = ("method=", "dataset=", "output_root=")


def _rounds_text(run: StoredRun) -> str:
    done, asked = run.rounds
    if done is None:
        return "-"
    # The status has no number of all rounds before the first checkpoint.
    asked = asked or run.config.get("rounds")
    return str(done) if asked in (None, done) else f"{done}/{asked}"


def _mapping_text(values: Any) -> str:
    """Return a mapping on one line, with short numbers."""
    if not isinstance(values, Mapping):
        return ""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return _mapping_text(value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key} {text(value)}" for key, value in values.items() if value is not None)


def _last_ten(result: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the rows about the last ten rounds. Shorter runs have no such rows."""
    if result.get("rounds", 0) < 10:
        return {}
    return {
        "mean of last 10": _mapping_text(result.get("mean_last_10")),
        "deviation of last 10": _mapping_text(result.get("std_last_10")),
    }


def _age_text(moment: datetime.datetime) -> str:
    seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - moment).total_seconds())
    for limit, length, unit in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
