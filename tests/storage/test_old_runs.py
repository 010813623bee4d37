"""Tests that the commands and the Python interface read runs of version 0.1.

`tests/fixtures/runs_0_1` contains these runs. Its README lists the commands that made
them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fedexp
from fedexp.commands.runs import run_command
from fedexp.core.errors import StorageError
from fedexp.core.weights import Weights

FIXTURE = Path(__file__).parents[1] / "fixtures" / "runs_0_1"
# The instruction set with which the stored runs were made.
CPU_CAPABILITY = "AVX512"

FEDAVG = "fedavg-digits-f16591ee7839b3cf/6677e724"
FEDAVG_SEED_1 = "fedavg-digits-e384262155827225/6677e724"
POWER_MEAN = "fedavg-digits-6249f0efce60ab03/32df850e"
SCAFFOLD = "scaffold-digits-0e7c5b5caa37dae0/4c362cf5"
LOCAL = "local-digits-99075a2e0d4c0c4b/601ded1c"
MA_ECHO = "ma_echo-digits-398102ddfa914f82/45326cd8"
FAILED = "fedavg-digits-c7692701cd657a69/6677e724"

SMALL = [
    "clients=3",
    "partition.alpha=1.0",
    "model.hidden=[8]",
    "limit.train=200",
    "limit.test=100",
    "local.lr=0.2",
    "local.batch_size=16",
    "threads=1",
    "device=cpu",
    "checkpoint.every=off",
]
ERROR = "round 1: client 0 returned NaN or infinity in hidden.0.weight"


class Expected(NamedTuple):
    """The contents of a finished run.

    Args:
        metric: Name of the headline metric.
        values: The headline metric after each round.
        loss: Training loss of the last round.
        sizes: Number of training samples of each client.
        models: Digest of each stored model.
        output: First three outputs of the first model for a fixed input.
    """

    metric: str
    values: list[float]
    loss: float
    sizes: list[int]
    models: list[str]
    output: list[float]


ACCURACY, MEAN_ACCURACY = "test/global/acc", "test/local/acc_mean"
FINISHED = {
    FEDAVG: Expected(
        ACCURACY,
        [0.17, 0.21, 0.45],
        1.844002644479275,
        [70, 51, 79],
        ["862d22bce13d258a"],
        [-0.20925, 0.07101, -0.16679],
    ),
    FEDAVG_SEED_1: Expected(
        ACCURACY,
        [0.23, 0.34, 0.47],
        1.6445384241640568,
        [67, 54, 79],
        ["9d9d3aad20549c41"],
        [-0.41544, 0.33024, 0.31422],
    ),
    POWER_MEAN: Expected(
        ACCURACY,
        [0.16, 0.2, 0.48],
        1.8319557519555092,
        [70, 51, 79],
        ["23eeef31ad349ba2"],
        [-0.21837, 0.07463, -0.16633],
    ),
    SCAFFOLD: Expected(
        ACCURACY,
        [0.14, 0.17, 0.53],
        1.8538717119693757,
        [70, 51, 79],
        ["1b22bcf4726d7507"],
        [-0.26406, 0.1024, -0.12793],
    ),
    LOCAL: Expected(
        MEAN_ACCURACY,
        [0.12333333333333334, 0.21666666666666667],
        1.8555276598334314,
        [70, 51, 79],
        ["e6e0d02d0d1f4a64", "80473a76ef555f30", "db024be834c07477"],
        [0.02612, -0.06768, -0.27099],
    ),
    MA_ECHO: Expected(
        ACCURACY,
        [0.28],
        2.1279013529121875,
        [70, 51, 79],
        ["17f28dc7579e0880"],
        [0.0008, -0.03072, -0.26169],
    ),
}
REPEATED = [FEDAVG, SCAFFOLD, LOCAL, MA_ECHO]
RENAMED = {
    "fedexp.trainers.sgd.Sgd": "fedexp.methods.fedavg.PlainTrainer",
    "fedexp.trainers.scaffold.Scaffold": "fedexp.methods.scaffold.Scaffold",
}


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the stored runs and return their `output_root`, a relative path."""
    shutil.copytree(FIXTURE / "outputs", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    return Path("outputs")


def read_output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Call fedexp-runs successfully and return what it prints."""
    capsys.readouterr()
    assert run_command([*arguments, "--root", "outputs"]) == 0
    return capsys.readouterr().out


def list_names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the names that `fedexp-runs list` selects, in its order."""
    return [row["name"] for row in json.loads(read_output(capsys, "list", "--json", *arguments))]


def read_files(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files of `folder`."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(model: Weights) -> str:
    """Return a digest of the names, shapes and values of the tensors of `model`."""
    state = hashlib.sha256()
    for name, value in {**model.params, **model.buffers}.items():
        state.update(name.encode() + str(tuple(value.shape)).encode())
        state.update(value.contiguous().numpy().tobytes())
    return state.hexdigest()[:16]


def is_repeated(old: fedexp.Run, new: fedexp.Run) -> bool:
    """Check that two runs agree up to rounding, and return whether they are
    bit-identical.

    Runs on the same kind of machine must be bit-identical. Other processors and
    libraries round differently.
    """
    assert new.result["numerics"] == {**old.result["numerics"], "cudnn_benchmark": False}
    assert new.result["partition"] == old.result["partition"]
    assert len(new.metrics) == len(old.metrics)
    for after, before in zip(new.metrics, old.metrics, strict=True):
        assert after == pytest.approx(before, rel=1e-3, abs=0.02)

    is_identical = (new.metrics, new.result["models_sha256"]) == (
        old.metrics,
        old.result["models_sha256"],
    )
    assert is_identical or not is_same_machine(old.result, new.result)
    return is_identical


def is_same_machine(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two results come from the same floating-point kernels."""
    old, new = old["environment"], new["environment"]
    return (
        old["processor"] == new["processor"]
        and all(old["packages"][name] == new["packages"][name] for name in ("torch", "numpy"))
        and torch.backends.cpu.get_cpu_capability() == CPU_CAPABILITY
    )


def test_list_shows_every_old_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(read_output(capsys, "list", "--json"))
    order = [FAILED, MA_ECHO, LOCAL, SCAFFOLD, POWER_MEAN, FEDAVG_SEED_1, FEDAVG]
    assert [row["name"] for row in rows] == order

    found = {row["name"]: row for row in rows}
    failed = found.pop(FAILED)
    assert (failed["status"], failed["error"], failed["headline"]) == ("failed", ERROR, None)
    for name, row in found.items():
        metric, values = FINISHED[name].metric, FINISHED[name].values
        assert row["status"] == "done" and row["error"] is None and not row["set_aside"]
        assert row["headline"] == {"metric": metric, "rule": "last", "value": values[-1]}
        assert row["round"] == row["rounds"] == len(values)
        assert row["method"] == name.partition("-")[0] and row["dataset"] == "digits"
        assert row["folder"] == str((outputs / "runs" / name).resolve())

    assert found[FEDAVG]["overrides"] == ["method=fedavg", "rounds=3", *SMALL, "seed=0"]
    assert found[FEDAVG]["updated"] == "2026-11-24T22:44:34+00:00"
    swapped = {name: row["swapped"] for name, row in found.items() if row["swapped"]}
    assert swapped == {POWER_MEAN: ["aggregator=power_mean"]}

    text = read_output(capsys, "list")
    assert all(name in text for name in order) and "7 runs" in text


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["method=fedavg", "aggregator=mean", "status=done"], [FEDAVG_SEED_1, FEDAVG]),
        (["local.lr>1"], [FAILED]),
        (["checkpoint.every=1"], [SCAFFOLD]),
        (["trainer=sgd", "seed=0", "headline<0.4"], [MA_ECHO, LOCAL]),
        (["aggregator.power=0.25"], [POWER_MEAN]),
        (["model._target_=fedexp.models.mlp.MLP", "seed=1"], [FEDAVG_SEED_1]),
        (["test/global/acc>=0.47", "--sort", "headline"], [SCAFFOLD, POWER_MEAN, FEDAVG_SEED_1]),
    ],
)
def test_list_selects_old_runs_by_conditions(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    names: list[str],
) -> None:
    assert list_names(capsys, *arguments) == names


def test_show_reads_every_old_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, expected in FINISHED.items():
        text = read_output(capsys, "show", name)
        assert f"{expected.metric} {expected.values[-1]:.4f} (last)" in text
        assert fedexp.load(name).result["hashes"]["code"] in text
        assert ["fedexp", "version", "0.1"] in [line.split() for line in text.splitlines()]
    assert "mymethods 957c636f" in read_output(capsys, "show", POWER_MEAN)
    assert ERROR in read_output(capsys, "show", FAILED)


def test_table_of_old_runs_has_their_means(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["table", "rows=partition.alpha", "cols=method"]
    text = read_output(capsys, *arguments, "aggregator!=power_mean")
    lines = [line.split() for line in text.splitlines()]
    assert ["partition.alpha", "fedavg", "local", "ma_echo", "scaffold"] in lines
    means = ["0.4600", "±", "0.0141", "(2)", "0.2167", "(1)", "0.2800", "(1)", "0.5300", "(1)"]
    assert ["1", *means] in lines
    (pair,) = [line for line in lines if line[1:4] == ["scaffold", "-", "fedavg"]]
    assert pair[4] == "+0.0800"

    text = read_output(capsys, *arguments, "value=test/global/loss", "aggregator=mean")
    row = ["1", "1.7724", "±", "0.0242", "(2)", "1.6865", "(1)"]
    assert row in [line.split() for line in text.splitlines()]

    # Runs of another aggregator have a column that names it.
    header = read_output(capsys, *arguments).splitlines()[1].split()
    assert header[1:5] == ["fedavg", "fedavg", "aggregator=power_mean", "local"]


def test_diff_of_old_runs_shows_the_keys_that_differ(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read_diff(a: str, b: str) -> tuple[list[list[str]], list[str]]:
        """Return the rows of the table of differing keys, and all lines."""
        lines = read_output(capsys, "diff", a, b).splitlines()
        end = next(number for number, line in enumerate(lines) if line.startswith(" config hash"))
        return [line.split() for line in lines[3:end] if line.strip()], lines

    rows, lines = read_diff(FEDAVG, FEDAVG_SEED_1)
    assert rows == [["seed", "0", "1"], ["seed_data", "0", "1"]]
    assert "test/global/acc: +0.0200 from first to second" in lines

    rows, lines = read_diff(FEDAVG, SCAFFOLD)
    assert {row[0]: row[-2:] for row in rows} == {
        "trainer._target_": ["fedexp.trainers.sgd.Sgd", "fedexp.trainers.scaffold.Scaffold"],
        "trainer.option": ["-", "II"],
        "trainer.correction": ["-", "gradient"],
        "aggregator.weights": ["samples", "uniform"],
        "method": ["fedavg", "scaffold"],
        "checkpoint.every": ["off", "1"],
        "choices.method": ["fedavg", "scaffold"],
        "choices.trainer": ["sgd", "scaffold"],
    }
    without_effect = [row[0] for row in rows if "effect" in row]
    assert without_effect == ["checkpoint.every", "choices.method", "choices.trainer"]

    rows, lines = read_diff(FEDAVG, POWER_MEAN)
    assert ["aggregator.power", "-", "0.25"] in rows
    assert "+class PowerMean(Mean):" in lines
    assert any(line.split()[:2] == ["partition", "sha256"] and "the same" in line for line in lines)


def test_export_of_old_runs_has_the_same_rows(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = (FIXTURE / "export.csv").read_text()
    assert read_output(capsys, "export") == expected
    assert read_output(capsys, "export", "--out", "runs.csv") == "7 runs: runs.csv\n"
    assert Path("runs.csv").read_text() == expected


@pytest.mark.parametrize("name", FINISHED)
def test_load_finished_old_run_returns_its_contents(outputs: Path, name: str) -> None:
    expected = FINISHED[name]
    run = fedexp.load(name)
    assert run.status == "done" and run.folder == (outputs / "runs" / name).resolve()

    assert run.config["method"] == name.partition("-")[0]
    assert run.config["local"]["lr"] == 0.2 and run.config["limit"]["train"] == 200
    assert run.config["model"]["_target_"] == "fedexp.models.mlp.MLP"
    assert run.config["choices"]["partition"] == "dirichlet"
    assert set(SMALL) <= set(run.config["overrides"])

    assert run.result["headline"]["value"] == expected.values[-1]
    assert run.result["hashes"]["config"].startswith(name.rpartition("/")[0][-16:])
    assert run.result["hashes"]["code"].startswith(name.rpartition("/")[2])

    rows = run.metrics
    assert [row["round"] for row in rows] == list(range(1, len(expected.values) + 1))
    assert [row[expected.metric] for row in rows] == expected.values
    assert rows[-1]["train/loss"] == expected.loss

    assert run.partition.sizes.tolist() == expected.sizes
    assert len(run.partition.of(0)) == expected.sizes[0]


@pytest.mark.parametrize("name", FINISHED)
def test_load_finished_old_run_returns_its_models(outputs: Path, name: str) -> None:
    expected = FINISHED[name]
    run = fedexp.load(name)
    assert [digest(model) for model in run.models] == expected.models
    for model in run.models:
        assert model.spec.arch == "fedexp.models.mlp.MLP"
        assert dict(model.spec.kwargs)["hidden"] == (8,)
        assert {parameter: tuple(value.shape) for parameter, value in model.params.items()} == {
            "hidden.0.weight": (8, 64),
            "hidden.0.bias": (8,),
            "output.weight": (10, 8),
            "output.bias": (10,),
        }

    network = run.module()
    with torch.no_grad():
        output = network(torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8))
    assert not network.training and output.shape == (1, 10)
    assert output[0, :3].tolist() == pytest.approx(expected.output, abs=1e-4)
    with pytest.raises(IndexError):
        run.module(len(expected.models))


def test_load_failed_old_run_has_no_result(outputs: Path) -> None:
    run = fedexp.load(FAILED)
    assert run.status == "failed" and run.metrics == []
    assert run.config["local"]["lr"] == 1e20 and run.partition.sizes.tolist() == [70, 51, 79]
    with pytest.raises(StorageError, match=r"result\.json"):
        _ = run.result
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        _ = run.models


@pytest.mark.parametrize("name", REPEATED)
def test_rerun_of_old_run_is_refused_with_the_new_name(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """The class paths in the stored config have other names since version 0.2."""
    before = read_files(outputs)
    assert run_command(["rerun", name, "--root", "outputs"]) == 2

    error = capsys.readouterr().err
    target = fedexp.load(name).config["trainer"]["_target_"]
    assert f"error: '{target}' has another name since version 0.2" in error
    assert f"the stored config of {name}: trainer._target_" in error
    assert RENAMED[target] in error and "rerun it with fedexp 0.1" in error
    assert read_files(outputs) == before


@pytest.mark.parametrize("name", REPEATED)
def test_run_with_overrides_of_old_run_repeats_it(outputs: Path, name: str) -> None:
    old = fedexp.load(name)
    new = fedexp.run([*old.config["overrides"], "output_root=new"])
    is_repeated(old, new)
    assert new.result["fedexp_version"] == fedexp.__version__
    assert "fedexp_version" not in old.result and new.folder.name != old.folder.name
    before = read_files(new.folder)
    assert run_command(["rerun", str(new.folder), "--root", "new"]) == 0
    assert read_files(new.folder) == before


def test_rerun_of_failed_old_run_is_refused(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["rerun", FAILED, "--root", "outputs"]) == 2
    assert "failed" in capsys.readouterr().err
    assert not (outputs / "reruns").exists()


def test_client_models_of_old_run_are_averaged(outputs: Path) -> None:
    path = f"client_models.path=outputs/runs/{LOCAL}"
    run = fedexp.run(["method=average", *SMALL, "seed=0", path])
    sha256 = "1c99441e59388db6dbf0615c1d334327b3cc96d56cb4f04f45c9a225e4e335ad"
    assert run.config["client_models"]["sha256"] == sha256
    local = fedexp.load(LOCAL)
    for name, value in run.models[0].params.items():
        mean = torch.stack([model.params[name] for model in local.models]).mean(dim=0)
        torch.testing.assert_close(value, mean)


def test_clean_finds_the_files_of_old_runs(
    outputs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = read_output(capsys, "clean", "--failed", "--checkpoints")
    folders = [outputs / "runs" / FAILED, outputs / "runs" / SCAFFOLD / "checkpoint"]
    lines = [line for line in text.splitlines() if "outputs" in line]
    assert len(lines) == 2
    assert all(any(str(folder) in line for line in lines) for folder in folders)
