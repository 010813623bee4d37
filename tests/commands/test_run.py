"""Tests of the command line in this process.

Mistakes get a clear message before anything starts, and stored runs are found again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedexp import __version__
from fedexp.commands import data, launching, runs, table
from fedexp.commands.run import _print_split_note, run_command
from fedexp.config.compose import compose
from fedexp.tables.report.layout import duration
from fedexp.tracking.curve import draw_curve

QUICK = ["rounds=2", "clients=4", "model.hidden=[4]"]
README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


def results() -> list[dict]:
    return [
        json.loads(path.read_text()) for path in sorted(Path().glob("outputs/runs/*/*/result.json"))
    ]


@pytest.mark.parametrize(("arguments", "said"), [
    (["sed=1"], ["unknown key 'sed'", "did you mean 'seed'?"]),
    (["local.batchsize=1"], ["did you mean 'local.batch_size'?"]),
    (["+local.batchsize=1"], ["did you mean 'batch_size'?"]),
    (["method=feddf", "aggregator.tempreature=2"], ["did you mean 'aggregator.temperature'?"]),
    (["method@x=fedavg"], ["'method@x' is not part of an experiment", "write method=fedavg"]),
    (["method=feddf", "method@x=fedavg"], ["where:    method@x=fedavg", "write method=fedavg"]),
    (["method=fedavgg"], ["unknown method 'fedavgg'", "did you mean 'fedavg'?", "scaffold"]),
    (["partition=dirichlt"], ["did you mean 'dirichlet'?"]),
    (["rounds=abc"], ["'rounds'", "an integer", "'abc'"]),
    (["trainer=fedprox", "trainer.mu=abc"], ["'trainer.mu'", "a number"]),
    (["trainer=fedprox", "trainer.mu=-1"], ["mu must not be negative"]),
    (["local.optimizer=sdg"], ["did you mean 'sgd'?"]),
    (["clients_per_round=20"], ["clients_per_round=20", "1 to 10"]),
    (["clients_per_round=1.5"], ["not a fraction"]),
    (["method=scaffold", "local.momentum=0.9"], ["diverges", "local.momentum", "trainer.correction=step"]),
    (["method=scaffold", "local.optimizer=adam"], ["needs SGD"]),
    (["method=local", "trainer=scaffold"], ["does not average"]),
    (["headline.rule=best_on_val"], ["partition.val_fraction=0.1"]),
    (["dataset=mnist", "data_root=nowhere"], ["train-images-idx3-ubyte", "FEDEXP_DATA", "dataset.download=true"]),
    (["model=lenet"], ["too small"]),
    (["+model.widths=[3]"], ["unknown key 'widths'", "hidden"]),
    (["partition.alpha=0"], ["alpha"]),
    (["local.epochs=null"], ["local.epochs or local.steps"]),
    (["rounds=[1"], ["is not an override"]),
    (["rounds"], ["is not an override"]),
    (["device=tpu9"], ["device 'tpu9'"]),
    (["dtype=float16"], ["float32 | float64"]),
    (["--config-dir", "x"], ["unknown flag"]),
    (["trainer._target_=os.system"], ["no class 'system'"]),
    (["trainer._target_=pathlib.Path"], ["is not a Trainer"]),
    (["proxy.source=train"], ["proxy.size"]),
    (["task=cvae"], ["set model=cvae"]),
    (["partition=natural"], ["does not name the owners", "femnist"]),
    (["model=resnet18_features"], ["model.pretrained=", "model.random_features=true"]),
    (["checkpoint.every=soon"], ["checkpoint.every"]),
    (["state.memory_gb=-1"], ["state.memory_gb"]),
    (["headline.metric=test/global/ac"], ["did you mean 'test/global/acc'?"]),
    (["stop.metric=test/local/acc_mean"], ["is not measured here", "test/global/acc"]),
    (["stop.metric=val/global/acc"], ["set eval.held_out or partition.val_fraction"]),
    (["method=local", "headline.metric=test/global/acc"], ["test/local/acc_mean"]),
    (["-m", "seed=0,1", "rounds=2,x"], ["job 1", "'rounds'"]),
    (["-m", "method=fedavg,scaffold", "local.momentum=0,0.9"], ["job 3", "method=scaffold local.momentum=0.9"]),
    (["partition=shards", "partition.max_seconds=5"], ["belongs to partition=dirichlet|", "has partition.shards"]),
    (["trainer.corection=step"], ["'trainer.correction' belongs to trainer=scaffold"]),
    (["trainer=fedprox", "trainer.mux=1"], ["did you mean 'trainer.mu'?"]),
    (["-m", "trainer=fedprox", "trainer.mux=1,2"], ["job 0", "did you mean 'trainer.mu'?"]),
    (["-m", "method=fedavg,scaffold", "trainer.correction=step"], ["job 0 (method=fedavg", "belongs to trainer=scaffold"]),
    (["local.learning_rate=1"], ["did you mean 'local.lr'?"]),
    (["+local.learning_rate=1"], ["did you mean 'lr'?"]),
    (["trainer.lr=1"], ["did you mean 'local.lr'?"]),
    (["local.foo=1"], ["use one of: local.batch_size"]),
    (["local.lr.x=1"], ["remove '.x'"]),
    (["+seed=1"], ["'seed' exists already", "without '+': seed=1"]),
    (["~seed=7"], ["leave the value out, ~seed"]),
    (["seed_data=${sede}"], ["where:    seed_data", "got:      ${sede}", "did you mean 'seed'?"]),
    (["logger=[wandb,tensorboard]"], ["one logger", "-m logger=wandb,tensorboard"]),
    (["-m", "seed=0,1", "hydra.launcher.n_jobs=0"], ["hydra.launcher.n_jobs", "hydra/launcher=joblib"]),
    (["-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], ["hydra.launcher.n_jobs", "-1"]),
    (["-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=x"], ["hydra.launcher.n_jobs=x", "Integer"]),
    (["model=resnet18_bn_cifar", "model.width=4", "local.batch_size=1"], ["BatchNorm", "local.batch_size"]),
    (["-m", "seed=0,1", "partition=shards", "partition.shards=144"], ["job 0 (seed=0", "1440 shards", "at most 143"]),
    (["-m", "seed=0", "partition.min_size=10,144"], ["job 1 (seed=0 partition.min_size=144)", "at least 1440 samples"]),
    (["-m", "clients=5,40", "partition.min_size=30", "partition.max_draws=2"], ["job 1 (clients=40", "attempts: 2"]),
    (["--cfg", "job", "seed_data=${sede}"], ["did you mean 'seed'?"]),
    (["output_root=null"], ["'output_root' has the wrong type"]),
    (["output_root={a:1}"], ["'output_root' has the wrong type"]),
    (["proxy=null"], ["'proxy' has the wrong type"]),
    (["architectures=null"], ["'architectures' has the wrong type"]),
    (["architectures.server=mlp", "architectures.models=5"], ["'architectures.models' has the wrong type"]),
    (["output_root='~no_such_user/x'"], ["the home folder in 'output_root' is not known", "without ~"]),
    (["data_root='~no_such_user/x'"], ["the home folder in 'data_root' is not known"]),
    (["client_models.path='~no_such_user/x'"], ["the home folder in 'client_models.path' is not known"]),
    (["partition=file", "partition.path='~no_such_user/x'"], ["the home folder in 'partition.path' is not known"]),
    (["architectures.clients='~no_such_user/x'"], ["the home folder in 'architectures.clients' is not known"]),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], said: list[str], capsys
) -> None:
    assert run_command([*arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told
    for words in said:
        assert words in told, told
    assert not Path("outputs").exists()


def test_a_run_is_found_again_and_leaves_its_records(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedexp.running.execute.draw_curve", draw_curve)
    assert run_command(QUICK) == 0
    folder = next(Path().glob("outputs/runs/*/*"))
    assert folder.parent.name.startswith("fedavg-digits-")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.yaml", "environment.json", "partition.safetensors", "metrics.jsonl", "timing.jsonl", "result.json",
        "status.json", "model.safetensors", "curve.png", "checkpoint", "numerics.json", "data.json",
    }  # fmt: skip
    # Sources are stored only if the run uses code of the user
    assert "sources.json" not in names and not Path("outputs/sources").exists()
    (result,) = results()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert result["headline"] == {
        "metric": "test/global/acc",
        "rule": "last",
        "value": rows[-1]["test/global/acc"],
    }
    assert result["local_steps"] == sum(row["local_steps"] for row in rows)
    parameters = 64 * 4 + 4 + 4 * 10 + 10
    assert result["bytes"] == {"up": 2 * 4 * parameters * 4, "down": 2 * 4 * parameters * 4}
    assert result["oracle/test/global/acc"] == max(row["test/global/acc"] for row in rows)
    before = (folder / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run_command([*QUICK, "device=cpu"]) == 0
    assert "already done" in capsys.readouterr().out
    assert (folder / "result.json").stat().st_mtime_ns == before


def test_a_bare_command_runs_the_defaults() -> None:
    assert run_command([]) == 0
    (result,) = results()
    assert (result["method"], result["rounds"]) == ("fedavg", 20)


def test_unusable_output_root_is_told(capsys) -> None:
    Path("taken").write_text("a file")
    assert run_command([*QUICK, "output_root=taken"]) == 2
    told = capsys.readouterr().err
    assert "output_root" in told and "Traceback" not in told


def test_unusable_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "auto")
    assert run_command(QUICK) == 2
    told = capsys.readouterr().err
    assert "where:    OMP_NUM_THREADS" in told and "set threads=N" in told
    assert not Path("outputs").exists()
    assert run_command([*QUICK, "threads=1"]) == 0


@pytest.mark.parametrize(("reuse", "condition"), [("true", ""), ("false", " without reuse=false")])
def test_interrupted_run_says_how_it_is_resumed(
    reuse: str, condition: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedexp.running.execute.save_outcome", stop)
    assert run_command([*QUICK, f"reuse={reuse}"]) == 130
    assert f"the same command{condition} resumes this run" in capsys.readouterr().err


def test_sweep_whose_folder_cannot_be_made_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """This happens on a read-only file system, also for root."""
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **more: Any) -> None:
        if "sweeps" in path.parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert run_command(["-m", "seed=0,1", *QUICK]) == 1
    told = capsys.readouterr()
    assert "error: the work cannot go on: Read-only file system" in told.err
    assert "Traceback" not in told.err and "use another place" in told.err


def test_deeply_nested_override_is_refused(capsys) -> None:
    assert run_command([*QUICK, f"model.hidden={'[' * 900}{']' * 900}"]) == 1
    told = capsys.readouterr().err
    assert "nested too deeply" in told and "Traceback" not in told


def test_reuse_false_runs_afresh_and_keeps_the_old() -> None:
    assert run_command(QUICK) == run_command([*QUICK, "reuse=false"]) == 0
    old, new = sorted(
        Path().glob("outputs/runs/*/*/metrics.jsonl"), key=lambda p: len(p.parent.name)
    )[::-1]
    assert old.read_bytes() == new.read_bytes()
    assert old.parent.name == f"{new.parent.name}.1"


def test_sweep_resumes_where_something_is_missing(capsys) -> None:
    assert run_command(["-m", "method=fedavg,fedprox", *QUICK]) == 0
    assert (
        "sweep" in (out := capsys.readouterr().out)
        and "0 done, 2 to run" in out
        and "2 done" in out
    )
    assert len(results()) == 2
    assert run_command(["-m", "method=fedavg,fedprox", "seed=0,1", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "4 jobs - 2 done, 2 to run" in out and out.count("already done") == 2
    assert not list(Path("outputs/sweeps").rglob("0"))


def test_different_weights_of_a_sweep_are_noted_before_it_runs(capsys) -> None:
    sweep = ["-m", "method=fedavg,median,scaffold", "rounds=1", "local.steps=1"]
    assert run_command(sweep) == 0
    before = capsys.readouterr().out.partition("job 0")[0]
    assert "differently: samples (fedavg, median), uniform (scaffold)." in before
    assert "aggregator.weights=uniform makes them alike" in before

    run_command(["--dry-run", *sweep])
    assert "note: the methods weigh" in capsys.readouterr().out
    for alike in ("aggregator.weights=uniform,samples", "method=fedavg,median"):
        run_command(["--dry-run", *sweep, alike])
        assert "note:" not in capsys.readouterr().out


def test_different_server_data_of_a_sweep_are_noted(capsys) -> None:
    sweep = ["--dry-run", "-m", "method=fedavg,feddf,fedbe", "aggregator.weights=uniform"]
    assert run_command(sweep) == 0
    told = capsys.readouterr().out
    assert "different data: none (fedavg), 0.02 (feddf), 0.2 (fedbe)." in told
    assert "proxy.source=train proxy.size=0.2 makes them alike" in told
    for alike in (
        ["proxy.source=train", "proxy.size=0.2"],
        ["method=fedavg,median"],
        ["method=feddf,fedbe", "proxy.size=0.1,0.2"],
    ):
        assert run_command([*sweep, *alike]) == 0
        assert "note:" not in capsys.readouterr().out

    # A key of `proxy` that does not make the splits alike
    assert run_command([*sweep, "proxy.labelled=true"]) == 0
    assert "different data: none (fedavg), 0.02 (feddf), 0.2 (fedbe)." in capsys.readouterr().out


def test_note_on_server_data_removes_the_servers_own_data_set(capsys) -> None:
    sweep = (["method=feddf_matched", "dataset=mnist"], ["method=feddf", "dataset=mnist"])
    _print_split_note([compose(job) for job in sweep])
    advice = "proxy.dataset=null proxy.source=train proxy.size=0.02"
    told = capsys.readouterr().out
    assert f"none (feddf_matched), 0.02 (feddf). {advice} makes them alike" in told
    _print_split_note([compose([*job, *advice.split()]) for job in sweep])
    assert capsys.readouterr().out == ""


def test_a_sweep_with_nothing_to_do_composes_each_job_once(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ["-m", "seed=0,1", *QUICK]
    assert run_command(sweep) == 0
    (folder, _) = folders = sorted(
        path.parent for path in Path().glob("outputs/runs/*/*/result.json")
    )
    capsys.readouterr()
    monkeypatch.setattr(
        launching, "run_hydra", lambda arguments: pytest.fail("Hydra composed the jobs again")
    )
    assert run_command(sweep) == 0
    assert capsys.readouterr().out.count("already done") == len(folders)
    # The folder looks like that of a killed process. There is no result, the status is
    # still "running" and no process holds the lock
    status = json.loads((folder / "status.json").read_text())
    (folder / "result.json").unlink()
    (folder / "status.json").write_text(json.dumps(status | {"status": "running"}))
    monkeypatch.setattr(launching, "run_hydra", lambda arguments: 1)
    assert run_command(sweep) == 1
    out = capsys.readouterr().out
    assert "1 done, 1 failed" in out and "its process died" in out


def test_ctrl_c_while_jobs_are_composed_ends_quietly(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(jobs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedexp.running.check.check_jobs", interrupt)
    assert run_command(QUICK) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_failing_job_does_not_take_the_sweep_with_it(capsys) -> None:
    sweep = ["-m", "local.lr=1e30,0.1", "memo.enabled=false", *QUICK]
    assert run_command(sweep) == 1
    captured = capsys.readouterr()
    assert "1 done, 1 failed" in captured.out
    assert "client 0 returned NaN or infinity in hidden.0.weight" in captured.err
    assert (
        "training samples" in captured.err
        and "lr 1e+30" in captured.err
        and "Traceback" not in captured.err
    )
    # Only fedexp reports the error, and Hydra's message is not printed
    assert "Error executing" not in captured.err and "HYDRA_FULL_ERROR" not in captured.err
    failed = next(p.parent for p in Path().glob("outputs/runs/*/*/error.txt"))
    assert json.loads((failed / "status.json").read_text())["status"] == "failed"
    assert "Traceback" in (failed / "error.txt").read_text()
    assert run_command(sweep) == 1
    assert "2 jobs - 1 done, 1 to run" in capsys.readouterr().out


def test_nonfinite_clients_can_be_skipped() -> None:
    assert run_command([*QUICK, "local.lr=1e30", "on_nonfinite=skip_client"]) == 0
    assert results()[0]["metrics"]["skipped_clients"] == 4


def test_rounds_to_target_stops_early() -> None:
    run = ["rounds=30", "clients=4", "local.lr=0.2"]
    assert run_command([*run, "stop.target=0.7"]) == 0
    (result,) = results()
    assert result["rounds"] == result["rounds_to_target"] < 30
    assert result["headline"]["value"] >= 0.7


def test_headline_rules() -> None:
    base = ["rounds=12", "clients=4", "eval.every=2", "partition.val_fraction=0.2"]
    for rule in ("last", "mean_last_10", "best_on_val"):
        assert run_command([*base, f"headline.rule={rule}"]) == 0
    by_rule = {r["headline"]["rule"]: r for r in results()}
    rows = [
        json.loads(x)
        for x in next(Path().glob("outputs/runs/*/*/metrics.jsonl")).read_text().splitlines()
    ]
    seen = [row for row in rows if "test/global/acc" in row]
    assert [row["round"] for row in seen] == [2, 4, 6, 8, 10, 12]
    assert by_rule["last"]["headline"]["value"] == seen[-1]["test/global/acc"]
    mean = sum(row["test/global/acc"] for row in seen) / 6
    assert by_rule["mean_last_10"]["headline"]["value"] == pytest.approx(mean)
    best = max(seen, key=lambda row: row["val/global/acc"])
    assert by_rule["best_on_val"]["headline"]["value"] == best["test/global/acc"]


def test_smoke_shrinks_anything() -> None:
    assert (
        run_command(
            [
                "debug=smoke",
                "clients=100",
                "clients_per_round=10",
                "rounds=500",
                "model=resnet18_gn",
                "model.width=8",
            ]
        )
        == 0
    )
    (result,) = results()
    assert (
        result["rounds"] == 2
        and result["partition"]["clients"] == 4
        and result["local_steps"] == 16
    )


def test_same_seed_gives_every_method_the_same_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedexp.core import env

    drawn: dict[str, list] = {}
    original = env.Sampling.draw

    for method in ("fedavg", "scaffold", "fedadam", "local"):
        record = drawn.setdefault(method, [])

        def draw(self, N, seed, round, record=record):
            chosen = original(self, N, seed, round)
            record.append((round, chosen))
            return chosen

        monkeypatch.setattr(env.Sampling, "draw", draw)
        assert (
            run_command(
                [f"method={method}", "clients_per_round=3", "memo.enabled=false", "rounds=3"]
            )
            == 0
        )
    assert len({json.dumps(record) for record in drawn.values()}) == 1
    assert len({tuple(chosen) for _, chosen in drawn["fedavg"]}) > 1


def test_memo_trains_first_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedexp.engines import serial

    trained: list[int] = []
    original = serial.train_client

    def watched(job, *rest):
        # The memory probe sets max_steps and does not count
        if job.local_training.max_steps is None:
            trained.append(job.client)
        return original(job, *rest)

    monkeypatch.setattr(serial, "train_client", watched)
    for method in ("local", "ensemble", "fedavg", "fednova", "fedexp"):
        assert run_command([f"method={method}", "rounds=1", "clients=4", "engine=serial"]) == 0
    assert trained == [0, 1, 2, 3]
    with_memo = {r["method"]: r["headline"]["value"] for r in results()}
    for method in ("local", "fedavg"):
        assert (
            run_command(
                [f"method={method}", "rounds=1", "clients=4", "reuse=false", "engine=serial"]
            )
            == 0
        )
    assert {r["method"]: r["headline"]["value"] for r in results()} == with_memo


def test_own_conf_with_a_builtins_name_is_refused(capsys) -> None:
    Path("conf/method").mkdir(parents=True)
    Path("conf/method/fedavg.yaml").write_text("# mine\n")
    assert run_command([]) == 2
    assert "exists twice" in capsys.readouterr().err


def test_readme_example_of_an_own_method_runs(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The test uses the README's code, YAML and command without changes.

    With power 1, the method must equal FedAvg to the bit.
    """
    text = README.read_text()
    files = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text, flags=re.S))
    command = re.search(r"^fedexp (-m aggregator=power_mean.*)$", text, flags=re.M)[1].split()
    for name, content in files.items():
        assert len(content.splitlines()) < 30
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert run_command([*command, "rounds=2"]) == 0
    assert run_command(["rounds=2"]) == 0
    values = {tuple(r["overrides"]): r["metrics"] for r in results()}
    assert len(values) == 4
    assert (
        values[("aggregator=power_mean", "aggregator.power=1", "rounds=2")] == values[("rounds=2",)]
    )
    assert run_command(["aggregator=power_mean", "+aggregator.powr=1"]) == 2
    assert "did you mean 'power'?" in capsys.readouterr().err


