"""The committed claim states and reports follow from the committed records."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from fedexp.tables.report.markdown import markdown
from fedexp.tables.report.report import Report

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("m", SCRIPTS / "make_claim_states.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed(script: ModuleType) -> Sequence[tuple[Path, Report]]:
    found = list(script.reports_by_folder())
    assert found
    return found


def test_the_list_of_claims_is_that_of_the_records(
    script: ModuleType, committed: Sequence[tuple[Path, Report]]
) -> None:
    listed = (SCRIPTS / "results" / "claim_states.csv").read_text()
    made = [
        dict(zip(script.HEAD, row, strict=True))
        for row in script.rows([report for _, report in committed], {})
    ]

    def states(rows: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
        names = ("table", "variant", "claim", "state", "reason")
        return [tuple(row[name] for name in names) for row in rows]

    assert states(list(csv.DictReader(listed.splitlines()))) == states(made), (
        "run scripts/make_claim_states.py"
    )


def test_committed_reports_have_the_text_that_follows_from_the_records(
    committed: Sequence[tuple[Path, Report]],
) -> None:
    def text(document: str) -> list[str]:
        return [line for line in document.splitlines() if line and not line.startswith("![")]

    for folder, report in committed:
        assert text((folder / "report.md").read_text()) == text(markdown(report)), (
            f"run fedexp-table report {report.name} --from {folder} --out DIR, and copy report.md"
        )
