"""Tests of the list of tables: data sets, measured hours, and the status of runs."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.build import build
from fedexp.data.dataset import Dataset
from fedexp.storage.files import write_json
from fedexp.storage.run_folder import RunFolder
from fedexp.tables.cells import planned_cells
from fedexp.tables.data_files import FILES, data_root, has_files
from fedexp.tables.listing import list_runs, list_table
from fedexp.tables.load import load_table, table_names

RECORDS = Path(__file__).parents[2] / "scripts/results"


@cache
def dataset_of(overrides: tuple[str, ...]) -> str:
    config = compose(list(overrides))
    assert config["proxy"]["dataset"] is None  # A proxy data set would be needed, too.
    return str(config.choices["dataset"])


def test_data_lists_the_data_sets_of_the_composed_runs() -> None:
    """One run is composed for each experiment and overridden data set."""
    for name in table_names():
        table = load_table(name, tuned=False)  # an untuned column has no jobs
        needed = set()
        for overrides in {job.overrides for cell in planned_cells(table) for job in cell.jobs}:
            keys = ("experiment=", "dataset=")
            needed.add(dataset_of(tuple(o for o in overrides if o.startswith(keys))))
        assert set(table.data) == needed, name


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_are_those_that_the_data_set_expects(name: str, tmp_path: Path) -> None:
    dataset = build(Dataset, compose([f"dataset={name}"])["dataset"], "dataset")  # type: ignore[type-abstract]
    assert [tmp_path / file for file in FILES[name]] == dataset.expected_files(tmp_path)
    assert has_files(name, tmp_path) is not bool(FILES[name])


def test_only_image_folder_has_no_fixed_files() -> None:
    options = {path.stem for path in (conf_dir() / "dataset").glob("*.yaml")}
    assert options - set(FILES) == {"image_folder"}


def test_data_root_prefers_override_then_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDEXP_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("FEDEXP_DATA", "/a")
    assert data_root() == Path("/a")
    assert data_root(["data_root=/b"]) == Path("/b")


@pytest.mark.skipif(not RECORDS.is_dir(), reason="needs the checkout's records")
def test_cost_is_the_sum_of_the_recorded_runs() -> None:
    for name in table_names():
        for variant, cost in load_table(name).cost.items():
            folder = RECORDS / (name if variant == "full" else f"{name}-{variant}")
            with (folder / "runs.csv").open(newline="") as file:
                runs = {row["run"]: row for row in csv.DictReader(file) if row["status"] == "done"}
            hours = sum(float(row["seconds"]) for row in runs.values()) / 3600
            assert (cost.hours, cost.runs) == (pytest.approx(hours, rel=0.006), len(runs)), name


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys; from fedexp.commands.table import run_command; run_command(['list']); "
        "print('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == "False" and "ma_echo/table1" in printed


def test_runs_of_a_named_table_are_done_failed_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["experiment=demo/digits", "partition.alpha=0.5", "method=average"]

    def folder(seed: int) -> RunFolder:
        run = RunFolder.of(compose([*overrides, f"seed={seed}"]))
        run.path.mkdir(parents=True)
        return run

    def row() -> dict[str, Any]:
        row = list_runs("demo/digits", [])
        return {key: row[key] for key in ("runs", "done", "failed", "missing", "seconds", "state")}

    run = folder(1)
    done = {"status": "done", "hashes": run.hashes, "seconds": {"total": 2.0}}
    write_json(run.path / "result.json", done)
    assert row() == {
        "runs": 16, "done": 1, "failed": 0, "missing": 15, "seconds": 2.0, "state": "in part",
    }  # fmt: skip
    write_json(folder(0).path / "status.json", {"status": "failed", "error": "OSError: full"})
    assert row() == {
        "runs": 16, "done": 1, "failed": 1, "missing": 14, "seconds": 2.0, "state": "1 failed",
    }  # fmt: skip
    assert list_table("demo/digits", tmp_path)["runs"] is None
