"""An experiment is built once on the way from the command line to its execution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fedexp
from fedexp.commands import run, runs
from fedexp.running.experiment import Experiment

QUICK = ["rounds=1", "clients=3", "model.hidden=[4]", "limit.train=60", "threads=1"]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of seeds of the built experiments, in the order of building."""
    monkeypatch.chdir(tmp_path)
    seeds: list[int] = []
    check = Experiment._check

    def counted(self: Experiment) -> None:
        seeds.append(self.config.seed)
        check(self)

    monkeypatch.setattr(Experiment, "_check", counted)
    return seeds


def command(*overrides: str) -> Callable[[], object]:
    return lambda: run.run_command([*overrides, *QUICK])


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (command("seed=3"), [3]),
        (command("seed=3", "--dry-run"), [3]),
        (command("-m", "seed=3,5"), [3, 5]),
        (command("-m", "seed=3,5", "model.hidden=[ 4, 6 ]"), [3, 5]),
        (command("-m", "seed=3,5", "--dry-run"), [3, 5]),
        (lambda: fedexp.run(["seed=3", *QUICK]), [3]),
    ],
)
def test_run_builds_each_experiment_once(
    start: Callable[[], object], expected: list[int], built: list[int]
) -> None:
    start()
    assert built == expected


def test_rerun_builds_its_experiment_once(built: list[int]) -> None:
    folder = fedexp.run(["seed=3", *QUICK]).folder
    built.clear()
    assert runs.run_command(["rerun", str(folder)]) == 0
    assert built == [3]
