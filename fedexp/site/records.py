"""Build reports from the committed records of the tables' runs.

A record contains the results of all runs of a table. Verdicts are computed again and
pictures are drawn again. No experiment is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from fedexp.core.errors import ConfigError
from fedexp.tables import record
from fedexp.tables.build_report import build_report, report_of_record
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table, table_names
from fedexp.tables.record import TableRecord, run_key
from fedexp.tables.report.page import Links, page
from fedexp.tables.report.report import Report
from fedexp.tables.schema import Table

# Files of a record that the site offers to readers who want to check the numbers.
FILES = (record.RUNS, record.CURVES, record.CONFIGS)
# All variants, the fullest first. A table is represented by its fullest variant.
_VARIANTS = ("full", "partial", "reduced", "smoke")


@dataclass(frozen=True)
class Result:
    """The results of a table in one variant, such as ``full`` or ``reduced``.

    Args:
        report: The report, which compares our results with the paper's.
        done: Number of runs that have a value.
        planned: Number of all runs of the variant.
        methods: For each column that was run, its option of ``method``.
        datasets: Options of ``dataset`` that were run.
        costs: (hardware, seconds) of each run, by the folder of the run.
        page: The interactive page as HTML, empty if nothing was run.
        files: Contents of the record's files by name, empty if nothing was run.
    """

    report: Report
    done: int
    planned: int
    methods: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    costs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    page: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def variant(self) -> Literal["full", "partial", "reduced", "smoke", "not run"]:
        return self.report.variant if self.done else "not run"


def read(folder: Path) -> dict[str, list[Result]]:
    """Read the results of all tables of papers, by the table's name.

    The fullest variant of a table comes first. A table that was not run has one
    `Result` without runs, which shows only the paper's numbers and claims.

    Args:
        folder: Folder of the records, ``<folder>/<paper>/<table>[-<variant>]``.

    Raises:
        ConfigError: There is no record, the table of a record does not exist, or two
            records belong to the same table and variant.
    """
    found = [path.parent for path in sorted(folder.glob(f"*/*/{record.ABOUT}"))]
    if not found:
        raise ConfigError(
            "there are no results to publish",
            where=str(folder),
            expected=f"<paper>/<table>/{record.ABOUT}, as fedexp-table writes them with --out",
            do=(
                "name their folder (--results DIR). Those of fedexp are in its checkout, in "
                "scripts/results"
            ),
        )

    results: dict[str, list[Result]] = {}
    places: dict[tuple[str, str], Path] = {}
    # Drawing takes most of the time, so several processes draw. They are not forked
    # from this process, because a fork would copy the locks that this process's threads
    # hold.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        for path, result in zip(found, pool.map(of_record, found), strict=True):
            other = places.setdefault((result.report.name, result.report.variant), path)
            if other != path:
                raise ConfigError(
                    "two records are of one table in one variant, which has one page",
                    where=str(path),
                    got=f"{result.report.name}, {result.report.variant}, as in {other}",
                    do="make one of both: fedexp-table report ... --from DIR --from DIR --out DIR",
                )
            results.setdefault(result.report.name, []).append(result)

    for own in results.values():
        own.sort(key=lambda result: _VARIANTS.index(result.report.variant))
    tables = {name: load_table(name) for name in table_names()}
    return {
        name: results.get(name) or [absent(table)]
        for name, table in tables.items()
        if table.paper != "none"
    }


def of_record(folder: Path) -> Result:
    """Return the result of the record in a folder."""
    table = load_table(record.name_of_table(folder))
    found = record.read(table, folder)
    found, report = report_of_record(table, found, folder)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    methods = {run.method: run.choice for run in found.runs.values() if run.choice}
    datasets = sorted({run.dataset for run in found.runs.values() if run.dataset})
    costs = {
        run.run: (run.gpu or run.processor, run.seconds) for run in found.runs.values() if run.done
    }
    html = page(report, Links(files=tuple(files), configs=found.configs))
    return Result(report, *_coverage(table, found), methods, datasets, costs, html, files)


def absent(table: Table) -> Result:
    """Return a result without runs, with the numbers and claims of the paper."""
    nothing = TableRecord("full", {}, None, [], f"fedexp-table run {table.name}", {})
    report = build_report(table, planned_cells(table), nothing)
    return Result(report, *_coverage(table, nothing))


def _coverage(table: Table, found: TableRecord) -> tuple[int, int]:
    """Return the number of runs that have a value, and the number of planned runs.

    The planned runs are those of the record's variant. A run that several cells share
    counts once.
    """
    runs = [
        (job.overrides, found.runs.get(run_key(table, planned, job)))
        for planned in planned_cells(table, found.variant)
        for job in planned.jobs
    ]
    done = {overrides for overrides, run in runs if run is not None and run.value is not None}
    return len(done), len({overrides for overrides, _ in runs})
