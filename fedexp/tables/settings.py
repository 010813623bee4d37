"""Comparison of recorded runs with the settings that their table has now.

A table's file may change after its runs were recorded. Without the comparison, a report
would show these runs under settings that they do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedexp.config.hydra_composition import parse_override
from fedexp.tables.cells import PlannedCell, key_of
from fedexp.tables.record import TableRecord, run_key
from fedexp.tables.report import texts
from fedexp.tables.report.configs import flat
from fedexp.tables.schema import Table


def warning_of_settings(
    table: Table, cells: Sequence[PlannedCell], record: TableRecord
) -> Iterable[str]:
    """Yield a warning if recorded runs had other settings than the table has now."""
    labels_of: dict[str, list[str]] = {}  # labels of the columns by difference
    runs = set()
    configs = {name: flat(config) for name, config in record.configs.items()}
    for planned in cells:
        for job in planned.jobs:
            run = record.runs.get(run_key(table, planned, job))
            if run is None or not run.done:
                continue
            for key, (had, has) in differing(job.overrides, configs.get(run.config, {})).items():
                runs.add(run.run)
                labels = labels_of.setdefault(f"{key} is {had} and not {has}", [])
                labels.append(table.columns[planned.method].label)
    if runs:
        shown = [f"{text} ({', '.join(dict.fromkeys(own))})" for text, own in labels_of.items()]
        yield (
            f"{texts.count(len(runs), 'run')} had other settings than the table has now: "
            f"{texts.shortened(shown, 6, '; ')}"
        )


def differing(overrides: Iterable[str], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose value in a recorded run is not that of the overrides.

    Overrides of groups, mappings and interpolations are not compared. Keys that the
    record lacks are not compared, because an earlier version may not have had them.

    Args:
        overrides: Overrides of the run by the present file of the table. The last
            override of a key counts.
        config: Recorded config by dotted keys.

    Returns:
        The recorded value and the value of the override, by key.
    """
    last = {key_of(override): override for override in overrides}
    found = {}
    for key, override in last.items():
        if key not in config or override.startswith("~"):
            continue
        (parsed,) = parse_override(override)
        wanted = parsed.value()
        if "${" not in str(wanted) and wanted != config[key]:
            found[key] = config[key], wanted
    return found
