"""Tests of the check that the frameworks in a benchmark do equal work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
START = [np.zeros((2, 3)), np.zeros(2)]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "frameworks"))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_frameworks

    yield bench_frameworks
    for name in ("bench_frameworks", "bench_rounds", "alternate", "work"):
        sys.modules.pop(name, None)


@pytest.fixture
def bare(bench):
    return bench.Record([9.0, 1.0, 2.0], [60] * 3, [1200] * 3, [np.ones((2, 3)), np.ones(2)])


def test_check_equal_of_rounding_returns_relative_distance(bench, bare) -> None:
    other = replace(bare, weights=[w * (1 + 1e-4) for w in bare.weights])
    assert bench.check_equal(other, bare, START) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [60, 60, 59]}, "steps per round"),
        ({"samples": [1200, 1200, 1190]}, "samples per round"),
        ({"weights": [np.ones((3, 2)), np.ones(2)]}, "shapes"),
        ({"weights": [np.full((2, 3), 1.1), np.ones(2)]}, "final weights"),
        ({"weights": [np.full((2, 3), np.nan), np.ones(2)]}, "final weights"),
    ],
)
def test_check_equal_of_other_work_raises(bench, bare, change, message) -> None:
    with pytest.raises(bench.NotEqualError, match=message):
        bench.check_equal(replace(bare, **change), bare, START)


def test_seconds_per_round_leaves_out_first_round(bare) -> None:
    assert bare.seconds_per_round == 1.5


def test_work_is_read_as_it_was_written(bench, tmp_path) -> None:
    from work import Work

    images, labels = np.zeros((4, 1, 28, 28), np.float32), np.arange(4)
    orders = np.arange(4).reshape(1, 2, 2)
    work = Work("W1", 0.1, 2, 2, 1, ["a", "b"], images, labels, labels, orders, START)
    work.write(tmp_path)
    again = Work.read(tmp_path)

    assert (again.workload, again.lr, again.names) == ("W1", 0.1, ["a", "b"])
    assert again.orders.tolist() == orders.tolist()
    assert [w.shape for w in again.weights] == [(2, 3), (2,)]


@pytest.mark.parametrize("package", ["bare", "fedexp"])
def test_missing_environment_that_every_comparison_needs_stops(
    bench, monkeypatch, tmp_path, package
) -> None:
    def interpreter(name: str, envs: Path) -> Path:
        if name == package:
            raise subprocess.CalledProcessError(1, "pip", stderr="no network")
        return envs / name

    monkeypatch.setattr(bench, "interpreter", interpreter)
    monkeypatch.setattr(sys, "argv", ["bench_frameworks.py", "--envs", str(tmp_path)])
    with pytest.raises(SystemExit, match="no network"):
        bench.main()
