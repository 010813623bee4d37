"""Tests of fedexp-runs: conditions, order, CSV, W&B, tables and reruns."""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy.stats import t

from fedexp.commands.export import as_csv
from fedexp.commands.run import run_command as fedexp
from fedexp.commands.runs import run_command
from fedexp.commands.runs_plot import _file_name
from fedexp.storage.files import read_json, write_json, write_text
from fedexp.storage.selection import text_of
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Comparison, adjusted, compare
from fedexp.tasks.classification import Classification
from fedexp.tracking.logger import Logger
from fedexp.tracking.terminal import VisibleConsole
from tests.commands.test_runs import make
from tests.data.idx import write_mnist

VALUES = {"fedavg": (0.70, 0.72, 0.77), "fedprox": (0.75, 0.74, 0.85), "scaffold": (0.9,)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write runs of three methods at alpha 0.1 and one at 0.5.

    The seeds are 0 to 2, but SCAFFOLD has only seed 0. One run failed, and one is set
    aside.
    """
    for method, values in VALUES.items():
        for seed, value in enumerate(values):
            store(tmp_path, method, seed, value)
    store(tmp_path, "fedavg", 0, 0.9, alpha=0.5)
    make(tmp_path, "failed", name="fedavg-digits-f0000000", config=config("fedavg", 7, 0.1))
    store(tmp_path, "fedavg", 0, 0.1, code="89abcdef.1")
    return tmp_path


def config(method: str, seed: int, alpha: float, **others: Any) -> dict[str, Any]:
    keys = {
        "method": method,
        "seed": seed,
        "seed_data": seed,
        "partition": {"alpha": alpha},
        "local": {"betas": [0.9, 0.5]},
    }
    return (
        keys
        | {"trainer": {"_target_": f"x.{method}"}, "profile": False, "stop": {"target": None}}
        | others
    )


def store(
    root: Path,
    method: str,
    seed: int,
    value: float,
    alpha: float = 0.1,
    code: str = "89abcdef",
    minutes: int = 1,
    **others: Any,
) -> Path:
    name = f"{method}-digits-{method}{seed}{alpha}{len(others)}"
    own = config(method, seed, alpha, **others)
    folder = make(root, "done", name=name, value=value, code=code, minutes=minutes, config=own)
    result = json.loads((folder / "result.json").read_text())
    choices = {"method": method, "dataset": "digits", "partition": "dirichlet"}
    extra = {
        "metrics": {"test/global/acc": value, "test/global/loss": 1 - value},
        "seconds": {"total": 3.0},
    }
    write_json(folder / "result.json", result | {"choices": choices} | extra)
    return folder


def names(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, Any]]:
    capsys.readouterr()
    assert run_command(["list", "--json", "--root", str(root), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    return [(row["method"], row["headline"] and row["headline"]["value"]) for row in rows]


@pytest.mark.parametrize(("conditions", "left"), [
    (["method=scaffold"], 1), (["method=scaffold,fedprox"], 4), (["method!=fedavg"], 4), (["status=failed"], 1),
    (["partition.alpha<0.5", "status=done"], 8), (["partition.alpha<=0.5"], 10), (["partition.alpha>0.10"], 1),
    (["seed=0", "partition=dirichlet"], 5), (["headline>=0.9"], 2), (["test/global/loss<0.2"], 3), (["profile=false"], 10),
    (["stop.target=null"], 10), (["local.betas=[0.9,0.5]"], 10), (["local.betas=[ .90, 5e-1]"], 10),
    (["local.betas=[0.9"], 0), (["headline<1"], 9), (["name>=scaffold"], 1),
    (["profile=False"], 10), (["updated>2020"], 10),
])  # fmt: skip
def test_conditions(
    root: Path, capsys: pytest.CaptureFixture[str], conditions: list[str], left: int
) -> None:
    assert len(names(root, capsys, *conditions)) == left


def test_lists_are_sorted_and_say_how_many_are_left(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = names(root, capsys, "--sort", "headline", "seed<3")
    assert [value for _, value in rows] == [0.9, 0.9, 0.85, 0.77, 0.75, 0.74, 0.72, 0.7, 0.1]
    assert [method for method, _ in names(root, capsys, "--sort", "method", "seed=0,7")] == [
        "fedavg"
    ] * 4 + [
        "fedprox",
        "scaffold",
    ]
    assert names(root, capsys, "--sort", "test/global/acc")[-1] == ("fedavg", None)
    assert text_of(1.0) == text_of(1) and text_of(0.5) == "0.5" and text_of(True) == "true"
    assert run_command(["list", "method=scaffold", "--root", str(root)]) == 0
    assert "1 of 10 runs" in capsys.readouterr().out
    assert run_command(["list", "method=moon", "--root", str(root)]) == 0
    assert "none of 10 runs" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    (["list", "alpha<1"], "did you mean 'partition.alpha'?"),
    (["list", "alfa<1"], "did you mean 'partition.alpha'?"), (["list", "--sort", "headlin"], "did you mean 'headline'?"),
    (["list", "fedavg"], "'fedavg' is not a condition"), (["list", "method==fedavg"], "is not a condition"),
    (["list", "headline>high"], "headline>NUMBER"), (["export", "--wandb", "ofline"], "unknown value of --wandb 'ofline'"),
 (["export", "sed=1"], "did you mean 'seed'?"),
    (["table", "cols=method"], "rows=partition.alpha cols=method"),
    (["table", "row=seed", "cols=method"], "did you mean 'rows'?"),
    (["table", "rows=partition.alpha", "cols=method", "method=moon"], "no finished run"),
    (["table", "rows=method", "cols=partition", "method=fed*"], "expected: method: fedavg, fedprox, scaffold"),
    (["table", "rows=method", "cols=partition", "headline>1"], "expected: headline: 0.1 to 0.9"),
    (["table", "rows=method", "cols=partition", "seed>7.5"], "expected: seed: 0, 1, 2, 7"),
    (["table", "rows=method", "cols=partition", "method=scaffold", "seed=2"], "that meets all conditions"),
    (["table", "rows=method", "cols=partition", "seed=7"], "got:      seed=7: 1 failed"),
    (["table", "rows=partition.alpha", "cols=method", "--aggregate"], "numbers: fedprox in 0.5, scaffold in 0.5"),
    (["plot", "x=round", "seed=7"], "to do:    finish these runs"), (["show", "fedavg"], "fedexp-runs list shows"),
    (["table", "rows=method", "cols=partition", "value=test/global/ac"], "did you mean 'test/global/acc'?"),
    (["table", "rows=method", "cols=partition"], "do:|partition.alpha=0.1), or rows=method,partition.alpha"),
    (["rerun", "f0000000"], "no result to compare"), (["export", "--wandb", "offline", "status=failed"], "no finished run"),
])  # fmt: skip
def test_mistakes_are_told(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run_command([*arguments, "--root", str(root)]) == 2
    told = capsys.readouterr().err
    assert (
        said.rpartition("|")[2] in told and len(told.splitlines()) <= 6 and "Traceback" not in told
    )


def test_exported_is_a_row_a_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command(
            ["export", "--root", str(root), "--out", str(root / "runs.csv"), "method=fedavg"]
        )
        == 0
    )
    rows = list(csv.DictReader(io.StringIO((root / "runs.csv").read_text())))
    assert [row["status"] for row in rows].count("failed") == 1 and len(rows) == 6
    first = next(row for row in rows if row["value"] == "0.72")
    assert (first["metric"], first["seed"], first["config.partition.alpha"]) == (
        "test/global/acc",
        "1",
        "0.1",
    )
    assert first["config.local.betas"] == "[0.9, 0.5]" and float(
        first["metrics.test/global/loss"]
    ) == pytest.approx(0.28)
    assert (
        first["seconds"] == "3.0"
        and first["config.stop.target"] == ""
        and first["config_hash"] == "c" * 32
    )
    capsys.readouterr()
    assert run_command(["export", "--root", str(root), "method=fedavg"]) == 0
    assert capsys.readouterr().out == (root / "runs.csv").read_text()


def test_exported_texts_are_no_formulas_and_numbers_stay_numbers(tmp_path: Path) -> None:
    values = {"a": "x;=1+1", "b": " =1+1", "c": -0.5, "d": "-0.5", "e": None}
    folder = make(tmp_path, "done", config={"method": "fedavg", **values})
    text = as_csv([StoredRun(folder)])
    assert text.rstrip("\n").endswith(',"x;=1+1",\' =1+1,-0.5,-0.5,')
    (row,) = csv.DictReader(io.StringIO(text))
    assert [row[f"config.{key}"] for key in values] == ["x;=1+1", "' =1+1", "-0.5", "-0.5", ""]


def test_a_table_has_means_and_tests_on_common_seeds_alone(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # This run is of older code
    store(root, "fedprox", 1, 0.99, code="00000000", minutes=9)
    assert run_command(["table", "rows=partition.alpha", "cols=method", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()][1:]
    average = VALUES["fedavg"]
    assert [
        "0.1",
        f"{statistics.mean(average):.4f}",
        "±",
        f"{statistics.stdev(average):.4f}",
        "(3)",
    ] == lines[2][:5]
    assert lines[2][-2:] == ["0.9000", "(1)"] and lines[3] == ["0.5", "0.9000", "(1)", "-", "-"]
    differences = [b - a for a, b in zip(average, VALUES["fedprox"], strict=True)]
    statistic = statistics.mean(differences) / (statistics.stdev(differences) / 3**0.5)
    (pair,) = [line for line in out.splitlines() if "fedprox - fedavg" in line]
    assert (
        f"{statistics.mean(differences):+.4f}" in pair
        and f"{2 * t.sf(statistic, 2):.3g}" in pair
        and "0, 1, 2" in pair
    )
    assert [
        line.rsplit("  ", 1)[1].strip() for line in out.splitlines() if "scaffold -" in line
    ] == ["no test: 1 common seed"] * 2
    assert "1 results that other code made earlier" in out and "cells differ also" not in out


def test_aggregates_use_the_rows_in_which_all_columns_have_runs(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, values in {"fedavg": (0.5, 0.6), "fedprox": (0.8, 0.9)}.items():
        for seed, value in enumerate(values):
            store(root, method, seed, value, alpha=0.9)
    chosen = ["rows=partition.alpha", "cols=method", "method=fedavg,fedprox", "--aggregate"]
    assert run_command(["table", *chosen, "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "over 2 rows" in out and "the aggregates leave out 0.5" in out
    assert "cells have different numbers of runs" in out and "higher is better" in out
    for method in ("fedavg", "fedprox"):
        assert f"{method} has no intervals, because its rows have only some seeds in common" in out

    chosen.append("seed<2")
    assert run_command(["table", *chosen, "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "has no intervals" not in out
    rows = [line.split() for line in out.splitlines()]
    # The rank is after three numbers with intervals
    ranks = {row[0]: row[10] for row in rows if len(row) > 10 and row[0].startswith("fed")}
    assert ranks == {"fedprox": "1.00", "fedavg": "2.00"}

    loss = [*chosen, "value=test/global/loss", "--root", str(root)]
    assert run_command(["table", *loss]) == 0
    out = capsys.readouterr().out
    assert "lower is better" in out
    rows = [line.split() for line in out.splitlines()]
    found = {row[0]: row[10] for row in rows if len(row) > 10 and row[0].startswith("fed")}
    assert found == ranks


@pytest.mark.parametrize("metric", ["mse", "nll_worst_10", "error_of_class_12", "ece_std"])
def test_lower_errors_are_better(
    metric: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"test/clients/{metric}"
    for method, number in {"moon": 2.0, "fedavgm": 1.0}.items():
        for alpha in (0.1, 0.9):
            path = store(root, method, 0, number, alpha=alpha) / "result.json"
            result = json.loads(path.read_text())
            write_json(path, result | {"metrics": {name: number}})
    asked = ["rows=partition.alpha", "cols=method", f"value={name}", "--aggregate"]
    assert run_command(["table", *asked, "--root", str(root), "method=moon,fedavgm"]) == 0
    assert "lower is better" in capsys.readouterr().out
    assert not Classification().higher_is_better(name)


@pytest.mark.parametrize("value", ["headline", "seconds"])
def test_direction_follows_from_what_is_shown(
    value: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, number in {"moon": 2.0, "fedavgm": 1.0}.items():
        for alpha in (0.1, 0.9):
            path = store(root, method, 0, number, alpha=alpha) / "result.json"
            result = json.loads(path.read_text())
            headline = {"metric": "test/global/loss", "rule": "last", "value": number}
            write_json(path, result | {"headline": headline, "seconds": {"total": number}})
    asked = ["rows=partition.alpha", "cols=method", f"value={value}", "--aggregate"]
    shown = ["table", *asked, "--root", str(root)]
    assert run_command([*shown, "method=moon,fedavgm"]) == 0
    out = capsys.readouterr().out
    assert "lower is better" in out
    ranks = {row[0]: row[4] for row in map(str.split, out.splitlines()) if len(row) == 7}
    assert ranks == {"fedavgm": "1.00", "moon": "2.00"}

    assert run_command([*shown, "method=moon,fedavgm", "better=higher"]) == 0
    assert "higher is better" in capsys.readouterr().out
    if value == "headline":
        assert run_command([*shown, "method=moon,fedavg"]) == 2
        assert "different directions" in capsys.readouterr().err


def test_better_is_shown_without_aggregates(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["table", "rows=partition.alpha", "cols=method", "--root", str(root)]
    assert run_command(asked) == 0
    assert "is better" not in capsys.readouterr().out
    assert run_command([*asked, "better=lower"]) == 0
    assert "lower is better" in capsys.readouterr().out


def test_a_table_is_written_as_markdown_latex_and_csv(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(root, "a_b|c", 0, 0.25)
    asked = ["table", "rows=partition.alpha", "cols=method", "--root", str(root)]
    for suffix in ("md", "tex", "csv"):
        assert run_command([*asked, "--out", str(tmp_path / "new" / f"runs.{suffix}")]) == 0
    out = capsys.readouterr().out
    markdown = (tmp_path / "new" / "runs.md").read_text().splitlines()
    assert markdown[:2] == [
        r"| partition.alpha | a_b\|c | fedavg | fedprox | scaffold |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    assert r"partition.alpha & a\_b|c & fedavg" in (tmp_path / "new" / "runs.tex").read_text()
    for line in markdown[2:4]:
        for text in line.split(" | ")[1:]:
            assert text.strip(" |") in out

    with (tmp_path / "new" / "runs.csv").open(newline="") as file:
        cells = {(row["partition.alpha"], row["method"]): row for row in csv.DictReader(file)}
    average = cells["0.1", "fedavg"]
    assert float(average["mean"]) == statistics.mean(VALUES["fedavg"])
    assert float(average["sd"]) == statistics.stdev(VALUES["fedavg"])
    assert (average["runs"], average["seeds"]) == ("3", "0, 1, 2")
    assert cells["0.1", "scaffold"]["sd"] == "" and ("0.5", "scaffold") not in cells
    with (tmp_path / "new" / "runs-tests.csv").open(newline="") as file:
        tests = {(row["b"], row["a"]): row for row in csv.DictReader(file)}
    assert float(tests["fedprox", "fedavg"]["difference"]) == pytest.approx(0.05)
    assert not (tmp_path / "new" / "runs-aggregates.csv").exists()


def test_pairs_of_numbers_are_named_with_their_key(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        store(root, "fedavg", seed, 0.8 + 0.1 * seed, alpha=0.9)
        store(root, "fedprox", seed, 0.8, alpha=0.9)
    asked = ["table", "rows=method", "cols=partition.alpha", "seed<2", "partition.alpha!=0.5"]
    assert run_command([*asked, "method!=scaffold", "--aggregate", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.count("partition.alpha=0.9 - partition.alpha=0.1") == 2
    assert out.count("partition.alpha=0.9 over partition.alpha=0.1") == 1


@pytest.mark.parametrize("scale", [1e-6, 1e7])
def test_very_small_and_large_numbers_are_scientific(
    scale: float, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, values in {"moon": (1.0, 2.0), "fedavgm": (4.0, 8.0)}.items():
        for seed, value in enumerate(values):
            store(root, method, seed, value * scale)
    asked = ["table", "rows=partition.alpha", "cols=method", "method=moon,fedavgm"]
    assert run_command([*asked, "--root", str(root)]) == 0
    out = capsys.readouterr().out
    deviation = statistics.stdev((1.0, 2.0)) * scale
    assert f"{1.5 * scale:.4e} ± {deviation:.4e} (2)" in out and f"{-4.5 * scale:+.4e}" in out


@pytest.mark.parametrize("width", [40, 80])
def test_narrow_terminal_cuts_no_number(
    width: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["table", "rows=partition.alpha", "cols=method", "--root", str(root)]
    assert run_command(asked) == 0
    words = {word for word in capsys.readouterr().out.split() if "─" not in word}
    monkeypatch.setattr("fedexp.commands.runs_table.console", lambda: VisibleConsole(width=width))
    assert run_command(asked) == 0
    assert words <= set(capsys.readouterr().out.split())


def test_latex_row_that_begins_with_a_bracket_is_no_argument_of_the_line_break(
    root: Path, tmp_path: Path
) -> None:
    asked = ["table", "rows=local.betas", "cols=partition.alpha", "method=fedavg"]
    assert run_command([*asked, "--root", str(root), "--out", str(tmp_path / "runs.tex")]) == 0
    lines = (tmp_path / "runs.tex").read_text().splitlines()
    assert [line[:11] for line in lines if "0.9,0.5] &" in line] == ["{}[0.9,0.5]"] * 2


def test_column_without_a_group_has_an_empty_cell_in_csv(root: Path, tmp_path: Path) -> None:
    for method in ("fedavg", "fedprox"):
        store(root, method, 0, 0.5, alpha=0.9)
    asked = ["table", "rows=partition.alpha", "cols=method", "method=fedavg,fedprox", "seed=0"]
    out = tmp_path / "runs.csv"
    assert run_command([*asked, "--aggregate", "--root", str(root), "--out", str(out)]) == 0
    with (tmp_path / "runs-aggregates.csv").open(newline="") as file:
        assert [row["groups"] for row in csv.DictReader(file)] == ["", ""]


def test_cells_that_differ_in_more_than_rows_and_columns_are_noted_or_refused(
    root: Path, capsys
) -> None:
    for seed in (0, 1):
        store(root, "moon", seed, 0.5, rounds=9)
    arguments = ["table", "rows=partition.alpha", "cols=method", "--root", str(root)]
    assert run_command(arguments) == 0
    assert "note: cells differ also in rounds" in capsys.readouterr().out
    store(root, "moon", 1, 0.6, rounds=10, note=1)
    assert run_command(arguments) == 2
    told = capsys.readouterr().err
    assert "partition.alpha=0.1 method=moon" in told and "rounds: 9, 10" in told


def test_verdicts_say_no_more_than_their_pairs() -> None:
    a, far = (
        {(s, s): s / 10 for s in range(4)},
        {(s, s): s / 10 + 1 + s % 2 / 100 for s in range(4)},
    )
    assert (
        compare("a", "b", a, far).verdict == "b higher"
        and compare("b", "a", far, a).verdict == "a lower"
    )
    assert compare("a", "b", a, {(9, 9): 1.0}).verdict == "no test: no common seeds"
    # Runs with different data seeds do not form a pair
    assert compare("a", "b", a, {(1, 2): 1.0, (1, 1): 0.5}).verdict == "no test: 1 common seed"
    assert compare("a", "b", a, a).verdict == "no test: the differences do not vary"
    # The differences of one sample of 360 are equal, but not in floating-point numbers
    left = {(seed,): right / 360 for seed, right in enumerate((280, 286))}
    right = {(seed,): right / 360 for seed, right in enumerate((281, 287))}
    assert len({right[seeds] - left[seeds] for seeds in left}) == 2
    assert compare("a", "b", left, right).verdict == "no test: the differences do not vary"
    assert (
        compare("a", "b", a, {**a, (0, 0): float("nan")}).verdict
        == "no test: a value is not finite"
    )
    p = (0.03, 0.01, None, 0.04)
    found = adjusted([Comparison("a", "b", ((0,), (1,)), 1.0, (0.5, 1.5), each) for each in p])
    assert [c.p for c in found] == [
        pytest.approx(0.06),
        pytest.approx(0.03),
        None,
        pytest.approx(0.06),
    ]


def test_rerun_has_the_same_bits_or_says_where_they_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert fedexp(["rounds=2", "clients=3", "model.hidden=[4]", "limit.train=200"]) == 0
    (folder,) = Path().glob("outputs/runs/*/*")
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(
        yaml.safe_dump(stored | {"logger": {"_target_": "fedexp.tracking.wandb.Wandb"}})
    )
    result = json.loads((folder / "result.json").read_text())
    del result["seal"], result["config_sha256"]
    write_json(folder / "result.json", result, seal=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run_command(["rerun", "fedavg-digits"]) == 0
    assert "bit-identical: metrics and models" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = Path("outputs/reruns", *folder.parts[1:])
    assert (
        (again / "result.json").exists()
        and not (again / "wandb").exists()
        and not Path("outputs/reruns/memo").exists()
    )
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    other = json.loads(rows[1]) | {"test/global/acc": 0.123}
    write_text(folder / "metrics.jsonl", "\n".join([rows[0], json.dumps(other), ""]))
    result = json.loads((folder / "result.json").read_text())
    from fedexp.storage.files import file_sha256

    changed = {
        "metrics_sha256": file_sha256(folder / "metrics.jsonl"),
        "numerics": result["numerics"] | {"threads": 99},
    }
    del result["seal"]
    write_json(folder / "result.json", result | changed, seal=True)
    assert run_command(["rerun", "fedavg-digits"]) == 1
    told = capsys.readouterr().out
    assert (
        "not bit-identical" in told
        and "metrics from round 2 on: test/global/acc 0.123" in told
        and "threads: 99" in told
    )
    assert again.with_name(f"{again.name}.1").is_dir()
    kept = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert run_command(["rerun", str(again)]) == 2 and "itself a rerun" in capsys.readouterr().err
    assert kept == {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    rows = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(rows[:-9])
    monkeypatch.setattr("fedexp.commands.launching.execute_job", None)  # nothing may be trained
    assert run_command(["rerun", "outputs/" + "/".join(folder.parts[1:])]) == 2
    assert "metrics.jsonl is damaged" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text(rows)
    stored["contents"] = {"partition.path": "0" * 64}
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    assert run_command(["rerun", "outputs/" + "/".join(folder.parts[1:])]) == 2
    assert "has changed or is gone" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["chosen", "not chosen"])
def test_interrupted_rerun_of_another_run_is_moved_aside(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    assert fedexp(["rounds=1", "clients=3", "model.hidden=[4]", "engine=serial", "threads=1"]) == 0
    (folder,) = Path().glob("outputs/runs/*/*")
    again = Path("outputs/reruns", *folder.parts[1:])
    numerics = read_json(folder / "numerics.json")
    if engine == "not chosen":
        write_json(folder / "numerics.json", numerics | {"engine": {}, "threads": 2}, seal=True)
    with monkeypatch.context() as patch:
        patch.setattr("fedexp.running.execute.save_outcome", stop)
        for _ in range(2):
            assert run_command(["rerun", "fedavg-digits"]) == 130
    assert not again.with_name(f"{again.name}.1").exists()

    write_json(folder / "numerics.json", numerics | {"deterministic": True}, seal=True)
    run_command(["rerun", "fedavg-digits"])
    assert read_json(again / "numerics.json")["deterministic"]
    assert again.with_name(f"{again.name}.1").is_dir()

    (folder / "numerics.json").write_text("[1, 2]")
    assert run_command(["rerun", "fedavg-digits"]) == 2


def test_run_with_a_secret_in_its_data_root_stores_it_nowhere_and_is_rerun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setenv("TOKEN", "s3cr3t")
    write_mnist(tmp_path / "s3cr3t")
    quick = ["rounds=1", "clients=2", "dataset=mnist", "model=mlp", "model.hidden=[4]"]
    assert fedexp([*quick, "partition=iid", "data_root=${oc.env:TOKEN}"]) == 0
    assert run_command(["rerun", "fedavg-mnist"]) == 0
    files = [path for path in Path("outputs").rglob("*") if path.is_file()]
    assert len(files) > 20 and not any(b"s3cr3t" in path.read_bytes() for path in files)
    assert "s3cr3t" not in capsys.readouterr().out
    configs = [yaml.safe_load(path.read_text()) for path in files if path.name == "config.yaml"]
    assert [config["data_root"] for config in configs] == ["${oc.env:TOKEN}"] * 2


def test_runs_go_to_wandb_from_their_files(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    fed: list[tuple[Any, ...]] = []

    class Fake(Logger):
        def __init__(self, **options: Any) -> None:
            fed.append(("made", options))

        def log(self, row: dict[str, Any]) -> None:
            raise AssertionError("rows go with open")

        def open(self, run: Any, history: list[dict[str, Any]]) -> None:
            fed.append(("open", run.id, run.group, run.name, run.config["seed"], len(history)))

        def close(self, status: str, result: Any) -> None:
            fed.append(("close", status))

        def check(self) -> None:
            fed.append(("check",))

    monkeypatch.setattr("fedexp.core.build.build", lambda kind, node, where: Fake(**node))
    write_text(
        root / "runs" / "scaffold-digits-scaffold00.10" / "89abcdef" / "metrics.jsonl",
        '{"round": 1, "step": 1}\n',
    )
    assert (
        run_command(
            ["export", "--wandb", "offline", "--group", "g", "method=scaffold", "--root", str(root)]
        )
        == 0
    )
    assert fed[0][1]["mode"] == "offline" and fed[1] == ("check",)
    assert fed[3:] == [
        ("open", "c" * 16 + "d" * 8, "g", "method=scaffold seed=0", 0, 1),
        ("close", "done"),
    ]
    out = capsys.readouterr().out
    assert "1 of 1 runs sent" in out and "upload each with" in out
    monkeypatch.setattr(Fake, "timeout", 0.05)
    monkeypatch.setattr(Fake, "open", lambda *_: time.sleep(0.5))
    assert (
        run_command(["export", "--wandb", "offline", "method=scaffold", "--root", str(root)]) == 1
    )
    out = capsys.readouterr().out
    assert "open took longer than 0.05 s" in out and "0 of 1 runs sent, 1 failed" in out
    assert "upload each with" not in out  # nothing was written


def test_column_of_a_table_names_parts_that_its_preset_does_not_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, aggregator, value in (("fedavg", "mean", 0.7), ("fedavg", "median", 0.8)):
        for seed in (0, 1):
            folder = store(
                tmp_path, method, seed, value, **({} if aggregator == "mean" else {"other": 1})
            )
            result = json.loads((folder / "result.json").read_text())
            result["choices"] |= {"aggregator": aggregator, "trainer": "sgd"}
            write_json(folder / "result.json", result, seal=True)
    arguments = ["table", "rows=partition.alpha", "cols=method", "--root", str(tmp_path)]
    assert run_command(arguments) == 0
    header = capsys.readouterr().out.splitlines()[1]
    assert header.split()[1:] == ["fedavg", "fedavg", "aggregator=median"]


def test_pictures_of_other_conditions_have_other_files() -> None:
    signs = ["=", "!=", "<", "<=", ">", ">="]
    names = [_file_name(f"acc over round by method seed{sign}1") for sign in signs]
    assert len(set(names)) == len(signs) and all(name.isascii() for name in names)
    long = [_file_name("x" * 200 + ending) for ending in "ab"]
    assert long[0] != long[1] and max(map(len, long)) <= 120
