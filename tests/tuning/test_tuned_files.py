"""Tests of tuned columns and of ``fedexp-tune`` with a file.

They show what the command runs, writes, refuses and resumes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedexp.commands import launching
from fedexp.commands.table import run_command as run_table
from fedexp.commands.tune import run_command
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.storage.files import write_json
from fedexp.storage.identity import config_hash
from fedexp.storage.run_folder import RunFolder
from fedexp.tables.build_report import is_partial
from fedexp.tables.cells import planned_cells
from fedexp.tables.listing import list_runs
from fedexp.tables.load import load_table
from fedexp.tables.record import RunRecord, TableRecord, run_key
from fedexp.tables.schema import Table
from fedexp.tables.sweeps import sweep_overrides, tried_ranges
from fedexp.tuning.tuned_files import (
    MARK,
    Swept,
    Tuning,
    file_text,
    load_tuning,
    stored_results,
    tuned_files,
)
from tests.tables.test_schema import TINY

QUICK = ["rounds=1", "model.hidden=[4]", "local.steps=2"]
TABLE = {**TINY, "reference": [], "tuned": "mine"} | {
    "methods": [
        {"key": "local", "label": "Local acc", "overrides": ["method=local", *QUICK]},
        {
            "key": "momentum",
            "label": "Momentum",
            "overrides": ["method=local", "local.momentum=0.5", *QUICK],
        },
    ],
    "rules": [
        {
            "where": {"method": "local", "start": "same"},
            "overrides": ["local.lr_decay=0.5", "local.lr=9"],
        }
    ],
    "reduced": {"what": "less", "grids": [{"clients": 2, "start": "same", "beta": 1}]},
}
COMMIT = "1234abcd"
ROOT = Path(__file__).resolve().parents[2]
POINTS = [0.1, 0.2, 0.4]
TUNING: dict[str, Any] = {
    "table": "my/tiny",
    "cell": {"clients": 2, "start": "same", "beta": 1},
    "overrides": ["eval.held_out=50"],
    "seeds": [7],
    "by": "metrics.val/local/acc_mean",
    "where": {"start": "same"},
    "sweeps": {"local": [{"over": "local.lr", "points": [0.1, 0.2, 0.4]}]},
}


FOUND = Swept("local.lr", (0.1, 0.2, 0.4), (0.4, 0.5, None), 0.2, (COMMIT,))


def result(
    points: list[float], values: list[float | None], chosen: float, over: str = "local.lr"
) -> dict[str, Any]:
    """Return the results of a sweep as a tuning file has them."""
    return {"over": over, "points": points, "values": values, "chosen": chosen}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a user's folder with a table and a tuning file.

    Return the path of the latter.
    """
    for folder, content in (("table/my/tiny", TABLE), ("tuned/mine", TUNING)):
        path = tmp_path / "conf" / f"{folder}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture
def built_in(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the tuning file a built-in one that has a result of another method.

    Return the path of the file.
    """
    folder = tmp_path / "installed"
    (folder / "tuned").mkdir(parents=True)
    content = two_methods(results={"momentum": [result([0.1, 0.2], [0.5, 0.6], 0.2)]})
    mine.unlink()
    mine.parent.rmdir()
    path = folder / "tuned" / "mine.yaml"
    path.write_text(f"# by hand\n{content}")
    monkeypatch.setattr("fedexp.tuning.tuned_files.conf_dir", lambda: folder)
    return path


def two_methods(**changes: Any) -> str:
    """Return the text of a file that tunes two methods."""
    more = {"momentum": [{"over": "local.lr", "points": [0.1, 0.2]}]}
    content = TUNING | {"sweeps": TUNING["sweeps"] | more} | changes
    return yaml.safe_dump(content, sort_keys=False)


def lr_of(config: dict[str, Any]) -> float:
    return float(config["local"]["lr"])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace runs by a formula that is best at 0.2, and return the list of configs."""
    asked: list[dict[str, Any]] = []

    def multirun(jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
        assert os.environ["FEDEXP_OBJECTIVE"] == TUNING["by"]
        for job in jobs:
            config = compose([*job])
            asked.append(config)
            folder = RunFolder.of(config)
            if lr_of(config) > 0.3:
                folder.path.mkdir(parents=True, exist_ok=True)
                folder.set_status("failed", error="client 3 diverged")
                continue
            value = 0.5 - abs(lr_of(config) - 0.2)
            result = {
                "metrics": {"val/local/acc_mean": value},
                "hashes": folder.hashes,
                "environment": {"commit": COMMIT},
            }
            write_json(folder.path / "result.json", {"status": "done", **result}, seal=True)
        return 0

    monkeypatch.setattr("fedexp.commands.launching.multirun", multirun)
    return asked


def column(table: Table) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Return the overrides of the second column's first runs, by row."""
    cells = [cell for cell in planned_cells(table) if cell.method == "local_tuned"]
    return {
        tuple(cell.conditions.values()): (*cell.jobs[0].overrides,) if cell.jobs else ()
        for cell in cells
    }


def test_a_column_has_what_was_chosen_and_says_so_where_nothing_was(mine: Path) -> None:
    missing = load_table("my/tiny")
    assert column(missing) == {(2, "same"): (), (3, "same"): (), (4, "same"): ()}
    assert missing.columns["local_tuned"].why == "not chosen yet: run fedexp-tune mine local"
    mine.write_text(
        yaml.safe_dump(TUNING | {"results": {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2)]}})
    )
    table = load_table("my/tiny")
    first = column(table)[2, "same"]
    # The rules of the method also apply to the tuned column.
    assert {"method=local", "local.lr=0.2", "local.lr_decay=0.5"} < {*first}
    assert "local.lr=9" not in first and not any("held_out" in override for override in first)
    own = table.columns["local_tuned"]
    assert own.label == "Local acc, tuned (local.lr=0.2)" and own.role == "ours" and not own.why


