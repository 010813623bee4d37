"""The command ``fedexp-runs export``: write stored runs as CSV, or send them to W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fedexp.analysis.rounds import round_table
from fedexp.commands.errors import JOB_ERROR
from fedexp.core.errors import ConfigError
from fedexp.storage.run_folder import rows_of
from fedexp.storage.selection import dotted_items
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.report.csv import csv_text, inert
from fedexp.tracking.outlet import visible

if TYPE_CHECKING:
    from fedexp.tracking.logger import Logger


def as_csv(runs: Sequence[StoredRun]) -> str:
    """Return the runs as CSV, one row per run.

    The first columns identify a run (its name, choices, seeds and hashes) and contain
    its status, result and costs. The columns ``metrics.*`` (last values) and
    ``mean_last_10.*`` follow. The last columns, ``config.*``, contain every key of the
    config. Lists are JSON. A cell is empty if the run has no value for the column.
    """
    rows = [_run_row(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns.sort(key=_column_group)

    head = map(inert, columns or ["run"])
    return csv_text(head, ([_cell_value(row.get(name)) for name in columns] for row in rows))


def rounds_as_csv(runs: Sequence[StoredRun]) -> str:
    """Return the rounds of the runs as CSV, one row per run and round.

    `fedexp.analysis.rounds.round_table` explains the columns. Lists are JSON. A cell is
    empty if the round has no value for the column.

    Raises:
        StorageError: A file of a run was changed.
    """
    columns, rows = round_table(runs)
    head = (inert(visible(name)) for name in columns)
    return csv_text(head, ([_cell_value(row.get(name)) for name in columns] for row in rows))


def _column_group(column: str) -> int:
    """Return the number of the column's group. The first columns have group 0."""
    groups = enumerate(("metrics.", "mean_last_10.", "config."), start=1)
    return next((number for number, prefix in groups if column.startswith(prefix)), 0)


def _run_row(run: StoredRun) -> dict[str, Any]:
    result, headline = run.result, run.headline or {}
    done, asked = run.rounds
    facts = {
        "run": run.name,
        "method": run.choice("method"),
        "dataset": run.choice("dataset"),
        **{
            group: run.choices.get(group)
            for group in ("partition", "model", "trainer", "aggregator", "server_optimizer")
        },
        "seed": run.config.get("seed"),
        "seed_data": run.config.get("seed_data"),
        "status": run.status,
        "set_aside": run.is_aside,
        "metric": headline.get("metric"),
        "rule": headline.get("rule"),
        "value": headline.get("value"),
        "round": done,
        "rounds": asked,
        "seconds": (result.get("seconds") or {}).get("total"),
        "local_steps": result.get("local_steps"),
        **{f"bytes_{way}": (result.get("bytes") or {}).get(way) for way in ("up", "down")},
        "peak_ram": (result.get("peak_memory") or {}).get("ram"),
        "partition_sha256": (result.get("partition") or {}).get("sha256"),
        **{f"{part}_hash": (result.get("hashes") or {}).get(part) for part in ("config", "code")},
        "commit": (result.get("environment") or {}).get("commit"),
        "updated": run.updated.isoformat(timespec="seconds"),
        "folder": str(run.path),
    }

    for group in ("metrics", "mean_last_10"):
        facts |= {
            visible(f"{group}.{name}"): value for name, value in (result.get(group) or {}).items()
        }
    return facts | {
        visible(f"config.{key}"): value for key, value in dotted_items(run.resolved_config.values)
    }


def _cell_value(value: Any) -> Any:
    """Return a list as JSON, and a text without control characters."""
    text = json.dumps(value) if isinstance(value, list) else value
    return visible(text) if isinstance(text, str) else text


def to_wandb(
    runs: Sequence[StoredRun],
    mode: Literal["offline", "online"],
    project: str,
    entity: str | None,
    group: str | None,
) -> int:
    """Send every finished run to W&B.

    fedexp determines the ID of a run in W&B. A run that is sent twice with `mode`
    "online" is therefore not duplicated. W&B's files are in ``<run>/wandb``.

    Args:
        runs: Stored runs.
        mode: ``online`` uploads the runs. ``offline`` only writes W&B's files.
        project: Project of W&B.
        entity: Entity of W&B, or None for the entity of the account.
        group: Group under which W&B shows the runs, or None for no group.

    Returns:
        The exit code: 1 if a run could not be sent, and 0 otherwise.

    Raises:
        ConfigError: No run is finished.
    """
    from fedexp.core.build import build
    from fedexp.tracking.logger import Logger

    finished = [run for run in runs if run.status == "done" and run.config and not run.is_aside]
    if not finished:
        raise ConfigError("there is no finished run to send", got=f"{len(runs)} runs")
    node = {
        "_target_": "fedexp.tracking.wandb.Wandb",
        "project": project,
        "entity": entity,
        "mode": mode,
    }

    build(Logger, node, "logger").check()  # type: ignore[type-abstract]
    failed = 0
    for run in finished:
        notes, failure = send_run(
            run,
            build(Logger, node, "logger"),  # type: ignore[type-abstract]
            group,
        )
        if failure is not None:
            failed += 1
            print(visible(f"FAILED {run.name}: {failure}"))
            continue

        for note in notes:
            print(note)
        print(
            visible(
                f"sent   {run.name}: {run.rounds[0]} rounds"
                + (f", {run.path}" if mode == "offline" else "")
            )
        )

    if mode == "offline" and failed < len(finished):
        print("upload each with: wandb sync FOLDER/wandb/offline-run-*")
    print(
        f"{len(finished) - failed} of {len(runs)} runs sent"
        + (f", {failed} failed" if failed else "")
    )

    return JOB_ERROR if failed else 0


def send_run(run: StoredRun, logger: Logger, group: str | None) -> tuple[list[str], str | None]:
    """Send the rows and the result of a finished run to a tracker.

    Args:
        run: Finished run.
        logger: Logger of the tracker.
        group: Group under which the tracker shows the run, or None for no group.

    Returns:
        The notes of the logger, and the reason if it failed.
    """
    from fedexp.tracking.feed import Feed
    from fedexp.tracking.logger import RunInfo

    notes: list[str] = []
    with run.lock():
        feed = Feed(logger, notes.append)
        feed.open(
            RunInfo.of(run.resolved_config, run.result["hashes"], run.path, group, resumed=False),
            rows_of(run.path, run.result),
        )
        feed.close("done", run.result)
    return notes, None if feed.failure is None else str(feed.failure)
