"""The rows of stored runs: one row per round, with totals of the costs until the round.

A method whose server works in several steps has one row per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedexp.analysis.groups import differing_keys
from fedexp.storage.run_folder import object_rows, rows_of
from fedexp.storage.selection import ABSENT, value_of
from fedexp.storage.stored_run import StoredRun

# Parts of a run that do not belong to the method. Their seconds are not counted.
_UNCOUNTED = ("evaluate", "log", "checkpoint")
# Columns that identify a run. The config keys in which the runs differ come after them.
_IDENTITY = ("method", "dataset", "partition", "model", "seed")


def round_rows(run: StoredRun) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl`` with totals.

    The totals are the values of a run from its start to the end of the row's round:

    - ``total/bytes_up`` and ``total/bytes_down``: Bytes that clients send and receive.
    - ``total/bytes``: The sum of both.
    - ``total/local_steps``: Steps of local training.
    - ``total/seconds``: Seconds of training and aggregation. Evaluation, logging and
      checkpoints are left out. The value is None if a time is not stored.

    Raises:
        StorageError: A file of the run was changed.
    """
    seconds: float | None = 0.0
    by_step = _seconds_by_step(run)
    totals = dict.fromkeys(("total/bytes_up", "total/bytes_down", "total/local_steps"), 0)
    rows = []
    for row in rows_of(run.path, run.result):
        totals["total/bytes_up"] += row.get("bytes/up", 0)
        totals["total/bytes_down"] += row.get("bytes/down", 0)
        totals["total/local_steps"] += row.get("local_steps", 0)
        own = by_step.get(row.get("step"))
        seconds = None if seconds is None or own is None else seconds + own
        both = totals["total/bytes_up"] + totals["total/bytes_down"]
        rows.append({**row, **totals, "total/bytes": both, "total/seconds": seconds})
    return rows


def _seconds_by_step(run: StoredRun) -> dict[Any, float]:
    """Return the seconds of each step. If a step was repeated, the last time counts."""
    return {
        row.get("step"): sum(
            value for phase, value in (row.get("seconds") or {}).items() if phase not in _UNCOUNTED
        )
        for row in object_rows(run.path / "timing.jsonl")
    }


def round_table(runs: Sequence[StoredRun]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the rows of several runs, with columns that identify each run.

    The first columns are the run's name, its method, its data and its seed. The config
    keys in which the runs differ follow. Then come the round, the totals and the
    metrics.

    Returns:
        The names of the columns, and the rows. A row lacks the columns for which it has
        no value.
    """
    differing = [key for key in differing_keys(runs) if not key.endswith("_target_")]
    identity = list(dict.fromkeys([*_IDENTITY, *differing]))
    rows = []
    for run in runs:
        values = {key: value_of(run, key) for key in identity}
        known = {key: value for key, value in values.items() if value is not ABSENT}
        # A config key and a metric may have the same name, such as `clients`.
        rows += [{"run": run.name, **row, **known} for row in round_rows(run)]

    found = dict.fromkeys(name for row in rows for name in row)
    first = ["run", *identity, "round", "step"]
    totals = [name for name in found if name.startswith("total/")]
    return [*dict.fromkeys([*first, *totals, *found])], rows