def test_a_column_whose_values_did_not_change_has_no_tuned_column(mine: Path) -> None:
    results = {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2)]}
    mine.write_text(yaml.safe_dump(TUNING | {"unchanged": ["local"], "results": results}))
    assert "local_tuned" not in load_table("my/tiny").columns


@pytest.mark.parametrize(("changes", "said"), [
    ({"results": {"local": [result(POINTS[:2], [0.3, 0.6], 0.2)]}}, "results.local has other points"),
    ({"results": {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.3)]}}, "chosen value is one of the points"),
    ({"results": {"local": [result(POINTS, [0.3, 0.6], 0.2)]}}, "a value for each point"),
    ({"results": {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2, "local.momentum")]}}, "has other points"),
    ({"seeds": [7, 0]}, "seeds of the table"),
    ({"seeds": [7, 7]}, "each once"),
    ({"extension": -1}, "must not be negative"),
    ({"unchanged": ["locl"]}, "locl has no sweep"),
    ({"sweeps": {"local": [{"over": "local.lr", "points": [1, 2], "relative": True}]}}, "comes after the first sweep"),
    ({"by": "metrics.test/global/acc"}, "held-out data has val/"),
    ({"sweeps": {"locl": [{"over": "local.lr", "points": [1, 2]}]}}, "did you mean 'local'"),
    ({"sweeps": {"local": [{"over": "local.lr", "points": [1, 1]}]}}, "each once"),
])  # fmt: skip
def test_what_was_chosen_from_other_points_or_on_test_data_is_refused(
    mine: Path, changes: dict[str, Any], said: str
) -> None:
    mine.write_text(yaml.safe_dump(TUNING | changes))
    with pytest.raises(ConfigError, match=said):
        load_table("my/tiny")


