"""Tests of what a person sees of a run: progress, final tables, curves."""

from __future__ import annotations

import math
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedexp.tracking.curve import draw_curve
from fedexp.tracking.numbers import number_text
from fedexp.tracking.progress import Progress
from fedexp.tracking.terminal import print_result, print_sweep

ACC = "test/global/acc"


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"round": n, "train/loss": 1 / n, ACC: 1 - 1 / n, "test/global/loss": 2 / n}
        for n in range(1, count + 1)
    ]


# ---------------------------------------------------------------- progress


@pytest.mark.parametrize("count", [1, 7, 20, 500])
def test_plain_lines_are_few_and_hold_the_last_round(
    capsys: pytest.CaptureFixture[str], count: int
) -> None:
    with Progress("title", count) as progress:
        for row in rows(count):
            progress.client(1, 2)
            progress.step(row, ACC, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"round {count}/{count}  {ACC} {1 - 1 / count:.4f}  train/loss")
    assert lines[-1].endswith("eta 0:00")
    assert min(count, 10) <= len(lines) <= 20
    assert len(set(lines)) == len(lines)


def test_plain_lines_of_a_run_that_stops_early_hold_its_last_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("title", 1000, done=100) as progress:
        for row in rows(103)[100:]:
            progress.step(row, ACC, None)
    assert capsys.readouterr().out.splitlines()[-1].startswith("round 103/1000")


def test_long_work_of_the_server_is_told_until_its_step_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedexp.tracking.progress._SERVER_SECONDS", 0.02)
    with Progress("title", 3) as progress:
        progress.client(1, 2)
        time.sleep(0.05)
        assert capsys.readouterr().out == ""
        progress.client(2, 2)
        time.sleep(0.2)
        progress.step(rows(1)[0], ACC, None)
        told = capsys.readouterr().out.splitlines()
        assert len(told) > 2 and set(told[:-1]) == {"round 1/3, server 0:00"}
        time.sleep(0.05)
        assert capsys.readouterr().out == ""


def test_a_round_without_evaluation_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("title", 1) as progress:
        progress.step({"round": 1, "train/loss": math.nan}, ACC, None)
    assert capsys.readouterr().out == "round 1/1  train/loss nan  eta 0:00\n"


def test_the_bar_shows_rounds_clients_and_headline_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with Progress("a=[1,2] seed=0", 1000, done=998) as progress:
        progress.client(99, 100)
        progress.step({"round": 999, ACC: 0.9}, ACC, None)
        progress.note("told in between [b]")
        progress.client(100, 100)
        bar = progress._bar
        columns = [bar.columns[i](bar.tasks[0]) for i in (1, 3, 4)]
    assert [str(column) for column in columns] == [" 999/1000", "client 99/100", f"{ACC} 0.9000"]
    out = capsys.readouterr().out
    assert "a=[1,2] seed=0" in out
    assert "told in between [b]" in out


def test_runs_side_by_side_have_no_bars_but_lines_with_their_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Progress("title", 2, name="job 3") as progress:
        progress.step({"round": 1}, ACC, 0)
        for row in rows(2):
            progress.step(row, ACC, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "job 3: round 1/2, step 1", "job 3: round 1/2", "job 3: round 2/2",
    ]  # fmt: skip


# ---------------------------------------------------------------- tables


def result() -> dict[str, Any]:
    return {
        "status": "done",
        "headline": {"metric": ACC, "rule": "mean_last_10", "value": 0.91234},
        "metrics": {ACC: 0.95},
        "best": {ACC: 0.97},
        "mean_last_10": {ACC: 0.91234},
        "rounds": 20,
        "rounds_to_target": 7,
        "local_steps": 450,
        "seconds": {"train": 1.25, "log": 0.001, "total": 1.5},
        "bytes": {"up": 1_500_000, "down": 999},
        "steps_per_second": 360.0,
        "stacked_share": 0.0,
        "peak_memory": {"ram": 410_000_000},
    }


def test_the_end_of_a_run_in_numbers_with_the_folder_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / ("deep" * 40) / "[x]"
    print_result(result(), folder)
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert lines[-1] == f"folder: {folder}"
    assert f"{ACC} 0.9123 (mean last 10)" in text
    assert "last 0.9500, mean of last 10 0.9123, best (oracle) 0.9700" in text
    assert "20, 450 local steps; target reached in round 7" in text
    assert "1.50 (train 1.25)" in text
    assert "down 999 B, up 1.5 MB" in text
    assert "360 local steps per second of training memory 410 MB at its peak" in text


def test_short_run_prints_no_mean_of_ten_rounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    print_result(result() | {"rounds": 9}, tmp_path)
    out = capsys.readouterr().out
    assert "last 0.9500, best (oracle) 0.9700" in out and "mean of last 10" not in out


