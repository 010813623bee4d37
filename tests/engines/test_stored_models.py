"""Stored models replace the local training of the first round.

The run is then bit-identical to one that trains these models. Models that do not fit
are refused before the run starts.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedexp.commands.run import run_command
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.methods.bases.class_counts import ClassCounts, counts
from fedexp.methods.bases.fusion import FusionAggregator
from fedexp.storage.model_folder import ModelFolder
from fedexp.storage.tensors import load_tree, save_tree

MLP = ["model.hidden=[6]"]


@dataclass(frozen=True)
class CountsAsBias(FusionAggregator):
    """An aggregator that returns the first model with class counts in its last bias.

    The bias holds the cohort's class counts and thus shows what the probe answered.
    """

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return (ClassCounts(env.num_classes),)

    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        first, bias = results[0].weights, env.layers[-1].bias
        assert bias is not None
        total = counts(list(results)).sum(0).to(env.dtype)
        return Weights(first.spec, {**first.params, bias: total}, first.buffers), {}


class Normed(nn.Module):
    """A model with buffers: running statistics and a counter."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.out = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x).flatten(1))


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of ``method=local``, which tests must not change."""
    place = tmp_path_factory.mktemp("stored")
    assert run_command(command("method=local", "memo.enabled=false", f"output_root={place}")) == 0
    (folder,) = place.glob("runs/*/*")
    return folder


def copied(folder: Path, name: str = "copied") -> Path:
    """Copy a folder into the working directory, where a test may change it.

    The copy has no result file, which contains the description of the models.
    """
    return Path(shutil.copytree(folder, name, ignore=shutil.ignore_patterns("result.json")))


def command(*overrides: str) -> list[str]:
    given = {o.partition("=")[0] for o in overrides}
    base = ["rounds=1", "clients=4", "threads=1", *([] if "model" in given else MLP)]
    return [o for o in base if o.partition("=")[0] not in given] + list(overrides)


def run(*overrides: str) -> Path:
    """Run the command and return the folder of the new run."""
    before = set(Path().glob("outputs/runs/*/*"))
    assert run_command(command(*overrides)) == 0
    (folder,) = set(Path().glob("outputs/runs/*/*")) - before
    return folder


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def models(folder: Path) -> list[Weights]:
    stored = ModelFolder.open(folder)
    return [stored.weights(number) for number in range(len(stored.specs))]


def assert_same_models(a: Path, b: Path) -> None:
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("method", "overrides"), [
    ("fedavg", []),
    ("fedadam", ["init=different"]),
    ("fedavg", ["model=normed"]),
    ("average aggregator.last_layer=masked", ["init=different"]),
    ("ensemble aggregator.combine=masked", []),
    ("ma_echo", []),
    ("ensemble", ["dtype=float64", "clients_per_round=2", "partition.val_fraction=0.2"]),
    ("fedavg", ["client_dropout=0.5"]),
    ("median", ["local.epochs=3", "local.epochs_min=1"]),
    ("ma_echo", ["feature_skew.kind=noise", "feature_skew.strength=3", "client_models.data=partition"]),
    ("ma_echo", ["eval.held_out=100", "partition.val_fraction=0", "client_models.data=partition"]),
    ("fedavg", ["partition.val_fraction=0.2", "client_models.data=partition"]),
])  # fmt: skip
def test_fusing_another_runs_models_is_training_them(method: str, overrides: list[str]) -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/normed.yaml").write_text("_target_: tests.engines.test_stored_models.Normed\n")
    local = run("method=local", "memo.enabled=false", *overrides)
    direct = run(*f"method={method}".split(), "memo.enabled=false", *overrides)
    given = run(*f"method={method}".split(), f"client_models.path={local}", *overrides)
    assert_same_models(direct, given)
    assert result(given)["metrics"] == {
        **{
            name: value
            for name, value in result(direct)["metrics"].items()
            if not name.startswith("train/")
        },
        "local_steps": 0,
    }


def test_changed_inputs_of_another_split_are_refused(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skew = ["feature_skew.kind=noise", "feature_skew.strength=3"]
    assert run_command(command("method=fedavg", f"client_models.path={stored}", *skew)) == 2
    assert "client_models.data=partition" in capsys.readouterr().err


def test_nothing_is_trained(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedexp.engines import serial

    def forbidden(*args: object) -> None:
        raise AssertionError("trained")

    monkeypatch.setattr(serial, "train_client", forbidden)
    run(
        "method=fedavg",
        f"client_models.path={stored}",
        "engine=serial",
        "memo.enabled=false",
        "local.lr=0.01",
    )


def test_later_rounds_train_on_from_the_given_models(stored: Path) -> None:
    given = run("method=fedavg", f"client_models.path={stored}", "rounds=3")
    direct = run("method=fedavg", "rounds=3")
    assert_same_models(direct, given)
    rows = [json.loads(line) for line in (given / "metrics.jsonl").read_text().splitlines()]
    assert ["train/loss" in row for row in rows] == [False, True, True]


def test_the_content_is_the_identity_not_the_place(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        copied(stored, name)
    first = run("client_models.path=a")
    assert run_command(command("client_models.path=b")) == 0
    assert "already done" in capsys.readouterr().out
    facts = json.loads(Path("b/clients.json").read_text())
    Path("b/clients.json").write_text(json.dumps({**facts, "num_examples": [1, 1, 1, 1]}))
    second = run("client_models.path=b")
    locals_ = [model.params for model in models(stored)]
    mean = {
        name: torch.stack([tree[name].double() for tree in locals_]).mean(0) for name in locals_[0]
    }
    for name, value in models(second)[0].params.items():
        torch.testing.assert_close(value.double(), mean[name], rtol=0, atol=1e-6)
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_class_counts_come_from_the_folder_where_it_has_them(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("conf/aggregator").mkdir(parents=True)
    Path("conf/aggregator/counts.yaml").write_text(
        "_target_: tests.engines.test_stored_models.CountsAsBias\n"
    )
    facts = json.loads((stored / "clients.json").read_text())
    counted = torch.tensor(facts["class_counts"]).sum(0)
    assert counted.sum() == sum(facts["num_examples"])
    bias = [name for name in models(stored)[0].params if name.endswith("bias")][-1]
    here = run("aggregator=counts", f"client_models.path={stored}")
    assert "Counts come from the folder" not in capsys.readouterr().out
    assert torch.equal(models(here)[0].params[bias], counted.float())

    facts["class_counts"] = [[3] * 10, *facts["class_counts"][1:]]
    copied(stored, "other")
    Path("other/clients.json").write_text(json.dumps(facts))
    there = run("aggregator=counts", "client_models.path=other")
    assert "Counts come from the folder" in capsys.readouterr().out
    assert torch.equal(
        models(there)[0].params[bias], torch.tensor(facts["class_counts"]).sum(0).float()
    )

    Path("other/clients.json").write_text(json.dumps({**facts, "class_counts": None}))
    unknown = run("aggregator=counts", "client_models.path=other")
    assert torch.equal(models(unknown)[0].params[bias], counted.float())


def test_smoke_keeps_the_folders_clients() -> None:
    local = run("method=local", "clients=6", "limit.steps=1")
    assert (
        result(run("debug=smoke", "clients=6", f"client_models.path={local}"))["partition"][
            "clients"
        ]
        == 6
    )


@pytest.mark.parametrize(("overrides", "said"), [
    (["client_models.path=outputs/runs/absent"], ["does not exist", "working directory"]),
    (["client_models.path=outputs/run"], ["did you mean 'outputs/runs'?"]),
    (["client_models.path=LOCAL/.."], ["there are no models here", "did you mean"]),
    (["client_models.paht=LOCAL"], ["did you mean 'client_models.path'?"]),
    (["client_models.path=LOCAL", "client_models.sha256=abc"], ["contains other models", "abc"]),
    (["client_models.path=LOCAL", "clients=5"], ["another number of clients", "5 (clients=5)", "set clients=4"]),
    (["client_models.path=LOCAL", "model.hidden=[7]"], ["another network", "hidden=(6,)", "hidden=(7,)"]),
    (["client_models.path=LOCAL", "model=cnn_mcmahan"], ["another network", "models.mlp.MLP", "models.cnn."]),
    (["client_models.path=LOCAL", "dtype=float64"], ["another type of numbers", "F32", "dtype=float64", "set dtype=float32\n"]),
    (["client_models.path=LOCAL", "dataset.mean=[0.5]"], ["another normalisation", "dataset.mean", "[0.3054]", "[0.5]"]),
    (["client_models.path=LOCAL", "dataset.std=[0.5]"], ["another normalisation", "dataset.std", "[0.3757]", "[0.5]"]),
    (["client_models.path=LOCAL", "dataset.mean=[]", "dataset.std=[]"], ["another normalisation", "[0.3054]", "[]"]),
    (["client_models.path=LOCAL", "method=scaffold"], ["stores a state at the clients", "Scaffold"]),
    (["client_models.path=LOCAL", "method=fednova"], ["numbers of local steps", "aggregator=mean"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(
    overrides: list[str], said: list[str], stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The error message suggests similar names.
    local = shutil.copytree(stored, Path("outputs/runs/local/code"))
    assert run_command(command(*[o.replace("LOCAL", str(local)) for o in overrides])) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told
    for words in said:
        assert words in told, told
    assert len(list(Path().glob("outputs/runs/*"))) == 1


@pytest.mark.parametrize(("overrides", "said"), [
    (["method=centralized"], "training on pooled data has no clients"),
    (["clients_per_round=4"], "no model of client"),
    (["partition=file", "partition.path=split", "partition.on_small=allow", "client_models.data=partition"], "no data in this partition"),
])  # fmt: skip
def test_what_only_the_data_show_is_refused_before_training(
    overrides: list[str], said: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from fedexp.core.data import Partition
    from fedexp.data.partition import save_partition

    local = (
        run("method=local", "clients_per_round=3") if "clients_per_round=4" in overrides else stored
    )
    if "client_models.data=partition" in overrides:
        # The models come from elsewhere. The folder does not say what they were trained on.
        local = copied(stored)
        (local / "partition.safetensors").unlink()
    save_partition(
        Partition.from_lists([*np.array_split(np.arange(1437), 3), np.arange(0)]), Path("split")
    )
    assert run_command(command(f"client_models.path={local}", *overrides)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is not JSON"),
    ("[]", "is not an object"),
    ('{"num_clients": 4, "cleints": [0, 1, 2, 3]}', "did you mean 'clients'?"),
    ('{"num_clients": 4, "clients": [0, 1, 2]}', "do not belong together"),
    ('{"num_clients": 4, "clients": [0, 1, 2, 2]}', "distinct"),
    ('{"num_clients": 4, "clients": [0, 1, 2, 4]}', "0 .. num_clients - 1"),
    ('{"num_clients": 4, "clients": [0, 1, 2, 3], "num_examples": [1, 2]}', "expected 4, got 2"),
    ('{"num_clients": 4, "clients": [0, 1, 2, 3], "class_counts": [[1], [1], [1], [1, 2]]}', "same number of classes"),
    ('{"num_clients": 4, "clients": [0, 1, 2, 3], "class_counts": [[1], [1], [1], [1]]}', "10 classes"),
])  # fmt: skip
def test_a_damaged_list_of_clients_is_told(
    text: str, said: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = copied(stored)
    (local / "clients.json").write_text(text)
    assert run_command(command(f"client_models.path={local}")) == 2
    assert said in capsys.readouterr().err


def test_damaged_models_are_told(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = copied(stored)
    (local / "model.safetensors").write_bytes(b"nothing")
    assert run_command(command(f"client_models.path={local}")) == 2
    assert "no models can be read here" in capsys.readouterr().err


def test_what_a_file_calls_its_network_is_not_imported(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(stored)
    Path("foreign.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    tree, facts = load_tree(folder / "model.safetensors", torch.device("cpu"))
    facts["specs"] = [spec | {"arch": "foreign.Net"} for spec in facts["specs"]]
    save_tree(folder / "model.safetensors", tree, facts)
    assert run_command(command("client_models.path=copied")) == 2
    assert "foreign.Net" in capsys.readouterr().err
    assert not Path("imported").exists()


def test_a_changed_network_is_told(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedexp.models import mlp

    original = mlp.MLP.__init__

    def with_more(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.extra = nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(mlp.MLP, "__init__", with_more)
    # The run reads the signature of the original constructor.
    monkeypatch.setattr(mlp.MLP.__init__, "__wrapped__", original, raising=False)
    assert run_command(command(f"client_models.path={stored}")) == 2
    assert "tensor 'extra' of model 0" in capsys.readouterr().err
