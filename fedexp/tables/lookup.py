"""Functions that find the stored runs of a table's cells, and read their numbers.

A run's folder is found by the hash of its config.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.identity import config_hash
from fedexp.storage.run_folder import RunFolder, read_result_and_status, trace_rows
from fedexp.tables.cells import Job, PlannedCell

# Statuses of runs that have ended without a usable result.
FAILED = ("failed", "damaged")
_CODE = re.compile(r"[0-9a-f]{8}")
_NAMED = re.compile(r"(\w+)=([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\.(.+)")


@dataclass(frozen=True)
class CellRun:
    """The run of a job, as found in its folder.

    Args:
        job: The job.
        folder: Folder of the run.
        config: Resolved config. It is empty if it cannot be composed, and `error` has
            the reason.
        result: Content of ``result.json``, empty unless the run is done.
        other_code: Whether the result was made by code that differs from the current
            code.
        others: Folders of results that were made by other code, newest first.
        status: Status of the run, such as done, failed, damaged, missing or running.
        error: Error of a run that failed, in one line.
        altered: Whether the user's overrides change the run. Then it does not count as
            a run of the table.
        date: Date of the result as YYYY-MM-DD. Empty if there is no result, or if the
            date is not known.
    """

    job: Job
    folder: Path
    config: ResolvedConfig = field(default_factory=ResolvedConfig)
    result: dict[str, Any] = field(default_factory=dict)
    other_code: bool = False
    others: tuple[Path, ...] = ()
    status: str = "missing"
    error: str = ""
    altered: bool = False
    date: str = ""


def find_run(job: Job, *, any_code: bool = False) -> CellRun:
    """Find the stored run of a job and read its result and status.

    Args:
        job: The job.
        any_code: Whether a result that was made by other code is taken if the current
            code has not made one. If there are several, the newest one is taken.
    """
    try:
        config = compose(list(job.overrides))
    except ConfigError as error:
        return CellRun(job, Path(), error=f"its config cannot be composed: {error.what}")
    run = RunFolder.of(config)
    folder = run.path
    others = _other_results(folder)
    other = False
    result, state = read_result_and_status(run)
    if any_code and others and not result and state.get("status") != "damaged":
        folder, other = others[0], True
        result, newest = read_result_and_status(RunFolder(folder))
        state = newest if result or newest.get("status") == "damaged" else state
    return CellRun(
        job,
        folder,
        config,
        result,
        other,
        others,
        status="done" if result else str(state.get("status", "missing")),
        error="" if result else str(state.get("error") or ""),
        altered=_is_altered(job, config),
        date=str(state.get("updated") or "")[:10] if result else "",
    )


def _is_altered(job: Job, config: ResolvedConfig) -> bool:
    if job.declared == job.overrides:
        return False
    try:
        return config_hash(compose(list(job.declared))) != config_hash(config)
    except FedexpError:
        return True


def _other_results(folder: Path) -> tuple[Path, ...]:
    """Return the folders of results that were made by other code, newest first."""
    files = [
        path
        for path in folder.parent.glob("*/result.json")
        if path.parent != folder and _CODE.fullmatch(path.parent.name)
    ]
    files.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return tuple(path.parent for path in files)


def find(cells: Sequence[PlannedCell], *, any_code: bool = False) -> dict[tuple[str, ...], CellRun]:
    """Return the run of each job, keyed by the job's overrides.

    Overrides of the user may turn several jobs into one run. If they change at least
    one of these jobs, the run is marked as altered (`CellRun`).

    Args:
        cells: Cells with their jobs.
        any_code: Whether a result that was made by other code is taken if the current
            code has not made one. If there are several, the newest one is taken.
    """
    cell_runs: dict[tuple[str, ...], CellRun] = {}
    # Several cells may need the same job. Its run is looked up once.
    each = {(job.declared, job.overrides): job for cell in cells for job in cell.jobs}
    for job in each.values():
        run = find_run(job, any_code=any_code)
        if run.altered or job.overrides not in cell_runs:
            cell_runs[job.overrides] = run
    return cell_runs


def read_value(run: CellRun, path: str) -> float:
    """Read the number at a path in a run's results.

    A path ``trace.<round>.<iteration>.<series>/<metric>`` is read in a traced round,
    whose iterations are stored in ``trace/<round>.json``. Instead of ``<iteration>``,
    the path may have ``<name>=<number>``, such as ``lam=0.5``. This selects the
    iteration in which the named value is this number. Every other path is read in
    ``result.json``.

    Raises:
        ConfigError: There is no such number.
    """
    head, _, rest = path.partition(".")
    if head != "trace":
        return read_path(run.result, path)
    round, _, rest = rest.partition(".")
    rows, file = traced(run.folder, round), f"trace/{round}.json"

    if named := _NAMED.fullmatch(rest):
        name, number, rest = named.groups()
        found = [row for row in rows if row.get(name) == float(number)]
        if not found:
            has = ", ".join(f"{row[name]:g}" for row in rows if name in row)
            raise ConfigError(
                f"{file} has no iteration with {name}={number}", expected=has or f"rows with {name}"
            )
        return read_path(found[0], rest, file)

    return read_path({str(row["iteration"]): row for row in rows}, rest, file)


def traced(folder: Path, round: object) -> list[dict[str, Any]]:
    """Read the iterations of a traced round, one mapping per stored iteration.

    Raises:
        ConfigError: The round was not traced, or it was traced by older code.
    """
    rows = trace_rows(folder / "trace" / f"{round}.json")
    if not rows or any("iteration" not in row for row in rows):
        raise ConfigError(
            f"round {round} was not traced",
            where=str(folder),
            do="set trace.every=1 and run it again",
        )
    return rows


def read_path(result: Mapping[str, Any], path: str, file: str = "result.json") -> float:
    """Read the number at a dotted path.

    A key may contain a dot: ``rounds_to.0.38`` has the key ``0.38``. The longest key
    that fits is used.

    Args:
        result: Content of a file.
        path: The path.
        file: Name of the file for error messages.

    Raises:
        ConfigError: There is no number at the path.
    """
    node: Any = result
    rest = path

    while rest:
        heads = itertools.accumulate(rest.split("."), lambda head, part: f"{head}.{part}")
        known = [head for head in heads if isinstance(node, Mapping) and head in node]
        part = known[-1] if known else rest.partition(".")[0]
        rest = rest[len(part) + 1 :]
        if known:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            has = (
                ", ".join(map(str, node))
                if isinstance(node, Mapping)
                else f"{len(node)} items"
                if isinstance(node, list)
                else ""
            )
            raise ConfigError(
                f"{file} has no '{path}'", where=f"part '{part}'", expected=has or None
            )

    if isinstance(node, bool) or not isinstance(node, int | float):
        raise ConfigError(f"'{path}' of {file} is not a number", got=repr(node))
    return float(node)
