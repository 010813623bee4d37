"""Reports tell if recorded runs have other settings than their table has now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedexp.tables import record as records
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table
from fedexp.tables.settings import differing, warning_of_settings
from tests.tables.test_build_report import asked

RESULTS = Path(__file__).resolve().parents[2] / "scripts" / "results"


@pytest.mark.parametrize(
    ("overrides", "config", "found"),
    [
        (["local.lr=0.1"], {"local.lr": 0.1}, {}),
        (["local.lr=0.1"], {"local.lr": 0.2}, {"local.lr": (0.2, 0.1)}),
        (["local.lr=0.1", "local.lr=0.2"], {"local.lr": 0.2}, {}),
        (["+model.width=4"], {"model.width": 8}, {"model.width": (8, 4)}),
        (["a.lam=[0,1e-8]"], {"a.lam": [0, 1e-08]}, {}),
        (["a.text='b c'", "a.null=null"], {"a.text": "b c", "a.null": None}, {}),
        (["method=fedavg", "a.new=1", "~a.gone", "a.from=${b}"], {"a.from": 3}, {}),
        (["~a.gone"], {"a.gone": 3}, {}),
    ],
)
def test_differing_compares_the_last_override_of_a_recorded_key(
    overrides: list[str], config: dict[str, Any], found: dict[str, Any]
) -> None:
    assert differing(overrides, config) == found


def test_report_names_runs_with_other_settings(tmp_path: Path) -> None:
    one = asked(tmp_path)
    assert not [text for text in one.report.warnings if "other settings" in text]
    runs = {
        key: replace(run, config="new" if run.method == "local" else "old")
        for key, run in one.record.runs.items()
    }
    configs = {"new": {}, "old": {"partition": {"alpha": 1.0}}}
    one = replace(one, record=replace(one.record, runs=runs, configs=configs))
    (warning,) = [text for text in one.report.warnings if "other settings" in text]
    assert warning == (
        "2 runs had other settings than the table has now: partition.alpha is 1.0 and not 2 (Ens.)"
    )


def test_committed_runs_have_the_settings_of_their_tables_or_are_superseded() -> None:
    for about in sorted(RESULTS.rglob("record.json")):
        table = load_table(json.loads(about.read_text())["table"])
        record = records.read(table, about.parent)
        cells = planned_cells(
            table, record.variant, only=record.only, seeds=record.seeds, extra=record.extra
        )
        smaller = table.smaller(record.variant)
        if smaller is None or smaller.superseded is None:
            assert not list(warning_of_settings(table, cells, record)), about
