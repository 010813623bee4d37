"""Tests of the options and processes that the benchmarks in scripts share."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import alternate
    import bench_rounds
    import bench_start

    yield alternate, bench_rounds, bench_start
    for name in [name for name in sys.modules if name.startswith(("alternate", "bench_"))]:
        sys.modules.pop(name)


def test_relative_data_folder_becomes_absolute(scripts, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = scripts[0].parser("Test.").parse_args(["--data", "images"])
    assert options.data == str(tmp_path / "images")


def test_relative_checkout_becomes_absolute(scripts, tmp_path, monkeypatch) -> None:
    alternate, bench_rounds, _ = scripts
    (tmp_path / "old" / "scripts").mkdir(parents=True)
    (tmp_path / "old" / "scripts" / "fedexp_rounds.py").touch()
    homes: list[Path] = []

    def fedexp(*_: Any, home: Path = ROOT, device: str) -> dict[str, Any]:
        homes.append(home)
        return {"seconds": [1, 1], "steps": [1, 1], "engine": {"_target_": "a.B"}, "notes": []}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(alternate, "fedexp", fedexp)
    options = ["--against", "old", "--engines", "serial", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", ["bench_rounds.py", "W1", *options])
    bench_rounds.main()
    assert homes == [tmp_path / "old", ROOT]


@pytest.mark.parametrize("wrong", [["--rounds", "1"], ["--against", "missing"]])
def test_wrong_options_of_bench_rounds_are_refused(scripts, tmp_path, monkeypatch, wrong) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_rounds.py", "W1", *wrong])
    with pytest.raises(SystemExit) as stopped:
        scripts[1].main()
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("name", "measuring"),
    [
        ("bench_aggregators", "compare"),
        ("bench_matching", "CASES"),
        ("bench_multiround", "CASES"),
        ("bench_scale", "PARTS"),
    ],
)
def test_interrupted_benchmark_has_written_its_finished_rows(
    scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, measuring: str
) -> None:
    def rows(*_: Any) -> Iterator[str]:
        yield "| first |"
        raise KeyboardInterrupt

    bench, path = importlib.import_module(name), tmp_path / "bench.md"
    monkeypatch.setattr(bench, measuring, rows if measuring == "compare" else {"case": rows})
    monkeypatch.setattr(sys, "argv", [name, "--threads", "1", "--write", str(path)])
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    assert path.read_text().endswith("\n| first |\n")


def test_interrupted_benchmark_of_growth_has_written_its_finished_points(
    scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([[9.0, 1.0, 3.0]] * 2)

    def measured(*_: Any) -> dict[str, Any]:
        try:
            return {"seconds": next(seconds), "steps": [1, 1, 1]}
        except StopIteration:
            raise KeyboardInterrupt from None

    growth, path = importlib.import_module("bench_growth"), tmp_path / "growth.md"
    monkeypatch.setattr(scripts[0], "bare", measured)
    monkeypatch.setattr(scripts[0], "fedexp", measured)
    options = ["--engines", "serial", "--repeats", "1", "--write", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_growth.py", *options])
    with pytest.raises(KeyboardInterrupt):
        growth.main()
    assert path.read_text().endswith("\n| 10 | 159,010 | 2.0000 | 2.0000 |\n")
    stored = json.loads(path.with_suffix(".json").read_text())["seconds"]
    assert stored == {"bare loop": [["clients", 10, 2.0]], "serial": [["clients", 10, 2.0]]}


def test_bench_start_runs_the_checkout_that_its_heading_names(scripts, monkeypatch) -> None:
    variables: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "run", lambda *_, env, **__: variables.append(env))
    scripts[2].help_seconds()
    assert variables[0]["PYTHONPATH"] == str(ROOT)
