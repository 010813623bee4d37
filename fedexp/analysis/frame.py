"""Stored runs as a data frame of pandas (extra: ``pip install 'fedexp[analysis]'``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedexp.analysis.rounds import round_table
from fedexp.core.errors import ConfigError, StorageError
from fedexp.storage.selection import FACTS, dotted_items, in_result, text_of
from fedexp.storage.stored_run import StoredRun


class Runs(pd.DataFrame):  # type: ignore[misc]
    """A data frame with one row per stored run.

    `fedexp.runs` returns it. It is a `pandas.DataFrame` with the method `curves`. A
    selection of its rows is a `Runs`, too.

    Config groups, config keys, metrics, ``headline`` and ``status`` have the names that
    conditions on runs use. These are the columns:

    - ``run``, ``method``, ``dataset`` and the other config groups, ``seed``,
      ``seed_data`` and ``status``.
    - ``headline``, ``metric`` and ``rule``: The main result, its metric and its rule.
    - ``round`` and ``rounds``: The number of finished and of requested rounds.
    - ``seconds``, ``total/local_steps``, ``total/bytes_up``, ``total/bytes_down``: The
      costs of the whole run. The seconds include evaluation and logging.
    - ``config_hash``, ``code_hash``, ``commit``, ``updated`` and ``folder``.
    - The metrics, such as ``test/global/acc``, with their last values, and
      ``mean_last_10/...`` with their means over the last ten rounds.
    - Every key of the config, such as ``partition.alpha``. A list is a text.
    """

    @property
    def _constructor(self) -> type[Runs]:
        return Runs

    def curves(self) -> pd.DataFrame:
        """Return a data frame with one row per run and round.

        Its columns are the run, its method, data and seed, the config keys in which the
        runs differ, ``round`` and ``step``, the totals (see
        `fedexp.analysis.rounds.round_rows`), and the metrics.

        Raises:
            ConfigError: The column ``folder`` is absent.
            StorageError: A file of a run was changed, or the folder of a run is gone.
        """
        if "folder" not in self.columns:
            raise ConfigError(
                "the data frame has no column 'folder', from which the rounds are read",
                do="call curves() before you select columns",
            )
        folders = dict.fromkeys(self["folder"])
        if gone := [folder for folder in folders if not Path(folder).is_dir()]:
            raise StorageError(
                "the folder of a run is gone", where=str(gone[0]), do="call fedexp.runs again"
            )
        columns, rows = round_table([StoredRun(Path(folder)) for folder in folders])
        return pd.DataFrame(
            [{name: _cell(value) for name, value in row.items()} for row in rows], columns=columns
        )


def runs_frame(runs: Sequence[StoredRun]) -> Runs:
    """Return a data frame with one row per run of `runs`."""
    # A name may occur in several of these mappings. The first one gives the value.
    parts = [
        (
            {name: fact(run) for name, fact in _COLUMNS.items()},
            dict(dotted_items(run.resolved_config.values)),
            run.result.get("metrics") or {},
            _with_prefix("mean_last_10/", run.result.get("mean_last_10")),
        )
        for run in runs
    ]
    columns = dict.fromkeys(_COLUMNS)
    for at in (2, 3, 1):
        columns |= dict.fromkeys(name for groups in parts for name in groups[at])

    rows = [
        {name: _cell(value) for part in reversed(groups) for name, value in part.items()}
        for groups in parts
    ]
    frame = Runs(rows, columns=[*columns])
    frame["updated"] = pd.to_datetime(frame["updated"], utc=True)
    return frame


def _with_prefix(prefix: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in (values or {}).items()}


def _cell(value: Any) -> Any:
    """Return a value as a cell. A list becomes a text, so that rows can be grouped."""
    return text_of(value) if isinstance(value, list) else value


# Columns that are not metrics or config keys, and the functions that compute them.
_COLUMNS: Mapping[str, Callable[[StoredRun], Any]] = {
    "run": FACTS["name"],
    "method": FACTS["method"],
    "dataset": FACTS["dataset"],
    **{
        group: lambda run, group=group: run.choices.get(group)  # type: ignore[misc]
        for group in ("partition", "model", "trainer", "aggregator", "server_optimizer")
    },
    "seed": lambda run: run.config.get("seed"),
    "seed_data": lambda run: run.config.get("seed_data"),
    "status": FACTS["status"],
    "headline": FACTS["headline"],
    "metric": lambda run: (run.headline or {}).get("metric"),
    "rule": lambda run: (run.headline or {}).get("rule"),
    "round": lambda run: run.rounds[0],
    "rounds": lambda run: run.rounds[1],
    "seconds": FACTS["seconds"],
    "total/local_steps": FACTS["total/local_steps"],
    "total/bytes_up": FACTS["total/bytes_up"],
    "total/bytes_down": FACTS["total/bytes_down"],
    "config_hash": in_result("hashes", "config"),
    "code_hash": in_result("hashes", "code"),
    "commit": in_result("environment", "commit"),
    "updated": lambda run: run.updated,
    "folder": lambda run: str(run.path),
}
