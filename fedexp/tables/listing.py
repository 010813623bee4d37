"""The list of all tables, as ``fedexp-table list`` prints it.

An entry of the list has data from the table's file, and the status of the table's runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.core.errors import FedexpError
from fedexp.core.paths import user_path
from fedexp.tables.data_files import has_files
from fedexp.tables.load import load_table
from fedexp.tables.schema import Table

if TYPE_CHECKING:
    from fedexp.tables.lookup import CellRun

# Keys of an entry that are known only if the configs of all runs are composed.
_OF_RUNS = ("cells", "without_method", "runs", "done", "failed", "missing", "seconds")
_EMPTY: Mapping[str, Any] = {
    "paper": "",
    "source": "",
    "title": "",
    "flop": None,
    "cost": {},
    "forms": [],
    "data": {},
    **dict.fromkeys(_OF_RUNS),
    "state": None,
}


def list_table(name: str, root: Path) -> dict[str, Any]:
    """Return the entry of a table in the list, without reading the table's runs.

    Args:
        name: Name of the table.
        root: Folder of the data sets.

    Returns:
        The entry. Values that need the table's runs are None. If the table cannot be
        read, ``state`` is the error.
    """
    try:
        return _row_of_file(load_table(name), root)
    except FedexpError as error:
        return _broken_row(name, error)


def list_runs(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a table in the list, with the status of the table's runs.

    The config of every run is composed.

    Args:
        name: Name of the table.
        overrides: Overrides of the user for every run.
    """
    from fedexp.tables.cells import planned_cells
    from fedexp.tables.lookup import FAILED, find_run

    try:
        table = load_table(name)
        cells = planned_cells(table, extra=overrides)
    except FedexpError as error:
        return _broken_row(name, error) | {"cells": 0, "without_method": 0, "runs": 0}

    untuned = sum(bool(column.untuned) for column in table.methods)
    jobs = {job.overrides: job for planned in cells for job in planned.jobs}
    runs = list(map(find_run, jobs.values()))
    statuses = [run.status for run in runs]
    done, failed = statuses.count("done"), sum(map(statuses.count, FAILED))
    state = (
        "done"
        if done == len(runs) and not untuned
        else f"{failed} failed"
        if failed
        else "missing"
        if not done
        else "in part"
    )
    if untuned:
        state = f"{state}, {untuned} columns with untuned rows"
    if unready := min((run.error for run in runs if not run.config), default=""):
        state = f"{state}; {unready}"
    return {
        **_row_of_file(table, Path()),
        "data": _data_of_runs(runs),
        "cells": len(cells),
        "without_method": sum(not planned.jobs for planned in cells),
        "runs": len(runs),
        "done": done,
        "failed": failed,
        "missing": len(runs) - done - failed,
        "seconds": sum(float(run.result["seconds"]["total"]) for run in runs if run.result),
        "state": state,
    }


def _row_of_file(table: Table, root: Path) -> dict[str, Any]:
    return {
        "table": table.name,
        **_EMPTY,
        "paper": table.paper,
        "source": table.source,
        "title": table.title,
        "flop": table.flop,
        "cost": {variant: asdict(cost) for variant, cost in table.cost.items()},
        "forms": ["full", *(name for name in ("reduced", "smoke") if table.smaller(name))],
        "data": {name: has_files(name, root) for name in table.data},
    }


def _broken_row(name: str, error: FedexpError) -> dict[str, Any]:
    where = error.facts.get("where")
    place = f" ({where})" if where else ""
    return {"table": name, **_EMPTY, "state": f"broken: {error.what}{place}"}


def _data_of_runs(runs: Iterable[CellRun]) -> dict[str, bool]:
    """Return, for every data set of the runs, whether all of its files exist.

    The value is False for a data set that cannot be built.
    """
    from fedexp.core.build import build
    from fedexp.data.dataset import Dataset

    found: dict[str, bool] = {}
    for run in runs:
        name = str(run.config.choices.get("dataset"))
        if not run.config or name in found:
            continue
        try:
            dataset = build(Dataset, run.config["dataset"], "dataset")  # type: ignore[type-abstract]
            root = user_path(run.config["data_root"], "data_root")
        except FedexpError:
            found[name] = False
            continue
        files = dataset.expected_files(root)
        found[name] = all(Path(file).exists() for file in files)
    return found
