"""Write the state of every claim that the committed records test, as CSV.

With ``--before OLD.csv``, the file also has a column with the states in an older file.
The older file is the output of this script with older code.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fedexp.tables.build_report import build_report
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table
from fedexp.tables.record import placed, read
from fedexp.tables.report.report import Report

RECORDS = Path(__file__).parent / "results"
HEAD = ("table", "variant", "claim", "where", "says", "old_state", "state", "reason")


def reports_by_folder() -> Iterator[tuple[Path, Report]]:
    """Yield the folder and the report of every committed record, without pictures."""
    for path in sorted(RECORDS.glob("*/*/record.json")):
        paper, folder = path.parts[-3], path.parts[-2]
        table = load_table(f"{paper}/{folder.partition('-')[0]}")
        record = read(table, path.parent)
        cells = planned_cells(
            table, record.variant, only=record.only, seeds=record.seeds, extra=record.extra
        )
        report = build_report(table, cells, placed(record, table, cells))
        # `with_pictures` also adds these warnings.
        yield path.parent, replace(report, warnings=(*report.warnings, *record.missed))


def reports() -> Iterator[Report]:
    """Yield the report of every committed record, without pictures."""
    for _, report in reports_by_folder():
        yield report


def rows(
    found: Iterable[Report], old: Mapping[tuple[str, str, str], str]
) -> Iterator[tuple[str, ...]]:
    """Yield a row of the file for every claim of the reports.

    Args:
        found: The reports.
        old: States in an older file by table, variant and claim.
    """
    for report in found:
        for claim in report.claims:
            before = old.get((report.name, _form(report.variant), claim.id), "")
            states = before, claim.state
            about = report.name, report.variant, claim.id, claim.where, claim.says
            yield *about, *states, claim.reason


def main() -> None:
    """Write the CSV file to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="an older output of this script")
    options = parser.parse_args()
    old = {}
    if options.before is not None:
        with options.before.open() as file:
            old = {
                (row["table"], _form(row["variant"]), row["claim"]): row["state"]
                for row in csv.DictReader(file)
            }

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEAD)
    writer.writerows(rows(reports(), old))


def _form(variant: str) -> str:
    """Return the variant that a report belongs to: ``partial`` counts as ``full``."""
    return "full" if variant == "partial" else variant


if __name__ == "__main__":
    main()
