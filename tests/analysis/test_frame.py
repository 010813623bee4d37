"""Tests of stored runs as a data frame, as rows per round, and as CSV."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

import fedexp
from fedexp.analysis.rounds import round_rows
from fedexp.commands.runs import run_command
from fedexp.core.errors import ConfigError, StorageError
from fedexp.storage.selection import Condition
from fedexp.storage.stored_run import StoredRun
from tests.analysis.written import ACC, write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for method in ("fedavg", "scaffold"):
        for seed in (0, 1):
            for alpha in (0.1, 0.5):
                write_run(tmp_path, method, seed, [0.2, 0.4 + seed / 10], partition__alpha=alpha)
    write_run(tmp_path, "moon", 0, [0.3], status="failed")
    older = {"code": "00000000", "updated": "2025-01-01T00:00:00+00:00"}
    write_run(tmp_path, "fedavg", 0, [0.9, 0.9], **older)
    write_run(tmp_path, "fedavg", 0, [0.8, 0.8], code="89abcdef.1")
    return tmp_path


def test_runs_meet_the_conditions_and_are_the_newest_finished_of_their_config(root: Path) -> None:
    found = fedexp.runs("method=fedavg,moon", "partition.alpha<0.5", output_root=root)
    assert isinstance(found, pd.DataFrame) and len(found) == 2
    assert sorted(found["headline"]) == [0.4, 0.5] and set(found["status"]) == {"done"}
    assert set(found["partition.alpha"]) == {0.1} and set(found["local.betas"]) == {"[0.9,0.5]"}
    assert found["updated"].dt.year.tolist() == [2026, 2026]
    # This is the config key, not the number of clients of the last round.
    assert set(found["clients"]) == {4} and set(found[f"mean_last_10/{ACC}"]) == {0.25}
    assert set(found["total/bytes_up"]) == {20} and set(found["total/local_steps"]) == {6}
    everything = fedexp.runs(output_root=root, unfinished=True)
    assert len(everything) == 11 and set(everything["status"]) == {"done", "failed"}


def test_runs_without_a_match_have_the_columns_of_others(root: Path) -> None:
    none = fedexp.runs("seed=7", output_root=root)
    assert len(none) == 0 and {"method", "headline", "folder"} <= set(none.columns)
    assert len(none.curves()) == 0


def test_curves_of_runs_whose_folder_is_gone_are_refused(root: Path) -> None:
    found = fedexp.runs("method=fedavg", output_root=root)
    shutil.rmtree(found["folder"].iloc[1])
    with pytest.raises(StorageError, match="the folder of a run is gone"):
        found.curves()


def test_runs_whose_config_cannot_be_used_are_named(root: Path) -> None:
    folder = Path(fedexp.runs("method=scaffold", output_root=root)["folder"].iloc[0])
    (root / "runs" / folder / "config.yaml").write_text("[")
    with pytest.warns(UserWarning, match=f"{folder.name} is not used: config.yaml is damaged"):
        assert len(fedexp.runs("partition.alpha>0", output_root=root)) == 7


def test_runs_are_refused_without_folder_pandas_or_valid_conditions(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="there are no runs"):
        fedexp.runs(output_root=root / "elsewhere")
    with pytest.raises(ConfigError, match=r"fedexp.runs\('method=fedavg'\)"):
        fedexp.runs(["method=fedavg"], output_root=root)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"did you mean 'partition.alpha'"):
        fedexp.runs("alfa<1", output_root=root)
    with pytest.raises(ConfigError, match="column 'folder'"):
        fedexp.runs(output_root=root)[["method"]].curves()
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "fedexp.analysis.frame", raising=False)
    with pytest.raises(ConfigError, match=r"fedexp\[analysis\]"):
        fedexp.runs(output_root=root)


def test_curves_have_a_row_per_round_of_the_selected_runs(root: Path) -> None:
    found = fedexp.runs("method=fedavg,scaffold", output_root=root)
    curves = found[found["partition.alpha"] == 0.5].curves()
    assert len(curves) == 2 * 2 * 2 and curves["run"].nunique() == 4
    # Keys in which the runs differ are columns, other keys are not.
    assert "partition.alpha" not in curves and "local.lr" not in curves
    assert "partition.alpha" in found.curves()
    last = curves[curves["round"] == 2].set_index(["method", "seed"])[ACC].to_dict()
    assert last == {
        (method, seed): 0.4 + seed / 10 for method in ("fedavg", "scaffold") for seed in (0, 1)
    }


def test_totals_are_sums_over_rounds_without_evaluation(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, [0.1, 0.2, 0.3], bytes_up=10, seconds=2.0)
    rows = round_rows(StoredRun(folder))
    assert [row["total/bytes_up"] for row in rows] == [10, 20, 30]
    assert [row["total/bytes_down"] for row in rows] == [1, 2, 3]
    assert [row["total/bytes"] for row in rows] == [11, 22, 33]
    assert [row["total/local_steps"] for row in rows] == [3, 6, 9]
    # The last attempt counts: 2 s of training and 0.5 s of aggregation per round.
    assert [row["total/seconds"] for row in rows] == [2.5, 5.0, 7.5]
    lines = (folder / "timing.jsonl").read_text().splitlines(keepends=True)
    (folder / "timing.jsonl").write_text("".join(lines[:2]))
    assert [row["total/seconds"] for row in round_rows(StoredRun(folder))] == [2.5, None, None]


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("line", ["3", "[1, 2]", "null", '"text"'])
def test_line_that_is_not_an_object_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    folder = write_run(tmp_path, "fedavg", 0, [0.1, 0.2])
    with (folder / name).open("a") as file:
        file.write(f"{line}\n")
    assert run_command(["export", "--rounds", "--root", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"{name} is damaged" in shown and "a line is not a JSON object" in shown


def test_export_with_rounds_writes_the_rows_of_curves(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", "--rounds", "--root", str(root), "method=scaffold"]
    assert run_command(arguments) == 0
    text = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 8 and rows[0]["method"] == "scaffold"
    assert {row["partition.alpha"] for row in rows} == {"0.1", "0.5"}
    curves = fedexp.runs("method=scaffold", output_root=root).curves()
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(text)), curves)
    assert run_command([*arguments, "--wandb", "offline"]) == 2
    assert "leave out --rounds" in capsys.readouterr().err


def test_condition_on_a_key_of_the_config_is_not_about_the_metric_of_its_name(root: Path) -> None:
    run = StoredRun(Path(fedexp.runs(output_root=root)["folder"][0]))
    assert Condition.of("clients=4")(run) and not Condition.of("clients=2")(run)