def test_file_has_whole_lines_without_spaces_at_their_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    phases = {f"phase_{i}": 1.0 for i in range(9)}
    print_result(result() | {"seconds": {**phases, "total": 9.0}}, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    assert any("phase_0" in line and "phase_8" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.91234, "0.9123"),
        (99_999.0, "99999.0000"),
        (-123_456_789.0, "-1.2346e+08"),
        (450, "450"),
        (12_000_000, "1.2000e+07"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_large_numbers_are_in_scientific_notation(value: float, text: str) -> None:
    assert number_text(value) == text


def test_stacking_gpu_memory_and_a_profile_are_shown_where_there_are_any(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    phases = [
        {"name": "train", "seconds": 1.25, "share": 0.75},
        {"name": "evaluate", "seconds": 0.25, "share": 0.15},
    ]
    ops = [{"name": "aten::mm", "seconds": 0.5, "share": 0.3}]
    profile = {"trace": "/x/trace.json.gz", "phases": phases, "ops": ops}
    more = {"stacked_share": 0.9, "peak_memory": {"ram": 4.1e8, "gpu": 2e9}, "profile": profile}
    print_result(result() | more, tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "90% of them stacked" in text
    assert "410 MB and 2 GB on the GPU at its peak" in text
    assert (
        "train 1.250 75.0% evaluate 0.250 15.0% aten::mm 0.500 30.0% trace: /x/trace.json.gz"
        in text
    )
    # The results of all clients came from the memo
    print_result(result() | {"steps_per_second": None}, tmp_path)
    assert "per second" not in capsys.readouterr().out


def test_a_sweep_names_what_failed_and_how_to_run_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    headline = {"metric": ACC, "rule": "last", "value": 0.5}
    jobs = [
        {
            "overrides": ["seed=0"],
            "status": "done",
            "error": None,
            "headline": headline,
            "folder": "/r/0",
        },
        {
            "overrides": ["seed=1", "x=[a, b]"],
            "status": "failed",
            "error": "NaN",
            "headline": None,
            "folder": "/r/1",
        },
        {
            "overrides": ["seed=2"],
            "status": "failed",
            "error": "NaN",
            "headline": None,
            "folder": "/r/2",
        },
    ]
    print_sweep(jobs)
    out = capsys.readouterr().out
    assert "1 done, 2 failed" in out
    assert out.count("NaN") == 1
    assert "2 failed: NaN" in out
    assert "again: fedexp seed=1 'x=[a, b]'" in out and out.count("x=[a, b]") == 2
    assert "/r/2/error.txt" in out
    assert "0.5000" in out


# ---------------------------------------------------------------- curve


@pytest.mark.parametrize(
    "data",
    [
        rows(1),
        rows(2),
        rows(1000),
        [{"round": 1, "clients": 3}],
        [{"round": 1, "train/loss": 1.0}, {"round": 2, "train/loss": math.inf, ACC: 0.5}],
        [
            {"round": 1, "train/loss": 1e9},
            {"round": 2, "train/loss": 0.0},
            {"round": 3, "train/loss": math.nan},
        ],
        [{"round": 1, "train/loss": 1e308}, {"round": 2, "train/loss": -1.7e308}],
        [{"round": 1, "test/global/loss": 1.7e308}],
        [
            {
                "round": 1,
                "test/local/acc_mean": 0.5,
                "test/local/acc_std": 0.1,
                "test/local/acc_min": 0.2,
                "mine/loss": 1,
            }
        ],
    ],
    ids=[
        "one",
        "two",
        "thousand",
        "nothing measured",
        "unequal",
        "diverged",
        "huge",
        "huge bar",
        "other names",
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_curve_is_a_picture_whatever_was_measured(
    tmp_path: Path, data: list[dict[str, Any]]
) -> None:
    path = tmp_path / "curve.png"
    draw_curve(data, path, "partition.alpha=0.5 $\\frac$ " * 20)
    picture = path.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (990, 418)


def test_the_curve_has_a_students_accuracy_beside_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, list[str]] = {}
    monkeypatch.setattr(
        "fedexp.tracking.curve._lines",
        lambda axes, points, label, axis: drawn.update({label: [*points]}),
    )
    traced = {"traced/student/acc": 0.5, "traced/student/loss": 1.0}
    steps = [
        {"round": 1, "step": 1},
        {"round": 1, "step": 2, **traced},
        {"round": 1, "step": 3, ACC: 0.6, **traced},
    ]
    draw_curve(steps, tmp_path / "curve.png", "title")
    assert drawn == {"score": [ACC, "traced/student/acc"], "loss": ["traced/student/loss"]}
