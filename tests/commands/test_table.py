"""Tests of the command fedexp-table on the digits.

It trains each run once, repeats failed runs, reports every variant, and sends a summary
to W&B.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from fedexp.commands.table import run_command
from fedexp.config.compose import compose
from fedexp.running import result_data
from fedexp.running.experiment import Experiment
from fedexp.storage.files import write_json
from fedexp.tables.load import table_names
from fedexp.tables.paths import check_path
from fedexp.tables.progress import ProgressMonitor
from tests.tables.test_schema import TINY, gridded
from tests.tracking.test_trackers import items, parts, records, wandb_home  # noqa: F401

QUICK = ["rounds=1", "model.hidden=[4]", "local.steps=2"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    write(grids=[{"beta": [1, 2]}])


def write(**changes: Any) -> None:
    """Write ``./conf/table/my/tiny.yaml``: 2 rows, local and ensemble, one seed."""
    quick = [
        {"key": "local", "label": "Local acc", "overrides": ["method=local", *QUICK]},
        {"key": "ensemble", "label": "Ens.", "overrides": ["method=ensemble", *QUICK]},
        TINY["methods"][2],
    ]
    given = {
        "keys": ["beta"], "conditions": {"beta": "partition.alpha={beta}"}, "methods": quick, "seeds": [0],
        "tolerance": {"within": 100, "why": "made up"},
        "reference": [{"beta": 1, "method": "local", "value": 10}, {"beta": 1, "method": "ensemble", "value": 1000}],
    }  # fmt: skip
    Path("conf/table/my").mkdir(parents=True, exist_ok=True)
    Path("conf/table/my/tiny.yaml").write_text(
        yaml.safe_dump(TINY | given | changes, sort_keys=False)
    )


def numbers(node: Any, path: str = "") -> list[str]:
    """Return the dotted paths of all numbers."""
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        return [
            found
            for key, value in items
            for found in numbers(value, f"{path}.{key}" if path else str(key))
        ]
    return [path] if isinstance(node, int | float) and not isinstance(node, bool) else []


def results() -> list[dict[str, Any]]:
    return [
        json.loads(path.read_text()) for path in sorted(Path().glob("outputs/runs/*/*/result.json"))
    ]


def refuse_nothing_of(result: dict[str, Any]) -> dict[str, Any]:
    """Check that every number of `result` may be the number of a cell."""
    experiment = Experiment.of(compose(result["overrides"]))
    for path in numbers(result):
        check_path(path, experiment, "here")
    return result


def dry_run(capfd: pytest.CaptureFixture[str], *said: str) -> bool:
    """Return whether a dry run of the table prints this and does nothing."""
    before = sorted(Path("outputs").rglob("*"))
    capfd.readouterr()
    code = run_command(["run", "my/tiny", "--dry-run"])
    told = capfd.readouterr().out
    return (
        code == 0
        and all(text in told for text in said)
        and sorted(Path("outputs").rglob("*")) == before
    )


def linked(page: bytes) -> set[str]:
    """Return the links of a page that lead out of its folder."""
    return {*map(unquote, re.findall(r'href="(\.\./[^"#]*)"', page.decode()))}


def first_result(folder: Path) -> dict[str, Any]:
    """Return the result behind the first line of a report's two CSV files.

    The test checks that the line has the numbers of this result.
    """
    with (folder / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["beta"], r["method"], r["verdict"]) for r in rows] == [
        ("1", "local", "undecided"), ("1", "ensemble", "undecided"), ("1", "dense", "not run"),
        ("2", "local", "no reference"), ("2", "ensemble", "no reference"), ("2", "dense", "not run"),
    ]  # fmt: skip
    with (folder / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    first = runs[0]
    assert (first["table"], first["beta"], first["method"], first["seed"], first["unit"]) == (
        "my/tiny", "1", "local", "0", "percent",
    )  # fmt: skip
    assert (
        re.fullmatch(r"\d{4}-\d\d-\d\d", first["date"])
        and float(first["seconds.train"]) > 0
        and first["commit"]
    )
    stored = json.loads((Path("outputs") / first["run"] / "result.json").read_text())
    assert float(first["value"]) == pytest.approx(100 * stored["headline"]["value"])
    assert (
        first["date"] in (folder / "report.md").read_text()
        and stored["environment"]["processor"] != platform.machine()
    )
    assert float(rows[0]["mean"]) == pytest.approx(100 * stored["headline"]["value"])
    return dict(stored)


def test_a_table_from_nothing_to_its_files_and_no_run_twice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["report", "my/tiny"]) == 0 and not results()
    capfd.readouterr()
    assert (
        dry_run(capfd, "4 runs - 0 done, 4 to run", "time: not known")
        and run_command(["run", "my/tiny"]) == 0
    )
    told = capfd.readouterr().out
    assert "table my/tiny: 6 cells, 4 runs - 0 done, 4 to run; 2 cells have no method yet" in told
    assert len(results()) == 4 and all(r["attempts"] == 1 for r in results())
    assert {r["partition"]["clients"] for r in results()} == {10}
    folder = Path("outputs/tables/my/tiny")
    # The first report, which was written before there were runs, is in this folder
    assert Path("outputs/tables/my/tiny-partial").is_dir()
    (folder / "report-old.png").touch()
    assert run_command(["report", "my/tiny"]) == 0
    assert re.search(r"page: .*outputs/tables/my/tiny/report.html", told)
    names = {path.name for path in folder.iterdir()}
    pictures = {
        f"report-{name}.{ending}" for name in ("delta", "curves") for ending in ("png", "svg")
    }
    record = {"runs.csv", "configs.json", "record.json"}
    assert names == {"report.md", "report.csv", "report.tex", "report.html", *record, *pictures}
    before = {name: (folder / name).read_bytes() for name in names}
    shutil.copytree(folder, "committed")
    assert run_command(["report", "my/tiny", "--from", "committed", "--out", "again"]) == 0
    again = {path.name: path.read_bytes() for path in Path("again").iterdir()}
    page = before["report.html"].decode()
    found = linked(before["report.html"])
    # The page links to one folder and five files per run
    assert len(found) == 4 * 6 and all((folder / unquote(path)).exists() for path in found)
    assert 'href="runs.csv"' in page and "../" not in re.sub(
        r"<style>.*?</style>", "", again["report.html"].decode()
    )
    assert ({**again, "report.html": b""}, linked(again["report.html"])) == (
        {**before, "report.html": b""},
        set(),
    )
    (folder / "report.md").rename("report.md")
    assert run_command(["report", "my/tiny", "--from", "committed"]) == 0
    # The report is only printed. With --from, files are written only if --out is set
    assert not (folder / "report.md").exists()
    Path("report.md").rename(folder / "report.md")
    stored = first_result(folder)
    each = refuse_nothing_of(stored)["per_client"]["test/local/acc"]
    assert len(each) == 10 and sum(each) / 10 == pytest.approx(stored["headline"]["value"])
    assert (
        all(
            part in (folder / "report.md").read_text()
            for part in ("(report-delta.png)", "Local acc")
        )
        and r"\toprule" in (folder / "report.tex").read_text()
    )

    before = {path: path.stat().st_mtime_ns for path in Path().glob("outputs/runs/*/*/*")}
    capfd.readouterr()
    # One seed is not enough to refute a result
    assert run_command(["run", "my/tiny", "--strict"]) == 0
    assert "4 done, 0 to run" in capfd.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in Path().glob("outputs/runs/*/*/*")}
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 0
    # A report of a part of the table must not replace the whole report
    assert {path: path.read_bytes() for path in folder.iterdir()} == kept
    write(grids=[{"beta": 1}], seeds=[0, 1])
    # The mean of two seeds is outside the tolerance
    assert (
        dry_run(capfd, "2 done, 2 to run", "time: about")
        and run_command(["run", "my/tiny", "--strict"]) == 1
    )
    write(grids=[{"beta": [1, 2]}])
    capfd.readouterr()
    assert run_command(["list", "my/tiny", "demo/digits", "--json", "output_root=outputs"]) == 0
    mine, other = json.loads(capfd.readouterr().out)
    assert (mine["table"], other["table"]) == ("my/tiny", "demo/digits")
    assert (mine["cells"], mine["runs"], mine["done"], mine["state"], mine["data"]) == (
        6,
        4,
        4,
        "done",
        {"digits": True},
    )
    assert mine["seconds"] > 0 and other["done"] == 0


def test_all_tables_are_listed_unless_some_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    write(grids=[{"beta": 1}], data=["digits", "svhn"])
    assert run_command(["list", "--json", "data_root=nowhere"]) == 0
    rows = {row["table"]: row for row in json.loads(capfd.readouterr().out)}
    assert list(rows) == list(table_names()) and "ma_echo/table1" in rows
    mine = rows["my/tiny"]
    assert mine["data"] == {"digits": True, "svhn": False}
    assert (mine["title"], mine["runs"], mine["done"], mine["state"]) == (
        TINY["title"], None, None, None,
    )  # fmt: skip
    assert rows["ma_echo/fig3"]["cost"]["full"]["runs"] == 60
    assert run_command(["list", "my/tny"]) == 2
    assert "did you mean 'my/tiny'?" in capfd.readouterr().err
    assert run_command(["list", "seed=3"]) == 2
    assert "overrides change the runs of named tables only" in capfd.readouterr().err


def test_a_broken_table_is_a_row_and_runs_are_read_every_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("conf/table/my/broken.yaml").write_text("title: [1\n")
    assert run_command(["list", "--json"]) == 0
    states = {row["table"]: row["state"] for row in json.loads(capfd.readouterr().out)}
    assert states["my/broken"].startswith("broken: a table's file is not YAML")
    assert states["my/tiny"] is None
    asked = ["list", "--json", "my/broken", "my/tiny"]
    assert run_command(asked) == 0
    first = json.loads(capfd.readouterr().out)
    assert first[0]["state"] == states["my/broken"] and first[1]["state"] == "missing"
    assert (first[1]["cells"], first[1]["runs"], first[1]["seconds"], first[1]["data"]) == (
        6,
        4,
        0,
        {"digits": True},
    )
    assert run_command(["list", "my/broken", "my/tiny"]) == 0
    assert "broken: a table" in capfd.readouterr().out
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 0
    capfd.readouterr()
    assert run_command(asked) == 0
    row = json.loads(capfd.readouterr().out)[1]
    assert (row["state"], row["done"], row["missing"]) == ("in part", 2, 2) and row["seconds"] > 0
    for path in Path().glob("outputs/runs/*/*/result.json"):
        path.write_text("{")
    assert run_command(asked) == 0
    assert json.loads(capfd.readouterr().out)[1]["state"] == "2 failed"


def test_report_removes_temporary_files_of_a_killed_process() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    folder = Path("outputs/tables/my/tiny-partial")
    folder.mkdir(parents=True)
    dead, alive = (
        folder / f".report.md.{socket.gethostname()}.{pid}.part"
        for pid in (process.pid, os.getppid())
    )
    for path in (dead, alive):
        path.touch()
        os.utime(path, (time.time() - 7200,) * 2)
    assert run_command(["report", "my/tiny"]) == 0
    assert (folder / "report.md").exists() and not dead.exists() and alive.exists()


def test_report_without_a_deleted_result_makes_no_false_remarks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(grids=[{"beta": 1}], seeds=[0, 1])
    assert run_command(["run", "my/tiny"]) == 0
    next(Path().glob("outputs/runs/local-*/*/result.json")).unlink()
    capfd.readouterr()
    assert run_command(["report", "my/tiny"]) == 0
    told = capfd.readouterr().out
    assert "1 cell with runs missing" in told
    for remark in ("different data splits", "headline rules", "versions of fedexp"):
        assert remark not in told
    assert run_command(["run", "my/tiny"]) == 0
    told = capfd.readouterr().out
    assert "3 done, 1 to run" in told and "missing" not in told


def test_a_failed_cell_stops_no_other_gives_1_and_is_tried_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    methods = [
        {"key": "bad", "label": "Bad", "overrides": ["method=fedavg", "local.lr=1e38", *QUICK]},
        {"key": "local", "label": "Local", "overrides": ["method=local", *QUICK]},
    ]
    write(grids=[{"beta": 1}], methods=methods, reference=[])
    assert run_command(["run", "my/tiny"]) == 1
    told = capfd.readouterr()
    assert "FAILED" in told.err and len(results()) == 1
    assert "1 run failed, in bad beta=1" in told.out and re.search(
        r"failed runs/fedavg-digits", told.out
    )
    assert run_command(["run", "my/tiny"]) == 1
    assert "1 done, 1 to run (1 failed before)" in capfd.readouterr().out
    states = {
        p.parent.parent.name.split("-")[0]: json.loads(p.read_text())
        for p in Path().glob("outputs/runs/*/*/status.json")
    }
    assert states["fedavg"]["attempt"] == 2 and states["local"]["attempt"] == 1
    methods[0]["overrides"][1] = "local.lr=0.1"  # type: ignore[index]
    write(grids=[{"beta": 1}], methods=methods, reference=[])
    assert run_command(["run", "my/tiny"]) == 0


@pytest.mark.parametrize(("arguments", "said"), [
    (["run", "my/tny"], "did you mean 'my/tiny'?"),
    (["run", "my/tiny", "rouns=2"], "did you mean 'rounds'?"),
    (["run", "my/tiny", "--only", "bta=1"], "did you mean 'beta'?"),
    (["run", "my/tiny", "--smoke"], "has no smoke variant"),
    (["run", "my/tiny", "local.lr=-1"], "local.lr must be positive"),
    (["run", "my/tiny", "seed=3"], "--seeds 0,1"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    told = capfd.readouterr().err
    assert said in told and "Traceback" not in told and not Path("outputs/runs").exists()


@pytest.mark.parametrize(("by", "said"), [
    ("metrics.val/local/acc_mean", "eval.held_out"),
    ("trace.1.lam={point}.fused/val/acc", "eval.held_out"),
    ("metrics.test/local/acc_men", "did you mean 'test/local/acc_mean'?"),
])  # fmt: skip
def test_a_choice_by_what_is_not_measured_is_refused(
    by: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(methods=gridded(by=by), grids=[{"beta": 1}])
    assert run_command(["run", "my/tiny"]) == 2
    told = capfd.readouterr().err
    assert said in told and "not measured" in told and not Path("outputs/runs").exists()


def test_a_choice_of_the_highest_loss_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    write(
        methods=gridded(
            by="metrics.val/local/loss_mean", overrides=["eval.held_out=50", "local.lr={point}"]
        ),
        grids=[{"beta": 1}],
    )
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 2
    told = capfd.readouterr().err
    assert "is the worst one" in told and "lowest" in told and not Path("outputs/runs").exists()


def test_a_number_is_checked_although_all_runs_are_done(capfd: pytest.CaptureFixture[str]) -> None:
    write(grids=[{"beta": 1}])
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 0
    write(grids=[{"beta": 1}], headline={"value": "metrics.test/local/acc_men"})
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 2
    assert "did you mean 'test/local/acc_mean'?" in capfd.readouterr().err


@pytest.mark.parametrize(("curve", "axis", "said"), [
    ("test/local/acc_men", "round", "did you mean 'test/local/acc_mean'?"),
    ("fused/acc", "iteration", "set trace.every=1"),
])  # fmt: skip
def test_a_curve_that_no_run_has_is_refused_before_a_job_runs(
    curve: str, axis: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    claim = {
        "id": "c",
        "where": "text",
        "says": "s",
        "test": "sooner",
        "a": ["local"],
        "b": ["ensemble"],
        "curve": curve,
        "axis": axis,
        "target": {"value": 50},
    }
    write(claims=[claim], grids=[{"beta": 1}])
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 2
    told = capfd.readouterr().err
    assert f"the runs have no curve '{curve}'" in told and said in told, told
    assert "claims.c.curve" in told and not Path("outputs/runs").exists()


@pytest.mark.parametrize(("value", "said"), [
    ("hedline.value", "did you mean 'headline'?"),
    ("headline.valu", "did you mean 'headline.value'?"),
    ("metrics.test/local/acc_men", "did you mean 'test/local/acc_mean'?"),
    ("best.test/global/acc", "test/local/acc_mean"),
    ("last_10.test/local/ac.0", "test/local/acc"),
    ("rounds_to.0.38", "set headline.targets=[0.38]"),
    ("trace.1.1.fused/acc", "set trace.every=1"),
    ("per_client.test/local/ac.0", "did you mean 'test/local/acc'?"),
])  # fmt: skip
def test_a_number_that_no_result_has_is_refused_before_a_job_runs(
    value: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(headline={"value": value}, grids=[{"beta": 1}])
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 2
    told = capfd.readouterr().err
    assert said in told and "headline.value" in told and not Path("outputs/runs").exists(), told


def test_rounds_to_pool_that_no_result_has_are_refused_before_a_job_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(headline={"pooled_rounds": "last_10.test/local/acc_men"}, grids=[{"beta": 1}])
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 2
    told = capfd.readouterr().err
    assert "did you mean 'test/local/acc_mean'?" in told and "headline.pooled_rounds" in told, told
    assert not Path("outputs/runs").exists()


def test_a_reports_command_says_nothing_of_this_machines_folders() -> None:
    places = ["output_root=elsewhere", "data_root=data", "--out=first"]
    assert run_command(["report", "my/tiny", "--only", "beta=1", *places]) == 0
    assert (
        run_command(
            ["report", "my/tiny", "--only", "beta=1", "output_root=elsewhere", "--out", "second"]
        )
        == 0
    )
    for folder in ("first", "second"):
        command = json.loads(Path(folder, "record.json").read_text())["command"]
        assert command == "fedexp-table report my/tiny --only beta=1"
        assert "elsewhere" not in Path(folder, "report.md").read_text()


def test_overrides_that_change_the_science_are_marked(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(
            ["run", "my/tiny", "--only", "beta=1", "method=local", "clients=3", "--seeds", "5"]
        )
        == 0
    )
    text = Path("outputs/tables/my/tiny-partial/report.md").read_text()
    assert "These runs differ from the table's: clients=3" in text
    assert "Seeds 5 were asked for; the table's are 0" in text
    (run,) = results()
    assert (run["partition"]["clients"], "seed=5" in run["overrides"]) == (3, True)
    capfd.readouterr()
    assert (
        run_command(
            ["report", "my/tiny", "output_root=outputs", "engine=serial", "--only", "beta=1"]
        )
        == 0
    )
    assert "differ from the table's" not in capfd.readouterr().out


@pytest.mark.parametrize("text", ["0,0", "1,", "x", "-1"])
def test_seeds_must_be_seeds(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", "my/tiny", f"--seeds={text}"]) == 2
    assert "whole numbers, each once" in capfd.readouterr().err


@pytest.mark.usefixtures("wandb_home")
def test_wandb_holds_the_cells_and_a_summary_in_one_group() -> None:
    assert run_command(["run", "my/tiny", "logger=wandb", "--only", "beta=1"]) == 0
    groups = []
    for path in Path("outputs/runs").glob("*/*"):
        (part,) = parts(path)
        groups += [r.run.run_group for r in records(part) if r.WhichOneof("record_type") == "run"]
    assert groups == ["my/tiny"] * 2
    (part,) = parts(Path("outputs/tables/my/tiny-partial"))
    found = list(records(part))
    (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    assert (run.run_group, run.job_type, run.display_name) == (
        "my/tiny",
        "summary",
        "my/tiny partial",
    )
    (row,) = [items(r.history.item) for r in found if r.WhichOneof("record_type") == "history"]
    assert (row["comparison/_type"], row["comparison/nrows"], row["comparison/ncols"]) == (
        "table-file",
        3,
        25,
    )
    stored = json.loads((part.parent / "files" / row["comparison/path"]).read_text())
    assert stored["columns"][:7] == ["table", "beta", "method", "label", "role", "oracle", "paper"]
    local = dict(zip(stored["columns"], stored["data"][0], strict=True))
    assert (local["label"], local["paper"], local["n"], local["verdict"]) == (
        "Local acc",
        10,
        1,
        "undecided",
    )
    pictures = [
        value
        for name, value in row.items()
        if name.startswith("pictures/") and name.endswith("/path")
    ]
    assert pictures and all((part.parent / "files" / picture).is_file() for picture in pictures)
    (artifact,) = [
        r.artifact
        for r in found
        if r.WhichOneof("record_type") == "artifact" and r.artifact.type == "report"
    ]
    assert artifact.name == "my-tiny-partial"
    assert {"report.md", "report.csv", "report.html", "runs.csv", "report-delta.png"} <= {
        entry.path for entry in artifact.manifest.contents
    }
    summary = {
        key: value
        for r in found
        if r.WhichOneof("record_type") == "summary"
        for key, value in items(r.summary.update).items()
    }
    assert summary["baseline/undecided"] == 2


def test_time_left_goes_by_what_each_column_cost(tmp_path: Path) -> None:
    jobs = [
        (method, tmp_path / f"{method}{row}")
        for row in range(2)
        for method in ("local", "ensemble")
    ]
    progress = ProgressMonitor("t", jobs, done=3)
    assert not progress.update() and progress.seconds_left(1.0) == 0
    for (_, folder), seconds in zip(jobs[:2], (10.0, 2.0), strict=True):
        folder.mkdir()
        (folder / "status.json").write_text('{"status": "done", "attempt": 1}')
        (folder / "result.json").write_text(json.dumps({"seconds": {"total": seconds}}))
    assert progress.update() and not progress.update()
    # Work of 12 s took 6 s, and the same amount is left
    assert progress.seconds_left(6.0) == pytest.approx(6.0)
    jobs[2][1].mkdir()
    (jobs[2][1] / "status.json").write_text('{"status": "failed", "attempt": 1}')
    assert progress.update() and progress.seconds_left(6.0) == pytest.approx(1.0)
    assert progress.progress_line().startswith("table t: 5 of 7 runs done, 1 failed, about ")


def test_progress_ignores_the_states_of_earlier_runs(tmp_path: Path) -> None:
    old = {"done": {"seconds": {"total": 1.0}}, "failed": None}
    for name, result in old.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "status.json", {"status": name})
        if result:
            write_json(tmp_path / name / "result.json", result)
    progress = ProgressMonitor("t", [(name, tmp_path / name) for name in old], done=0)
    assert not progress.update()
    for name in old:
        write_json(tmp_path / name / "status.json", {"status": name})
    assert progress.update()
    assert progress.progress_line().startswith("table t: 1 of 2 runs done, 1 failed")


def test_progress_with_any_code_is_read_in_the_folder_of_the_new_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["run", "my/tiny", "--only", "method=local", "beta=1"]
    assert run_command(arguments) == 0
    (result,) = Path("outputs").resolve().glob("runs/*/*/result.json")
    folder = result.parent.rename(result.parent.with_name("0" * 8))
    watched: list[Path] = []

    class Monitor(ProgressMonitor):
        def __init__(self, name: str, jobs: Sequence[tuple[str, Path]], done: int) -> None:
            super().__init__(name, jobs, done)
            watched.extend(path for _, path in jobs)

    monkeypatch.setattr("fedexp.tables.progress.ProgressMonitor", Monitor)
    assert run_command([*arguments, "--any-code"]) == 0
    assert (folder / "result.json").exists() and watched == [result.parent]


def test_stored_results_of_other_data_are_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "my/tiny", "--only", "method=local", "beta=1"]
    assert run_command(command) == 0
    assert run_command(command) == 0
    monkeypatch.setattr(result_data, "data_content", lambda _: ["b", None])
    assert run_command(command) == 2
    assert "was computed on other data" in capfd.readouterr().err


def test_next_commands_are_printed_after_a_complete_run(capfd: pytest.CaptureFixture[str]) -> None:
    write(grids=[{"beta": [1]}], next_commands=["fedexp-table list", "fedexp --help"])
    assert run_command(["run", "my/tiny", "--only", "method=local"]) == 0
    assert capfd.readouterr().out.endswith("\nnext:\n  fedexp-table list\n  fedexp --help\n")


@pytest.mark.parametrize(
    ("overrides", "condition"), [([], ""), (["reuse=false"], " without reuse=false")]
)
def test_interrupted_table_says_how_it_continues(
    overrides: list[str],
    condition: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedexp.commands.launching.multirun", stop)
    assert run_command(["run", "my/tiny", *overrides]) == 130
    assert f"the same command{condition} continues from here" in capsys.readouterr().err