def test_tune_writes_the_best_point_below_the_hand_written_part(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text("# by hand\n" + mine.read_text())
    by_hand = mine.read_text()

    assert run_command(["mine", "local"]) == 0
    told = capfd.readouterr()
    assert f"local: local.lr=0.2, written to {mine}" in told.out
    assert "local with local.lr=0.4  failed: client 3 diverged" in told.out
    shared = {"seed=7", "eval.held_out=50", "init=same", "local.lr_decay=0.5"}
    assert [lr_of(config) for config in runs] == [0.1, 0.2, 0.4]
    assert all(shared < {*config.overrides} for config in runs)

    written = mine.read_text()
    assert written.startswith(by_hand) and written.splitlines().count(MARK) == 1
    assert load_tuning("mine").results["local"] == (FOUND,)
    assert "local.lr=0.2" in column(load_table("my/tiny"))[2, "same"]
    assert run_command(["mine"]) == 0 and mine.read_text() == written


def test_tune_of_a_built_in_name_writes_the_working_directory(
    built_in: Path, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    before = built_in.read_text()
    assert run_command(["mine", "local", "threads=1"]) == 0

    written = tmp_path / "conf" / "tuned" / "mine.yaml"
    assert built_in.read_text() == before and tuned_files()["mine"] == written
    assert written.read_text().startswith("# by hand\n")
    found = load_tuning("mine").results
    assert found == {
        "local": (FOUND,),
        "momentum": (Swept("local.lr", (0.1, 0.2), (0.5, 0.6), 0.2),),
    }

    # The user's file is the source of the next command.
    written.write_text(written.read_text().replace("# by hand", "# by the user"))
    assert run_command(["mine", "momentum"]) == 0
    assert written.read_text().startswith("# by the user\n")
    assert load_tuning("mine").results["momentum"] == (
        Swept("local.lr", (0.1, 0.2), (0.4, 0.5), 0.2, (COMMIT,)),
    )


def test_tuned_file_with_a_built_in_name_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(iter(tuned_files()))
    content = yaml.safe_load(tuned_files()[name].read_text()) | {"results": {}}
    monkeypatch.chdir(tmp_path)
    Path("conf/tuned").mkdir(parents=True)
    Path(f"conf/tuned/{name}.yaml").write_text(yaml.safe_dump(content))

    assert load_tuning(name).results == {}
    # Other files with a built-in name are refused.
    assert compose(["rounds=3"])["rounds"] == 3


def test_tune_with_out_leaves_the_tuning_unchanged(
    mine: Path, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    before = mine.read_text()
    out = tmp_path / "trials" / "first.yaml"
    assert run_command(["mine", "rounds=2", "--out", str(out)]) == 0

    assert mine.read_text() == before and [config["rounds"] for config in runs] == [2, 2, 2]
    assert yaml.safe_load(out.read_text())["results"]["local"][0]["chosen"] == 0.2
    assert {path.name for path in out.parent.iterdir()} == {"first.yaml"}


@pytest.mark.parametrize(("arguments", "said"), [
    (["mine", "rounds=2"], ["change the results", "rounds=2", "--out FILE"]),
    (["mine", "~local.lr_decay"], ["change the results", "--out FILE"]),
    (["mime"], ["no file conf/tuned/mime.yaml", "did you mean 'mine'?"]),
    (["mine", "locla"], ["'locla' is not swept", "mine.yaml", "did you mean 'local'?"]),
    (["mine", "rouds=2", "--out", "trial.yaml"], ["local with local.lr=0.1", "did you mean 'rounds'?"]),
    (["mine", "eval.held_out=0", "--out", "trial.yaml"], ["val/local/acc_mean", "by"]),
    (["mine", "--out", "conf"], ["cannot be written", "conf"]),
    (["mine", "--out", "conf/tuned/mine.yaml/first.yaml"], ["cannot be written", "first.yaml"]),
    (["mine", "--out", "conf/pipe"], ["cannot be written", "conf/pipe"]),
])  # fmt: skip
def test_tune_refuses_mistakes_before_the_first_run(
    mine: Path,
    runs: list[dict[str, Any]],
    arguments: list[str],
    said: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = mine.read_text()
    os.mkfifo("conf/pipe")
    assert run_command(arguments) == 2
    told = capfd.readouterr().err
    assert all(text in told for text in said), told
    assert not runs and mine.read_text() == before
    assert {path.name for path in Path().iterdir()} == {"conf"}


@pytest.mark.parametrize("layout", ["wheel", "checkout"])
@pytest.mark.parametrize("out", ["fedexp/mine.yaml", "conf/tuned/mine.yaml"])
def test_tune_never_changes_the_installed_files(
    built_in: Path,
    tmp_path: Path,
    runs: list[dict[str, Any]],
    layout: str,
    out: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "site" / "fedexp"
    conf = (package if layout == "wheel" else package.parent) / "conf"
    (conf / "tuned").mkdir(parents=True)
    built_in.rename(conf / "tuned" / "mine.yaml")
    monkeypatch.setattr("fedexp.tuning.tuned_files.__file__", str(package / "tables" / "tuning.py"))
    monkeypatch.setattr("fedexp.tuning.tuned_files.conf_dir", lambda: conf)
    before = {path: path.is_file() and path.read_text() for path in (tmp_path / "site").rglob("*")}

    target = conf / "tuned" / "mine.yaml" if out.startswith("conf") else package / "mine.yaml"
    assert run_command(["mine", "--out", str(target)]) == 2
    told = capfd.readouterr().err
    if layout == "wheel":
        monkeypatch.chdir(package)
        assert run_command(["mine"]) == 2
        told += capfd.readouterr().err

    assert told.count("installed files") == (2 if layout == "wheel" else 1) and not runs
    after = {path: path.is_file() and path.read_text() for path in (tmp_path / "site").rglob("*")}
    assert after == before


def test_tune_in_a_checkout_writes_its_own_conf(
    built_in: Path,
    tmp_path: Path,
    runs: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedexp.tuning.tuned_files.conf_dir", lambda: tmp_path / "conf")
    (tmp_path / "conf" / "tuned").mkdir()
    path = tmp_path / "conf" / "tuned" / "mine.yaml"
    path.write_text(built_in.read_text())

    assert run_command(["mine", "local"]) == 0
    assert "local" in yaml.safe_load(path.read_text())["results"]


def test_tune_rewrites_a_file_with_another_commands_mark(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    by_hand = mine.read_text()
    old = "# Results; generated by scripts/tune.py: the number at every point."
    older = {"results": {"local": [result(POINTS, [0.3, 0.2, None], 0.1)]}}
    mine.write_text(f"{by_hand}{old}\n{yaml.safe_dump(older)}")
    assert load_tuning("mine").setting("local") == ("local.lr=0.1",)

    assert run_command(["mine"]) == 0
    written = mine.read_text()
    assert written.startswith(f"{by_hand}{MARK}\nresults:\n") and old not in written
    assert load_tuning("mine").setting("local") == ("local.lr=0.2",)


def test_interrupted_tune_keeps_the_methods_that_are_done(
    mine: Path,
    runs: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mine.write_text(two_methods())
    with monkeypatch.context() as patch:
        whole = launching.multirun

        def multirun(jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
            if "local.momentum=0.5" in jobs[0]:
                raise KeyboardInterrupt
            return whole(jobs, overrides)

        patch.setattr(launching, "multirun", multirun)
        assert run_command(["mine"]) == 130
    assert "the same command continues from here" in capfd.readouterr().err
    assert [*load_tuning("mine").results] == ["local"]

    assert run_command(["mine"]) == 0
    assert [*load_tuning("mine").results] == ["local", "momentum"]


def test_tune_without_any_result_gives_1_and_writes_nothing(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    sweeps = {"local": [{"over": "local.lr", "points": [0.4, 0.5]}]}
    mine.write_text(yaml.safe_dump(TUNING | {"sweeps": sweeps}, sort_keys=False))
    before = mine.read_text()
    assert run_command(["mine"]) == 1
    assert "all runs of a sweep failed" in capfd.readouterr().err and mine.read_text() == before


def test_tune_reads_stored_runs_and_does_not_repeat_them(
    mine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["mine"]) == 0
    written = mine.read_text()
    results = [json.loads(path.read_text()) for path in Path().glob("outputs/runs/*/*/result.json")]
    assert sorted(result["metrics"]["val/local/acc_mean"] for result in results) == pytest.approx(
        sorted(load_tuning("mine").results["local"][0].values), abs=1e-4
    )

    capfd.readouterr()
    assert run_command(["mine"]) == 0 and mine.read_text() == written
    assert "3 runs - 3 done, 0 to run" in capfd.readouterr().out
    assert {result["attempts"] for result in results} == {1}


def sweeps_of(*sweeps: dict[str, Any], **changes: Any) -> str:
    """Return the text of a tuning file with several sweeps of one method."""
    return yaml.safe_dump(TUNING | {"sweeps": {"local": [*sweeps]}} | changes, sort_keys=False)


def test_a_later_sweep_starts_from_the_best_point_of_the_earlier_ones(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    first = {"over": "local.lr", "points": POINTS}
    second = {"over": "local.momentum", "points": [0.3, 0.6]}
    finer = {"over": "local.lr", "points": [0.75, 1.25], "relative": True}
    mine.write_text(sweeps_of(first, second, finer))

    assert run_command(["mine"]) == 0
    tried = [(lr_of(config), config["local"]["momentum"]) for config in runs]
    # The momentum does not change the formula. No point is better, so it is not chosen.
    assert tried == [(0.1, 0), (0.2, 0), (0.4, 0), (0.2, 0.3), (0.2, 0.6), (0.15, 0), (0.25, 0)]
    found = load_tuning("mine")
    assert [swept.chosen for swept in found.results["local"]] == [0.2, None, None]
    assert found.setting("local") == ("local.lr=0.2",)
    assert "7 runs - 0 done, 7 to run" in capfd.readouterr().out


def test_a_better_point_of_a_later_sweep_replaces_the_earlier_one(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    first = {"over": "local.lr", "points": [0.1, 0.16]}
    finer = {"over": "local.lr", "points": [0.5, 1.25], "relative": True}
    mine.write_text(sweeps_of(first, finer))
    assert run_command(["mine"]) == 0
    assert load_tuning("mine").setting("local") == ("local.lr=0.2",)
    assert "local.lr=0.2" in column(load_table("my/tiny"))[2, "same"]


def test_the_number_of_a_point_is_the_mean_over_the_seeds(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    mine.write_text(sweeps_of(*TUNING["sweeps"]["local"], seeds=[7, 8]))
    assert run_command(["mine"]) == 0
    seeds = [(lr_of(config), config["seed"]) for config in runs]
    assert seeds == [(0.1, 7), (0.1, 8), (0.2, 7), (0.2, 8), (0.4, 7), (0.4, 8)]

    # With another result of one seed, the mean changes.
    folder = RunFolder.of(next(one for one in runs if (lr_of(one), one["seed"]) == (0.1, 8)))
    other = {"metrics": {"val/local/acc_mean": 0.9}, "hashes": folder.hashes}
    write_json(folder.path / "result.json", {"status": "done", **other}, seal=True)
    assert run_command(["mine"]) == 0
    (found,) = load_tuning("mine").results["local"]
    assert found.values == (pytest.approx((0.4 + 0.9) / 2), 0.5, None) and found.chosen == 0.1


@pytest.mark.parametrize(
    ("points", "tried", "chosen", "edge"),
    [
        ([0.05, 0.1], [0.05, 0.1, 0.2, 0.4], 0.2, False),
        ([0.1, 0.2, 0.25], [0.1, 0.2, 0.25], 0.2, False),
        ([0.21, 0.22], [0.21, 0.22, 0.200455, 0.191343], 0.200455, False),
        ([0.02, 0.03], [0.02, 0.03, 0.045, 0.0675], 0.0675, True),
    ],
)
def test_a_sweep_is_extended_once_beyond_its_best_end(
    mine: Path,
    runs: list[dict[str, Any]],
    points: list[float],
    tried: list[float],
    chosen: float,
    edge: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mine.write_text(sweeps_of({"over": "local.lr", "points": points}, extension=2))
    assert run_command(["mine"]) == 0
    assert [lr_of(config) for config in runs] == tried
    (found,) = load_tuning("mine").results["local"]
    assert found.points == tuple(tried) and found.chosen == chosen
    assert ("edge of" in capfd.readouterr().out) == edge


def test_a_sweep_of_whole_numbers_is_extended_by_whole_numbers(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    """The formula that replaces runs does not depend on the epochs, so the first point is best."""
    for points, tried in (([4, 8], (4, 8, 2, 1)), ([3, 4], (3, 4, 2)), ([1, 2], (1, 2))):
        mine.write_text(
            sweeps_of(
                {"over": "local.lr", "points": [0.1, 0.2, 0.25]},
                {"over": "local.epochs", "points": points},
                extension=2,
            )
        )
        assert run_command(["mine"]) == 0
        assert load_tuning("mine").results["local"][1].points == tried


def test_products_of_whole_numbers_are_whole(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The first point of the first sweep is best, because the formula knows no epochs."""
    first = {"over": "local.epochs", "points": [4, 8]}
    finer = {"over": "local.epochs", "points": [0.1, 0.2, 0.6, 1.5], "relative": True}
    mine.write_text(sweeps_of(first, finer, overrides=[*TUNING["overrides"], "local.lr=0.1"]))
    assert run_command(["mine"]) == 0
    assert load_tuning("mine").results["local"][1].points == (1, 2, 6)
    assert [config["local"]["epochs"] for config in runs] == [4, 8, 1, 2, 6]
    assert run_command(["mine", "--dry-run"]) == 0
    assert "0 to run" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("key", "points", "factors", "tried"),
    [
        ("local.epochs", [2, 4], [0.4, 0.6], (1,)),
        ("local.epochs", [2, 4], [1.1, 2], ()),
        ("local.momentum", [0.6, 0.1], [0.5, 2], (0.3,)),
    ],
)
def test_products_are_new_values_that_a_run_can_have(
    mine: Path,
    runs: list[dict[str, Any]],
    key: str,
    points: list[float],
    factors: list[float],
    tried: tuple[float, ...],
) -> None:
    """The formula that replaces runs does not depend on the key, so the first point is best."""
    sweeps = (
        {"over": key, "points": points},
        {"over": key, "points": factors, "relative": True},
    )
    mine.write_text(sweeps_of(*sweeps, overrides=[*TUNING["overrides"], "local.lr=0.1"]))
    assert run_command(["mine"]) == 0
    assert load_tuning("mine").results["local"][1].points == tried


def test_a_factor_is_checked_with_the_points_that_it_multiplies(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The momentum must be below 1. The factor 2 fits to 0.1, and the factor 20 to no point."""
    first = {"over": "local.momentum", "points": [0.6, 0.1]}
    for factor, code in ((2, 0), (20, 2)):
        finer = {"over": "local.momentum", "points": [0.5, factor], "relative": True}
        mine.write_text(sweeps_of(first, finer, overrides=[*TUNING["overrides"], "local.lr=0.1"]))
        assert run_command(["mine"]) == code
    assert "momentum must be in [0, 1), got 12" in capfd.readouterr().err


def test_values_that_a_run_cannot_have_extend_no_sweep(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    """The momentum must be below 1, so only one of the two further values is left."""
    sweeps = (
        {"over": "local.lr", "points": [0.1, 0.2, 0.25]},
        {"over": "local.momentum", "points": [0.9, 0.7]},
    )
    mine.write_text(sweeps_of(*sweeps, extension=2))
    assert run_command(["mine"]) == 0
    found = load_tuning("mine").results["local"][1]
    assert found.points == (0.9, 0.7) and found.values == (0.5, 0.5)


def test_a_key_without_a_number_still_has_an_edge(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    """``limit.train`` is null without tuning."""
    sweeps = (
        {"over": "local.lr", "points": [0.1, 0.19, 0.25]},
        {"over": "limit.train", "points": [400, 800]},
    )
    mine.write_text(sweeps_of(*sweeps))
    assert run_command(["mine"]) == 0
    assert "edge" not in capfd.readouterr().out
    text = mine.read_text().replace("chosen: null", "chosen: 800")
    mine.write_text(text)
    ranges = dict(tried_ranges(load_tuning("mine"), "local"))
    assert {space.key: space.edge(value) for space, value in ranges.items()} == {
        "local.lr": None,
        "limit.train": "upper",
    }


def test_a_seed_of_the_table_is_refused_before_the_first_run(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(yaml.safe_dump(TUNING | {"seeds": load_table("my/tiny").seeds[:1]}))
    assert run_command(["mine"]) == 2
    assert "chosen with the seeds of the table" in capfd.readouterr().err and not runs
    # A column may have seeds of its own.
    mine.write_text(yaml.safe_dump(TUNING))
    path = mine.parents[1] / "table/my/tiny.yaml"
    column = TABLE["methods"][1] | {"seeds": TUNING["seeds"]}
    path.write_text(yaml.safe_dump(TABLE | {"methods": [TABLE["methods"][0], column]}))
    assert run_command(["mine"]) == 2
    assert "chosen with the seeds of the table" in capfd.readouterr().err and not runs


def test_a_loss_is_refused(
    mine: Path, runs: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(mine.read_text().replace("acc_mean", "loss_mean"))
    assert run_command(["mine"]) == 2
    assert "the worst one for a loss" in capfd.readouterr().err and not runs


def test_other_processes_keep_their_results(
    mine: Path, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process tunes the other method while this one runs."""
    mine.write_text(two_methods())
    whole = launching.multirun

    def multirun(jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
        monkeypatch.setattr(launching, "multirun", whole)
        assert run_command(["mine", "momentum"]) == 0
        return whole(jobs, overrides)

    monkeypatch.setattr(launching, "multirun", multirun)
    assert run_command(["mine", "local"]) == 0
    assert [*load_tuning("mine").results] == ["local", "momentum"]


def test_another_file_keeps_its_own_results(
    mine: Path, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    mine.write_text(two_methods(results={"momentum": [result([0.1, 0.2], [0.5, 0.6], 0.1)]}))
    out = tmp_path / "other.yaml"
    assert run_command(["mine", "local", "rounds=2", "--out", str(out)]) == 0
    assert [*stored_results(out)] == ["local"]
    assert run_command(["mine", "momentum", "rounds=2", "--out", str(out)]) == 0
    found = stored_results(out)
    assert [*found] == ["local", "momentum"] and found["momentum"][0].chosen == 0.2
    assert load_tuning("mine").results["momentum"][0].chosen == 0.1


def test_a_file_that_is_no_tuning_is_not_overwritten(
    mine: Path, tmp_path: Path, runs: list[dict[str, Any]]
) -> None:
    out = tmp_path / "notes.yaml"
    out.write_text("a: 1\n")
    assert run_command(["mine", "--out", str(out)]) == 2
    assert out.read_text() == "a: 1\n" and not runs


def test_only_the_first_sweep_with_its_best_point_at_an_end_is_extended(
    mine: Path, runs: list[dict[str, Any]]
) -> None:
    sweeps = (
        {"over": "local.lr", "points": [0.05, 0.1]},
        {"over": "local.lr", "points": [0.18, 0.19]},
    )
    mine.write_text(sweeps_of(*sweeps, extension=1))
    assert run_command(["mine"]) == 0
    assert [lr_of(config) for config in runs] == [0.05, 0.1, 0.2, 0.18, 0.19]


@pytest.mark.parametrize("name", list(tuned_files()))
def test_all_methods_of_a_tuning_have_as_many_trials(name: str) -> None:
    trials = {sum(len(one.points) for one in own) for own in load_tuning(name).sweeps.values()}
    assert len(trials) == 1


@pytest.mark.parametrize("name", list(tuned_files()))
def test_every_sweep_is_of_keys_that_exist_and_has_the_value_of_its_column(name: str) -> None:
    tuning = load_tuning(name)
    table = load_table(tuning.table, tuned=False)
    first = {str(own[0]): (method, own[0]) for method, own in tuning.sweeps.items()}
    later = {str(one): (method, one) for method, own in tuning.sweeps.items() for one in own[1:]}
    for method, sweep in {**first, **later}.values():
        only = {**{key: [value] for key, value in tuning.cell.items()}, "method": [method]}
        (planned,) = planned_cells(table, tuning.variant, only=only, seeds=tuning.seeds[:1])
        node: Any = compose([*planned.jobs[0].overrides])
        for key in sweep.over.split("."):
            node = node[key]
        # The first sweep measures the column's values of all keys, so a later sweep that
        # repeats one of them wastes a point.
        assert sweep.relative or (node in sweep.points) == (str(sweep) in first)
        for point in sweep.points:
            setting = f"{sweep.over}={point}"
            runs = sweep_overrides(tuning, method, [setting])
            assert len(runs) == len(tuning.seeds) and all(setting in run for run in runs)


@pytest.mark.parametrize("name", [name for name in tuned_files() if load_tuning(name).unchanged])
def test_unchanged_columns_have_the_runs_of_the_table(name: str) -> None:
    tuning = load_tuning(name)
    table = load_table(tuning.table, tuned=False)
    for method in tuning.unchanged:
        only = {**{key: [value] for key, value in tuning.cell.items()}, "method": [method]}
        (planned,) = planned_cells(table, tuning.variant, only=only)
        own = [*planned.jobs[0].overrides]
        chosen = tuning.setting(method)
        assert chosen and config_hash(compose([*own, *chosen])) == config_hash(compose(own))


def test_small_numbers_are_read_back_as_numbers() -> None:
    found = Swept("local.lr", (1e-05, 1e-04), (0.5, None), 1e-05)
    (read,) = yaml.safe_load(file_text("", {"one": (found,)}))["results"]["one"]
    assert read == result([1e-05, 1e-04], [0.5, None], 1e-05)


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(root), *who, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def changed_after_first_run(root: Path, path: str, tuning: Tuning) -> list[str]:
    """Return the methods whose points differ from those at the commits of their runs.

    Args:
        root: A Git repository.
        path: Path of the tuning's file in it.
        tuning: The tuning in its present state.
    """

    def rules(text: str | None, method: str) -> list[Any]:
        node = yaml.safe_load(text or "{}")
        shared = [node.get(key) for key in ("cell", "seeds", "by", "overrides")]
        return [*shared, node.get("sweeps", {}).get(method)]

    now = (root / path).read_text()
    return [
        method
        for method, results in tuning.results.items()
        for commit in sorted({commit for swept in results for commit in swept.commits})
        # A + after the commit stands for files that were not committed.
        if commit.endswith("+")
        or rules(git(root, "show", f"{commit}:{path}"), method) != rules(now, method)
    ]


def test_points_that_were_changed_after_their_first_run_are_found(mine: Path) -> None:
    root, path = mine.parents[2], mine.relative_to(mine.parents[2]).as_posix()
    mine.write_text(yaml.safe_dump(TUNING))
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "points"]):
        assert git(root, *arguments) is not None
    commit = git(root, "rev-parse", "--short=8", "HEAD")

    def with_results(commit: str | None, **changes: Any) -> list[str]:
        found = {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2) | {"commits": [commit]}]}
        mine.write_text(yaml.safe_dump(TUNING | {"results": found} | changes))
        return changed_after_first_run(root, path, load_tuning("mine"))

    assert with_results(commit) == []
    assert with_results(f"{commit}+") == ["local"]
    assert with_results("0" * 8) == ["local"]
    assert with_results(commit, seeds=[8, 9]) == ["local"]
    (sweep,) = TUNING["sweeps"]["local"]
    other = {**TUNING["sweeps"], "local": [{**sweep, "points": [*POINTS[:-1], 0.6]}]}
    found = {"local": [result([*POINTS[:-1], 0.6], [0.3, 0.6, 0.5], 0.2) | {"commits": [commit]}]}
    assert with_results(commit, sweeps=other, results=found) == ["local"]


@pytest.mark.parametrize("name", list(tuned_files()))
def test_points_were_committed_before_their_first_run(name: str) -> None:
    path = f"conf/tuned/{name}.yaml"
    if git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the checkout does not have the commits of the runs")
    assert changed_after_first_run(ROOT, path, load_tuning(name)) == []


EQUAL = {
    **{key: value for key, value in TABLE.items() if key not in ("tuned", "rules")},
    "equal_tuning": ["mine"],
    "smoke": {"what": "less", "seeds": [0]},
}


@pytest.fixture
def equal(mine: Path) -> Path:
    """Make the table one whose own columns are tuned, and return the tuning file."""
    mine.parents[1].joinpath("table/my/tiny.yaml").write_text(yaml.safe_dump(EQUAL))
    mine.write_text(equal_tuning())
    return mine


def equal_tuning(**changes: Any) -> str:
    """Return the text of a file that tunes both columns with three points each."""
    (own,) = TUNING["sweeps"]["local"]
    sweeps = {"local": [own], "momentum": [own]}
    return yaml.safe_dump(TUNING | {"sweeps": sweeps} | changes, sort_keys=False)


def test_rows_of_a_tuning_file_have_runs_once_its_values_are_chosen(equal: Path) -> None:
    untuned = load_table("my/tiny")
    # The file names the rows with equal starts. The other rows are not tuned at all.
    assert {c.conditions["start"] for c in planned_cells(untuned) if c.jobs} == {"diff"}
    assert all(cell.jobs for cell in planned_cells(untuned, "smoke"))
    (reason,) = untuned.columns["local"].untuned
    assert reason.why == "not chosen yet: run fedexp-tune mine local"
    assert untuned.columns["local"].why_untuned({"start": "diff"}) == ""

    equal.write_text(equal_tuning(results={"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2)]}))
    cells = planned_cells(load_table("my/tiny"))
    same = [cell for cell in cells if cell.conditions["start"] == "same" and cell.jobs]
    assert {cell.method for cell in same} == {"local"}
    assert all("local.lr=0.2" in cell.jobs[0].overrides for cell in same)
    other = [cell for cell in cells if cell.conditions["start"] == "diff"]
    assert other and not any("local.lr=0.2" in cell.jobs[0].overrides for cell in other)


def test_rows_of_a_leaderboard_wait_only_for_their_own_file(equal: Path) -> None:
    chosen = {"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2)]}
    equal.write_text(equal_tuning(results=chosen | {"momentum": chosen["local"]}))
    other = {**TUNING["cell"], "start": "diff"}
    changes = {"where": {"start": "diff"}, "cell": other}
    equal.with_stem("others").write_text(equal_tuning(**changes))
    table = EQUAL | {"equal_tuning": ["mine", "others"]}
    equal.parents[1].joinpath("table/my/tiny.yaml").write_text(yaml.safe_dump(table))

    for results, starts in (({}, {"same"}), (chosen, {"same", "diff"})):
        equal.with_stem("others").write_text(equal_tuning(results=results, **changes))
        cells = planned_cells(load_table("my/tiny"), only={"method": ["local"]})
        assert {cell.conditions["start"] for cell in cells if cell.jobs} == starts


def test_a_leaderboard_without_chosen_values_is_refused_with_the_command_to_enter(
    equal: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    equal.write_text(equal_tuning(where={}))
    assert run_table(["run", "my/tiny"]) == 2
    said = capfd.readouterr().err
    assert "no coefficients have been chosen" in said and "run fedexp-tune mine local" in said
    assert list_runs("my/tiny", [])["state"] == "missing, 2 columns with untuned rows"


def test_a_leaderboard_with_an_untuned_column_is_partial(equal: Path) -> None:
    equal.write_text(equal_tuning(results={"local": [result(POINTS, [0.3, 0.6, 0.5], 0.2)]}))
    table = load_table("my/tiny")
    for variant, partial in (("full", True), ("smoke", False)):
        cells = planned_cells(table, variant)  # type: ignore[arg-type]
        done = {
            run_key(table, planned, job): RunRecord({}, planned.method, 0, "seed=0", value=1.0)
            for planned in cells
            for job in planned.jobs
        }
        record = TableRecord(variant, {}, None, [], "", done)  # type: ignore[arg-type]
        assert is_partial(table, cells, record) is partial


def test_values_that_were_chosen_do_not_change_the_runs_of_the_tuning(
    equal: Path, runs: list[dict[str, Any]]
) -> None:
    found = {"local": [result(POINTS, [0.3, 0.2, 0.1], 0.1)]}
    equal.write_text(equal_tuning(results=found))
    tuning = load_tuning("mine")
    (chosen,) = sweep_overrides(tuning, "local", ["local.momentum=0.5"])
    assert not any(override.startswith("local.lr=") for override in chosen)
    assert run_command(["mine"]) == 0
    assert [lr_of(config) for config in runs] == [0.1, 0.2, 0.4] * 2


@pytest.mark.parametrize(("changes", "said"), [
    ({"sweeps": TUNING["sweeps"]}, "column 'momentum' is not tuned"),
    ({"sweeps": {**TUNING["sweeps"], "momentum": [{"over": "local.lr", "points": [0.1, 0.2]}]}},
     "'local' is not tuned as the others"),
    ({"sweeps": {**TUNING["sweeps"], "momentum": [{"over": "local.momentum", "points": POINTS}]}},
     "'momentum' is not tuned as the others"),
    ({"seeds": [0, 7]}, "seeds of the table"),
    ({"extension": 2}, "an extension gives only those columns more points"),
    ({"where": {"stat": "same"}}, "did you mean 'start'"),
])  # fmt: skip
def test_unequal_tuning_of_a_leaderboard_is_refused(
    equal: Path, changes: dict[str, Any], said: str
) -> None:
    equal.write_text(equal_tuning(**changes))
    with pytest.raises(ConfigError, match=said):
        load_table("my/tiny")


@pytest.mark.parametrize(("start", "edge"), [(0.25, False), (0.1, True)])
def test_the_first_sweep_tries_the_value_that_a_later_key_has_without_tuning(
    mine: Path,
    runs: list[dict[str, Any]],
    start: float,
    edge: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first = {"over": "local.momentum", "points": [0.3, 0.6]}
    second = {"over": "local.lr", "points": [0.15, 0.18]}
    overrides = [*TUNING["overrides"], f"local.lr={start}"]
    mine.write_text(sweeps_of(first, second, overrides=overrides))

    assert run_command(["mine"]) == 0
    assert load_tuning("mine").setting("local") == ("local.momentum=0.3", "local.lr=0.18")
    assert ("local.lr=0.18 is at the upper edge" in capfd.readouterr().out) == edge
