"""Tests of ``fedexp-tune`` with ranges: what it runs, chooses, reports and resumes."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optuna
import pytest
from filelock import FileLock
from optuna.samplers._tpe.sampler import _split_trials
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from fedexp.commands import launching
from fedexp.commands.tune import run_command
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running import result_data
from fedexp.storage.files import write_json
from fedexp.storage.identity import code_hash
from fedexp.storage.run_folder import RunFolder
from fedexp.tuning.objective import Objective
from fedexp.tuning.plan import plan_search
from fedexp.tuning.study import TrialRow, rungs_of
from fedexp.tuning.summary import Summary, TestRun, require_best

TINY = ["clients=2", "model.hidden=[4]", "local.steps=1", "engine=serial", "threads=1"]
LR = "local.lr=log(0.01,1)"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Runs:
    """A formula that replaces runs.

    It is best at lr 0.1 and improves with the rounds.
    """

    def __init__(self) -> None:
        self.configs: list[ResolvedConfig] = []
        self.stop_after = 10**6

    def multirun(self, jobs: Sequence[Sequence[str]], overrides: Sequence[str]) -> int:
        path = [one for one in overrides if one.startswith("hydra.searchpath")]
        for job in jobs:
            if len(self.configs) >= self.stop_after:
                return 130
            config = compose([*path, *job])
            self.configs.append(config)
            self.store(config)
        return 0

    def store(self, config: ResolvedConfig) -> None:
        folder, lr = RunFolder.of(config), float(config["local"]["lr"])
        folder.path.mkdir(parents=True, exist_ok=True)
        if lr > 0.5:
            folder.set_status("failed", error="client 1 diverged\n  where: x")
            return
        value = 0.5 - abs(lr - 0.1) + config["rounds"] / 1000 + config["seed"] / 100
        metrics = {"val/global/acc": value, "val/global/loss": -value, "test/global/acc": -lr}
        result = {
            "status": "done",
            "hashes": folder.hashes,
            "metrics": metrics,
            "headline": {"metric": "test/global/acc", "value": -lr},
            "partition": {"data_sha256": "a", "proxy_sha256": None},
        }
        write_json(folder.path / "result.json", result, seal=True)

    @property
    def points(self) -> list[float]:
        return [float(config["local"]["lr"]) for config in self.configs]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(launching, "multirun", made.multirun)
    return made


def summary() -> dict[str, Any]:
    (path,) = Path("outputs/tuning").glob("*/*/result.json")
    return dict(json.loads(path.read_text()))


def test_best_point_is_chosen_on_held_out_data_and_tested_on_other_seeds(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["method=scaffold", LR, "trials=6", "seeds=0,1", "test_seeds=4,5", *TINY]
    assert run_command(command) == 0
    deciding, tests = runs.configs[:-2], runs.configs[-2:]
    assert len(deciding) == 12 and [config["seed"] for config in deciding[:2]] == [0, 1]
    assert {config["eval"]["held_out"] for config in deciding} == {143}
    assert [config["seed"] for config in tests] == [4, 5]
    assert {config["eval"]["held_out"] for config in tests} == {0}

    found = summary()
    best = min(runs.points, key=lambda lr: abs(lr - 0.1))
    assert float(found["best"]["point"]["local.lr"]) == best == float(tests[0]["local"]["lr"])
    assert found["best"]["value"] == pytest.approx(0.5 - abs(best - 0.1) + 0.02 + 0.005)
    assert found["objective"] == "metrics.val/global/acc"
    assert [run["value"] for run in found["test"]["runs"]] == [-best, -best]
    said = capfd.readouterr().out
    again = found["best_command"]
    assert again in said and again.startswith("fedexp -m method=scaffold clients=2")
    assert again.endswith(f"local.lr={best:g} seed=4,5")

    folder = next(Path("outputs/tuning").glob("*/*"))
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert len(rows) == 6 and {row["state"] for row in rows} <= {"done", "failed"}
    assert (folder / "trials.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.rglob("*.pkl")) and (folder / "journal.log").read_text()[0] == "{"


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_interrupted_study_continues_with_the_same_points(
    runs: Runs, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [LR, "trials=12", f"sampler={sampler}", "batch=2", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    whole = runs.points
    assert len({*whole}) >= 12

    Path("again").mkdir()
    monkeypatch.chdir("again")
    runs.configs.clear()
    for stop in (3, 4, 9, 11, 10**6):
        runs.stop_after = stop
        assert run_command(command) == (130 if stop < 100 else 0)
    assert runs.points == whole
    before = summary()
    assert len(before["trials"]) == 12

    # The study gets more trials, and the first ones are not run again.
    count = len(runs.points)
    assert run_command([*command, "trials=13"]) == 0
    assert len(summary()["trials"]) == 13 and len(runs.points) in (count + 1, count + 2)
    assert summary()["trials"][:12] == before["trials"]


def test_study_that_is_interrupted_anywhere_has_the_same_trials(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while Optuna's file is written. A batch is then half begun or half stored."""
    space = [LR, "trainer.mu=log(0.01,1)", "method=fedprox", "rounds=9", "halving=3"]
    command = [*space, "trials=9", "batch=3", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    whole = summary()["trials"]
    assert {trial["state"] for trial in whole} == {"done", "stopped", "failed"}

    Path("again").mkdir()
    monkeypatch.chdir("again")
    append, left = JournalFileBackend.append_logs, iter(())

    def interrupted(backend: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        append(backend, logs)

    monkeypatch.setattr(JournalFileBackend, "append_logs", interrupted)
    codes = []
    for count in (9, 5, 13, 7, 11, 8, 6) * 4:
        left = iter(range(count))
        codes.append(run_command(command))
        if codes[-1] == 0:
            break
    assert len(codes) > 6 and codes[-1] == 0 and {*codes} == {0, 130}
    assert summary()["trials"] == whole


def test_failed_trials_count_and_are_reported(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["local.lr=0.1,0.2,0.9", "sampler=grid", "test_seeds=4", *TINY]) == 0
    trials = summary()["trials"]
    assert [trial["state"] for trial in trials] == ["done", "done", "failed"]
    assert trials[2]["error"] == "client 1 diverged"
    said = capfd.readouterr().out
    assert "2 done, 1 failed" in said and "failed: client 1 diverged" in said
    assert "local.lr=0.1 is at the lower edge of local.lr=0.1,0.2,0.9" in said
    assert summary()["at_edge"]


@pytest.mark.parametrize("objective", ["val/global/acc", "val/global/loss"])
def test_tpe_takes_failed_trials_for_the_worst(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """Trials with lr in [0.05, 0.2] are the best ones after one round, and diverge later.

    The first command ends before it stores a trial. The second one stores all trials
    and samples none.
    """
    whole = runs.store

    def diverges_later(config: ResolvedConfig) -> None:
        whole(config)
        if 0.05 < config["local"]["lr"] < 0.2 and config["rounds"] > 1:
            (RunFolder.of(config).path / "result.json").unlink()
            RunFolder.of(config).set_status("failed", error="client 1 diverged")

    monkeypatch.setattr(runs, "store", diverges_later)
    command = [LR, "trials=12", "halving=3", "rounds=3", "test_seeds=4", "batch=12"]
    command += [f"objective={objective}", *TINY]
    with monkeypatch.context() as patch:
        patch.setattr(optuna.study.Study, "tell", interrupted)
        assert run_command(command) == 130
    run_command(command)
    (table,) = Path("outputs/tuning").glob("*/*/trials.csv")
    states = [row["state"] for row in csv.DictReader(table.open())]
    assert {*states} >= {"failed", "stopped"}
    storage = JournalStorage(JournalFileBackend(str(table.with_name("journal.log"))))
    (study,) = (optuna.load_study(study_name=s, storage=storage) for s in names_in(storage))
    late = [one.number for one in study.trials if states[one.number] == "failed"]
    assert any(study.trials[number].intermediate_values for number in late)
    # The function with which TPE divides the trials into good and bad ones
    good, _ = _split_trials(study, study.trials, len(states) - len(late), True)
    assert {*late}.isdisjoint(one.number for one in good)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def names_in(storage: JournalStorage) -> list[str]:
    return optuna.get_all_study_names(storage)


def test_failure_of_an_interrupted_attempt_is_forgotten(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes after the failure is noted. The next attempt of the run succeeds."""
    whole, command = runs.store, ["local.lr=0.1,0.2", "sampler=grid", "test_seeds=4", *TINY]

    def failing(config: ResolvedConfig) -> None:
        RunFolder.of(config).path.mkdir(parents=True, exist_ok=True)
        RunFolder.of(config).set_status("failed", error="the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "store", failing)
        patch.setattr(optuna.study.Study, "tell", interrupted)
        assert run_command(command) == 130
    monkeypatch.setattr(runs, "store", whole)
    assert run_command(command) == 0
    assert [trial["state"] for trial in summary()["trials"]] == ["done", "done"]


def test_ties_are_named(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """The formula that replaces runs does not depend on the momentum."""
    ranges = ["local.lr=0.1,0.2", "local.momentum=0.0,0.5"]
    assert run_command([*ranges, "sampler=grid", "test_seeds=4", *TINY]) == 0
    found = summary()
    (second,) = [
        trial
        for trial in found["trials"]
        if trial["point"]["local.lr"] == "0.1" and trial != found["best"]
    ]
    first = found["best"]["number"]
    assert first < second["number"]
    text = f"trial {second['number']} has the same value as trial {first}, which came first"
    assert found["ties"] == [text] and f"note:  {text}" in capfd.readouterr().out


def test_a_repeated_point_is_no_tie(runs: Runs) -> None:
    assert run_command(["local.lr=0.1,0.2", "trials=6", "test_seeds=4", *TINY]) == 0
    found = summary()
    best = [trial for trial in found["trials"] if trial["point"]["local.lr"] == "0.1"]
    assert len(best) > 1 and found["ties"] == []


def test_study_without_a_finished_trial_gives_1(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["local.lr=0.8,0.9", "sampler=grid", *TINY]) == 1
    assert "no trial was finished: 2 failed" in capfd.readouterr().err
    assert not list(Path("outputs/tuning").glob("*/*/result.json"))


@pytest.mark.parametrize(("value", "text"), [
    (0.7, "0.6000 ± 0.1414"), (math.nan, "nan ± nan"), (math.inf, "inf ± nan"),
])  # fmt: skip
def test_summary_shows_test_values_that_are_not_finite(value: float, text: str) -> None:
    best = TrialRow(0, {}, "done", 1.0, 1, None)
    tests = (TestRun(0, 0.5), TestRun(1, value))
    objective = Objective("val/acc", "last", True)
    made = Summary("", objective, "", (), (best,), best, (), "acc", tests, ())
    assert made.test_text == f"acc {text} (seeds 0, 1)"


def test_error_without_a_finished_trial_counts_trials_by_state() -> None:
    states: tuple[Literal["stopped", "failed"], ...] = ("stopped", "stopped", "failed")
    rows = [TrialRow(number, {}, state, None, 1, None) for number, state in enumerate(states)]
    with pytest.raises(FedexpError, match="no trial was finished: 1 failed, 2 stopped") as found:
        require_best(None, rows)
    assert "correct the ranges or leave out halving" in str(found.value)
    with pytest.raises(FedexpError, match="no trial was finished: 1 failed") as found:
        require_best(None, rows[2:])
    assert "halving" not in str(found.value)


def test_values_that_do_not_fit_each_other_fail_their_trial() -> None:
    # Each value fits the first value of the other key. Only this is checked beforehand.
    ranges = ["clients=4,2", "clients_per_round=1,3", "sampler=grid", "test_seeds=4", "rounds=1"]
    tiny = [one for one in TINY if not one.startswith("clients=")]
    assert run_command([*ranges, *tiny]) == 0
    (failed,) = [trial for trial in summary()["trials"] if trial["state"] == "failed"]
    assert failed["point"] == {"clients": "2", "clients_per_round": "3"}
    assert "does not fit clients=2" in failed["error"]


def test_halving_trains_the_best_third_for_more_rounds(runs: Runs) -> None:
    lrs = [0.02 * number for number in range(1, 10)]
    space = f"local.lr={','.join(f'{lr:g}' for lr in lrs)}"
    command = [space, "sampler=grid", "halving=3", "rounds=10", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    asked = [(config["rounds"], float(config["local"]["lr"])) for config in runs.configs]
    assert [lr for rounds, lr in asked if rounds == 1] == pytest.approx(lrs)
    assert [lr for rounds, lr in asked if rounds == 3] == pytest.approx([0.08, 0.1, 0.12])
    # These are the best trial and its test run.
    assert asked[-2:] == [(10, 0.1), (10, 0.1)]
    states = [trial["state"] for trial in summary()["trials"]]
    assert states.count("done") == 1 and states.count("stopped") == 8
    assert summary()["best"]["rounds"] == 10


def test_halving_promotes_the_first_of_equal_trials(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(self: Objective, result: dict[str, Any]) -> float:
        return 0.5

    monkeypatch.setattr(Objective, "value", value)
    space = "local.lr=0.1,0.11,0.12,0.13,0.14,0.15,0.16,0.17,0.18"
    command = [space, "sampler=grid", "halving=3", "rounds=10", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    asked = [(config["rounds"], float(config["local"]["lr"])) for config in runs.configs]
    first, second, *last = (
        [lr for rounds, lr in asked if rounds == number] for number in (1, 3, 10)
    )
    assert len(first) == 9 and second == sorted(first)[:3] and last[0][0] == min(first)
    assert [trial["state"] for trial in summary()["trials"]].count("stopped") == 8


def test_stored_trials_of_other_data_are_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["local.lr=0.1,0.2", "sampler=grid", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    for sha256, code in (("a", 0), (None, 0), ("b", 2)):
        monkeypatch.setattr(result_data, "data_content", lambda _, sha256=sha256: [sha256, None])
        assert run_command(command) == code
    assert "was computed on other data" in capsys.readouterr().err


def test_rungs_end_with_the_whole_run() -> None:
    assert rungs_of(20, 3) == (2, 6, 20)
    assert rungs_of(5, 3) == (1, 5)
    assert rungs_of(5, None) == (5,)
    with pytest.raises(ConfigError, match="too short"):
        rungs_of(2, 3)


def test_lower_is_better_for_a_loss(runs: Runs) -> None:
    command = ["local.lr=0.05,0.1,0.2", "sampler=grid", "test_seeds=4", *TINY]
    assert run_command([*command, "objective=val/global/loss"]) == 0
    assert summary()["best"]["point"] == {"local.lr": "0.1"}


def test_held_out_samples_of_the_config_are_used_in_all_runs(runs: Runs) -> None:
    grid = ["local.lr=0.05,0.1", "sampler=grid", "test_seeds=4", *TINY]
    assert run_command([*grid, "eval.held_out=50"]) == 0
    assert [config["eval"]["held_out"] for config in runs.configs] == [50, 50, 50]
    assert run_command([*grid, "partition.val_fraction=0.2"]) == 0
    assert runs.configs[-1]["eval"]["held_out"] == 0


def test_rule_of_the_headline_is_the_rule_of_the_objective() -> None:
    plan = plan_search([LR, "headline.rule=mean_last_10", *TINY])
    assert plan.search.objective.path == "mean_last_10.val/global/acc"
    assert plan_search([LR, *TINY]).search.objective.path == "metrics.val/global/acc"


def test_method_that_uses_the_held_out_samples_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    feddf = ["method=feddf", "aggregator.validate_every=10", "eval.held_out=100", LR]
    assert run_command(feddf) == 2
    assert "uses the held-out samples on the server" in capfd.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize(("space", "says"), [
    (["aggregator.validate_every=null,1", "method=feddf"], "uses the held-out samples"),
    (["stop.target=0.9,null"], "must not depend on a round that test data choose"),
    (["method=fedavg,local"], "measured by different numbers"),
    (["method=local,fedavg"], "measured by different numbers"),
    (["rounds=4,6", "halving=2"], "successive halving sets the rounds"),
    (["local.epochs=log(1,4)", "sampler=tpe"], "logint(LOW,HIGH)"),
])  # fmt: skip
def test_every_value_is_checked_before_the_first_run(
    space: list[str], says: str, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny = [one for one in TINY if not one.startswith("local.steps")]
    command = ["rounds=2", "sampler=grid", "eval.held_out=143", "test_seeds=4", *tiny]
    keys = {one.partition("=")[0] for one in space}
    given = [one for one in command if one.partition("=")[0] not in keys]
    assert run_command([*given, *space]) == 2
    assert says in capfd.readouterr().err and not runs.configs


def test_searched_rounds_are_the_rounds_of_a_trial(runs: Runs) -> None:
    assert run_command(["rounds=1,3", "sampler=grid", "test_seeds=4", *TINY]) == 0
    assert [trial["rounds"] for trial in summary()["trials"]] == [1, 3]
    (table,) = Path("outputs/tuning").glob("*/*/trials.csv")
    assert table.read_text().splitlines()[0] == "trial,rounds,state,value,error"


def test_run_of_another_process_does_not_fail_its_trial(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["local.lr=0.1,0.2", "sampler=grid", "test_seeds=4", *TINY]
    store = runs.store
    held: list[FileLock] = []

    def start(config: ResolvedConfig) -> None:
        """Behave as if another process had begun this run."""
        folder = RunFolder.of(config)
        folder.path.mkdir(parents=True)
        folder.set_status("running")
        held.append(FileLock(folder.path / "lock"))
        held[-1].acquire()

    runs.store = start  # type: ignore[method-assign]
    assert run_command(command) == 1
    assert "another process executes a run of it" in capfd.readouterr().out
    for lock in held:
        lock.release()
    runs.store = store  # type: ignore[method-assign]
    assert run_command(command) == 0
    assert [trial["state"] for trial in summary()["trials"]] == ["done", "done"]


def test_study_of_other_code_or_settings_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(*more: str) -> Path:
        return plan_search([LR, *TINY, *more]).search.folder

    first = folder()
    assert folder("trials=50", "test_seeds=8", "batch=3") == first
    others = {folder(*more) for more in (
        ["rounds=3"], ["seeds=0,1"], ["sampler=random"], ["halving=3"], ["eval.held_out=9"],
        ["objective=val/global/loss"],
    )}  # fmt: skip
    assert len(others | {first}) == 7
    several = folder("method=fedavg,fedprox")
    changed = {"fedprox"}
    whole = code_hash
    monkeypatch.setattr(
        "fedexp.storage.run_folder.code_hash",
        lambda config: "f" * 32 if config["method"] in changed else whole(config),
    )
    assert folder() == first and folder("method=fedavg,fedprox") != several
    changed.add("fedavg")
    assert folder() != first


def test_command_of_the_best_run_finds_the_users_options(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "more" / "method").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /trainer: sgd\n\nmethod: mine\n"
    (tmp_path / "more" / "method" / "mine.yaml").write_text(text)
    path = f"hydra.searchpath=[file://{tmp_path}/more]"
    command = [path, "method=mine", "local.lr=0.1,0.2", "sampler=grid", "test_seeds=4", *TINY]
    assert run_command(command) == 0
    assert shlex.split(summary()["best_command"])[1:3] == [path, "method=mine"]


def test_two_processes_do_not_share_a_study(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    folder = plan_search([LR, *TINY]).search.folder
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"):
        assert run_command([LR, *TINY]) == 2
    assert "another process works on this study" in capfd.readouterr().err


def test_study_continues_after_an_incomplete_line_and_refuses_a_damaged_one(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["method=scaffold", LR, "sampler=random", "seeds=0", *TINY]
    assert run_command([*command, "trials=2"]) == 0
    (path,) = Path("outputs/tuning").glob("*/*/journal.log")
    path.write_bytes(path.read_bytes()[:-20])  # as on a full disk
    assert run_command([*command, "trials=3"]) == 0
    trials = summary()["trials"]
    assert len(trials) == 3 and all(row["state"] != "unfinished" for row in trials)
    complete = path.read_text()
    for line in ("[", "5", "{}", '{"op_cod": 1}'):
        path.write_text(f"{complete}{line}\n")
        capfd.readouterr()
        assert run_command([*command, "trials=3"]) == 2
        message = capfd.readouterr().err
        number = complete.count("\n") + 1
        assert "journal.log is damaged" in message
        assert f"line {number} is not an entry of Optuna" in message


def test_dry_run_writes_nothing(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command([LR, "--dry-run", *TINY]) == 0
    assert "20 trials, sampler tpe" in capfd.readouterr().out
    assert not runs.configs and not Path("outputs").exists()


def test_missing_optuna_is_refused_with_the_extra(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run_command([LR, *TINY]) == 2
    assert "pip install 'fedexp[tune]'" in capfd.readouterr().err


def test_trials_run_in_parallel_and_a_killed_study_continues() -> None:
    """The test trains real runs through joblib and kills the study once."""
    command = [
        sys.executable, "-m", "fedexp.commands.tune", LR, "trials=2", "test_seeds=4", "rounds=2",
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *TINY,
    ]  # fmt: skip
    root = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=root) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("job 0"):
                killed.kill()
                break
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=root)
    assert done.returncode == 0, done.stderr
    assert "trials were begun before" in done.stdout and "2 at a time" in done.stdout
    found = summary()
    assert [trial["state"] for trial in found["trials"]] == ["done"] * 2
    values = [json.loads(path.read_text())["headline"]["value"]
              for path in Path("outputs/runs").glob("*/*/result.json")]  # fmt: skip
    assert len(values) == 3
    assert {run["value"] for run in found["test"]["runs"]} <= {*values}
    # A trial shows the objective, and no number of the test data.
    shown = [
        line for line in done.stdout.splitlines() if line.startswith(("job 1", "done   job 1"))
    ]
    assert any("round 2/2  val/global/acc" in line for line in shown)
    assert not any("test/" in line for line in shown)