def test_searchpath_adds_another_folder(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "debug"
    other.mkdir(parents=True)
    (other / "one.yaml").write_text("# @package _global_\nrounds: 1\n")
    assert run_command([f"hydra.searchpath=[file://{other.parent}]", "debug=one", "clients=4"]) == 0
    assert results()[0]["rounds"] == 1


def test_users_torch_module_is_a_model() -> None:
    assert (
        run_command(
            [
                "model._target_=tests.world.Softmax",
                "~model.hidden",
                "~model.bias",
                "~model.init",
                "~model.dropout",
                "rounds=1",
            ]
        )
        == 0
    )
    assert results()[0]["bytes"]["up"] == 10 * 640 * 4


def test_help_and_a_mistyped_key_load_no_torch() -> None:
    script = (
        "import sys; import fedexp; from fedexp.commands.run import run_command; code = "
        "run_command(['--help']);"
        "bad = {'torch', 'torchvision', 'wandb', 'matplotlib', 'sklearn', 'hydra'} & "
        "set(sys.modules);"
        "refused = run_command(['-m', 'local.lrr=1', 'seed=0,1']); slow = {'torch', "
        "'wandb'} & set(sys.modules);"
        "sys.exit(f'imported {bad} {slow}' if bad or slow or code or refused != 2 else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "did you mean 'local.lr'?" in done.stderr, done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", "from fedexp.commands.run import main; main()", "-h"],
        stdout=write,
        stderr=-1,
        env=clean,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_lists_every_group_and_the_users_own_options(capsys) -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("_target_: mine.Net")
    assert run_command(["-h", "rounds=1"]) == 0
    groups = dict(
        line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line
    )
    assert "mine" in groups["model"].split(", ") and {"fedavg", "scaffold"} <= set(
        groups["method"].split(", ")
    )
    assert "ma_echo/table1" in groups["experiment"].split(", ") and not {
        "by_dataset",
        "table",
        "tuned",
    } & {*groups}


def test_help_of_a_group_has_each_options_first_comment_and_of_a_key_its_part_of_the_config(
    capsys,
) -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("# My own net.\n_target_: mine.Net")
    assert (
        run_command(["--help", "method"])
        == run_command(["--help", "model"])
        == run_command(["--help", "eval"])
        == 0
    )
    told = capsys.readouterr().out
    lines = [line.split("  ", 2) for line in told.splitlines()]
    shown = {line[1]: line[2].strip() for line in lines if len(line) == 3}
    assert shown["scaffold"].startswith("SCAFFOLD") and shown["mine"] == "My own net."
    assert "eval: # " in told and "\n  every: 1 # " in told and "trace:" not in told
    assert run_command(["--help", "state"]) == run_command(["--help", "checkpoint"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("# Client states") and "keys below" not in told
    assert run_command(["--help", "aggregatr"]) == 2
    assert "did you mean 'aggregator'?" in capsys.readouterr().err
    assert run_command(["--help", "local.lr_schedule"]) == 0
    assert capsys.readouterr().out.startswith("local: ")
    assert run_command(["--help", "local.lrr"]) == 2
    assert "did you mean 'local.lr'?" in capsys.readouterr().err


def test_a_dry_run_counts_checks_and_estimates_by_other_seeds(capsys) -> None:
    assert run_command([*QUICK, "seed=1"]) == 0
    (result,) = results()
    before = sorted(Path("outputs").rglob("*"))
    capsys.readouterr()
    assert run_command(["--dry-run", "-m", *QUICK, "seed=1,2,3", "method=fedavg,fedprox"]) == 0
    told = capsys.readouterr().out
    assert (
        "6 runs - 1 done, 5 to run" in told
        and "for 2 of them by stored runs" in told
        and "the other 3" in told
    )
    assert f"about {duration(2 * result['seconds']['total'])}," in told and "are free under" in told
    assert (
        run_command(["--dry-run", *QUICK, "seed=1"]) == 0
        and run_command(["--dry-run", "rounds=3"]) == 0
    )
    told = capsys.readouterr().out
    assert "1 runs - 1 done, 0 to run\ndry run: 1 runs - 0 done, 1 to run\ntime: not known" in told
    assert run_command(["--dry-run", "-m", "method=fedavg,krum", "clients=2"]) == 2
    assert "job 1" in capsys.readouterr().err and before == sorted(Path("outputs").rglob("*"))


def test_a_split_from_a_file_is_the_same_run_wherever_the_file_lies(capsys) -> None:
    assert run_command([*QUICK, "partition.alpha=0.3"]) == 0
    (file,) = Path().glob("outputs/runs/*/*/partition.safetensors")
    for name in ("a", "b"):
        Path(name).write_bytes(file.read_bytes())
        assert run_command([*QUICK, "partition=file", f"partition.path={name}"]) == 0
    assert "already done" in capsys.readouterr().out
    drawn, given = sorted(results(), key=lambda r: r["choices"]["partition"])
    assert drawn["metrics"] == given["metrics"]
    assert drawn["partition"]["sha256"] == given["partition"]["sha256"]


@pytest.mark.parametrize("overrides", [
    ["partition=label_groups", "partition.groups=[[0,1],[2,3],[4,5],[6,7],[8,9]]", "clients=5"],
    ["partition=pathological", "clients=20"],
    ["partition=shards", "clients=50"],
    ["partition.alpha=0.05", "clients=100", "partition.min_size=1"],
    ["method=scaffold", "sampling=bernoulli", "clients=200", "clients_per_round=0.05"],
])  # fmt: skip
def test_smoke_fits_every_split(overrides: list[str]) -> None:
    assert run_command(["debug=smoke", *overrides]) == 0


@pytest.mark.parametrize(
    ("hopeless", "limited", "problem"),
    [
        (["partition.min_size=140"], "split", "left a client with fewer than min_size=140"),
        (
            ["partition=dirichlet_blocks", "partition.block=20", "clients=20"],
            "block",
            "a block has",
        ),
    ],
    ids=["dirichlet", "blocks"],
)
def test_a_split_that_takes_long_to_draw_is_announced(
    hopeless: list[str], limited: str, problem: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("fedexp.running.check._NOTICE_AFTER_SECONDS", 0.05)
    assert run_command([*hopeless, "partition.alpha=0.01", "partition.max_seconds=0.5"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"drawing the split repeatedly, for at most 0.5 s of computing per {limited} "
    )
    assert problem in told


def test_other_images_under_the_same_config_are_not_passed_off(tmp_path: Path, capsys) -> None:
    from PIL import Image

    for root, shade in (("a", 0), ("b", 90)):
        for split in ("train", "test"):
            for label in ("x", "y"):
                folder = tmp_path / root / "pictures" / split / label
                folder.mkdir(parents=True)
                for number in range(12):
                    Image.new("L", (8, 8), shade + number + 20 * (label == "y")).save(
                        folder / f"{number}.png"
                    )
    run = ["dataset=image_folder", "dataset.folder=pictures", "dataset.shape=[1,8,8]", "dataset.num_classes=2",
           "dataset.mean=[0.5]", "dataset.std=[0.5]", "partition=iid", "rounds=1", "clients=2"]  # fmt: skip
    assert run_command([*run, "data_root=a"]) == 0
    assert run_command([*run, "data_root=a"]) == 0
    assert "already done" in capsys.readouterr().out
    assert run_command([*run, "data_root=b"]) == 1
    assert "was computed on other data" in capsys.readouterr().err
    assert run_command([*run, "data_root=b", "output_root=other"]) == 0


@pytest.mark.parametrize(("server", "said"), [
    # The model has no hidden units. Otherwise, all hidden units might be dead,
    # depending on the last bits, and the loss would be finite.
    (["server_optimizer.lr=1e38", "model.hidden=[]"], "round 1: test/global/loss is NaN"),
    (["server_optimizer.lr=1e36", "model.hidden=[]"], "round 1: test/global/loss is infinite"),
    (["server_optimizer.lr=3e38", "server_optimizer.beta_1=0"], "round 1: the server's update left NaN or infinity in hidden."),
])  # fmt: skip
def test_nan_or_infinity_from_the_server_is_an_error_not_a_result(
    server: list[str], said: str, capsys
) -> None:
    assert run_command([*QUICK, "method=fedadam", *server, "local.lr=1"]) == 1
    told = capsys.readouterr().err
    assert said in told and "server optimizer FedAdam" in told
    assert not results()


def test_a_crash_between_result_and_status_is_mended() -> None:
    sweep = ["-m", "seed=1", *QUICK]
    assert run_command(sweep) == 0
    for path in Path().glob("outputs/runs/*/*/status.json"):
        path.write_text(path.read_text().replace('"done"', '"running"'))
    assert run_command(sweep) == 0
    assert {
        json.loads(p.read_text())["status"] for p in Path().glob("outputs/runs/*/*/status.json")
    } == {"done"}


def test_broken_yaml_of_the_users_is_told(capsys) -> None:
    Path("conf/aggregator").mkdir(parents=True)
    Path("conf/aggregator/broken.yaml").write_text("a: [1\n")
    assert run_command(["aggregator=broken"]) == 2
    told = capsys.readouterr().err
    assert "not YAML" in told and "broken.yaml" in told and "Traceback" not in told


@pytest.mark.parametrize(("file", "text", "said"), [
    ("trainer/own", "_target_: my_plugins.Bare\nmu: 1.0\n", ["'my_plugins.Bare' is not a dataclass", "@dataclass"]),
    ("trainer/own", "_target_: my_plugins.Built\nmu: 1.0\n", ["'my_plugins.Built' is not a dataclass", "__init__"]),
    ("trainer/own", "mu: 1.0\n", ["trainer/own.yaml", "no '_target_'"]),
    ("trainer/own", "_target_: my_plugins.Bare\nmu: ${local.lrr}\n", ["trainer.mu", "did you mean 'local.lr'?"]),
    ("method/own", "method: own\n", ["method/own.yaml", "'# @package _global_'"]),
    ("experiment/own", "rounds: 3\n", ["experiment/own.yaml", "'# @package _global_'"]),
    ("method/own", "defaults:\n  - override /trainer: sgd\n", ["method/own.yaml", "'# @package _global_'"]),
])  # fmt: skip
def test_a_file_of_the_users_that_lacks_a_line_is_told_which(
    file: str, text: str, said: list[str], capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my_plugins.py").write_text(
        "from fedexp.core.trainer import Trainer\n\n\nclass Bare(Trainer):\n    mu: float "
        "= 1.0\n\n\n"
        "class Built(Trainer):\n    def __init__(self, mu: float = 1.0) -> None:\n        "
        "self.mu = mu\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    path = Path("conf", f"{file}.yaml")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert run_command([file.replace("/", "=")]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and all(words in told for words in said), told


def test_the_config_is_printed_resolved(capsys) -> None:
    for flags in (["--cfg", "job"], ["-c", "job", "--resolve"], ["--cfg=job"]):
        assert run_command([*flags, "seed=3"]) == 0
        printed = capsys.readouterr().out
        assert "\nseed_data: 3\n" in printed and "${" not in printed


def test_a_sweep_that_a_config_defines_is_checked_and_counted(capsys) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/sw.yaml").write_text(
        "# @package _global_\nrounds: 1\nclients: 4\nhydra:\n  sweeper:\n    params:\n     "
        " seed: 0,1\n"
    )
    assert run_command(["-m", "experiment=sw"]) == 0
    out = capsys.readouterr().out
    assert "2 jobs - 0 done" in out and "2 done" in out
    assert run_command(["-m", "experiment=sw", "seed=1,2"]) == 0
    assert "2 jobs - 1 done" in capsys.readouterr().out


def test_several_values_without_m_point_to_it(capsys) -> None:
    assert run_command(["seed=0,1"]) == 2
    assert "-m" in capsys.readouterr().err


def test_stop_on_a_loss_waits_until_it_is_small() -> None:
    assert (
        run_command(
            [
                "rounds=30",
                "clients=4",
                "local.lr=0.2",
                "stop.metric=test/global/loss",
                "stop.target=1.0",
            ]
        )
        == 0
    )
    (result,) = results()
    assert 1 < result["rounds"] < 30 and result["metrics"]["test/global/loss"] <= 1.0


SWEEPER = """
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Trials(Sweeper):
    def __init__(self, lrs, direction=None, optim=None):
        self.lrs = lrs

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        for number, lr in enumerate(self.lrs):
            (job,) = self.launcher.launch([[*arguments, f"local.lr={lr}"]], number)
            try:
                print("returned", job.return_value, flush=True)
            except Exception as error:
                print("failed", type(error).__name__, flush=True)
"""
TINY = ["rounds=1", "clients=2", "limit.steps=1", "model.hidden=[4]"]


def swept(
    tmp_path: Path, node: str, *overrides: str, tiny: list[str] = TINY
) -> subprocess.CompletedProcess[str]:
    """Run a sweep with a sweeper plug-in, whose node in the config has more keys."""
    Path("hydra_plugins").mkdir(exist_ok=True)
    Path("hydra_plugins/trials.py").write_text(SWEEPER)
    Path("conf/hydra/sweeper").mkdir(parents=True, exist_ok=True)
    Path("conf/hydra/sweeper/trials.yaml").write_text(
        f"_target_: hydra_plugins.trials.Trials\n{node}"
    )
    return subprocess.run(
        [sys.executable, "-m", "fedexp", "-m", "hydra/sweeper=trials", *overrides, *tiny],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"},
    )


def test_summary_of_a_sweeper_plug_in_lists_the_trials_that_ran(tmp_path) -> None:
    ran = swept(tmp_path, "lrs: [0.1, 1.1, 2.1, 0.1]\n")
    assert ran.returncode == 0, ran.stderr
    summary = ran.stdout.rpartition("overrides")[2]
    # A trial that repeats an earlier one is also listed.
    assert "4 done" in summary and "queued" not in ran.stdout and "best: " not in summary
    assert all(f"local.lr={lr}" in summary for lr in (0.1, 1.1, 2.1))
    assert "its sweeper chooses the jobs\n" in ran.stdout
    (first, *_) = [r for r in results() if r["overrides"][-1] == "local.lr=0.1"]
    assert f"returned {first['headline']['value']}" in ran.stdout


def test_optimising_sweeper_gets_the_number_of_the_held_out_data(tmp_path) -> None:
    node = "lrs: [0.1, 1e30, 0.5]\ndirection: maximize\n"
    tiny = [*TINY, "memo.enabled=false", "local.steps=2"]
    ran = swept(tmp_path, node, "eval.held_out=100", tiny=tiny)
    found = {r["overrides"][-1]: r["metrics"]["val/global/acc"] for r in results()}
    returned = [line for line in ran.stdout.splitlines() if line.startswith(("returned", "failed"))]
    good = [f"returned {found[f'local.lr={lr}']}" for lr in (0.1, 0.5)]
    assert returned == [good[0], "failed JobFailedError", good[1]], ran.stderr
    assert "its sweeper chooses the jobs, by val/global/acc (last)" in ran.stdout

    best = max((0.1, 0.5), key=lambda lr: found[f"local.lr={lr}"])
    summary = ran.stdout.rpartition("overrides")[2]
    assert f"best: job {0 if best == 0.1 else 2}, fedexp" in summary
    assert f"local.lr={best}\n" in summary.partition("best: ")[2]
    assert "2 done, 1 failed" in summary and ran.returncode == 1


@pytest.mark.parametrize(("node", "held_out", "says"), [
    ("direction: maximize", 0, ["on test data", "hydra.sweeper.direction", "eval.held_out=143"]),
    ("direction: minimize", 9, ["worst value of val/global/acc", "hydra.sweeper.direction=maximize"]),
    ("optim: {maximize: false}", 9, ["worst value", "set hydra.sweeper.optim.maximize=true"]),
    ("direction: [maximize, minimize]", 9, ["one number", "expected: maximize"]),
])  # fmt: skip
def test_optimising_sweeper_is_refused_with_the_key_to_set(
    tmp_path, node: str, held_out: int, says: list[str]
) -> None:
    ran = swept(tmp_path, f"lrs: [0.1]\n{node}\n", f"eval.held_out={held_out}")
    assert ran.returncode == 2 and not Path("outputs").exists()
    assert all(words in ran.stderr for words in says), ran.stderr


def test_version_is_printed(capsys) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"fedexp {__version__}\n"


def test_help_of_an_option_has_its_keys_with_comments_and_those_of_its_parts(capsys) -> None:
    assert run_command(["--help", "method=scaffold"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("method=scaffold: SCAFFOLD, Karimireddy et al. 2020. The paper")
    assert "  aggregator=mean" in lines
    # The value is that of the preset, and the comment is from the aggregator's file
    assert "  aggregator.weights: uniform  # p_i: samples (n_i / sum n) | uniform (1 / m)" in lines
    assert any(line.startswith("  trainer.option: II  # How c_i is renewed: I") for line in lines)

    assert run_command(["--help", "trainer=moon"]) == 0
    assert "\n  trainer.temperature: 0.5  # temperature tau" in capsys.readouterr().out
    assert run_command(["--help", "method=scafold"]) == 2
    assert "did you mean 'scaffold'?" in capsys.readouterr().err
    assert run_command(["rounds=3", "--help"]) == 0
    assert capsys.readouterr().out.startswith("fedexp - ")


def test_help_of_a_key_of_a_group_has_it_in_each_option(capsys) -> None:
    Path("conf/trainer").mkdir(parents=True)
    Path("conf/trainer/mine.yaml").write_text("_target_: mine.Net\nalpha: 0.5 # my factor\n")
    Path("conf/trainer/damaged.yaml").write_text("alpha: [")
    assert run_command(["--help", "trainer.alpha"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("trainer=mine") + 1] == "  trainer.alpha: 0.5  # my factor"
    assert "trainer=fedcm" in lines and "trainer=moon" not in lines

    assert run_command(["--help", "aggregator.student"]) == 0
    assert "\n  aggregator.student.momentum: 0.9" in capsys.readouterr().out
    assert run_command(["--help", "trainer.alpah"]) == 2
    assert "did you mean 'trainer.alpha'?" in capsys.readouterr().err
    assert run_command(["--help", "method.rounds"]) == 2
    assert "no option of method has the key 'rounds'" in capsys.readouterr().err


def test_help_names_every_subcommand(capsys) -> None:
    assert run_command(["--help"]) == 0
    told = capsys.readouterr().out
    for name, command in {"data": data, "runs": runs, "table": table}.items():
        (action,) = command.parser()._subparsers._group_actions
        line = re.search(rf"fedexp-{name} (\S+)", told)
        assert sorted(line[1].split("|")) == sorted(action.choices)


def test_help_of_a_group_ends_every_line_with_a_sentence(capsys) -> None:
    for group in ("method", "model", "partition", "aggregator", "dataset"):
        run_command(["--help", group])
        for line in capsys.readouterr().out.splitlines()[1:]:
            assert line.endswith("."), line
