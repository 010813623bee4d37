"""Tests of fedexp in Python.

Runs equal those of the command line and can be read. Models can be brought in from
elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import fedexp
from fedexp.commands.run import run_command
from fedexp.core.errors import ConfigError, FedexpError, StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.model_folder import ModelFolder

QUICK = ["rounds=2", "clients=3", "model.hidden=[6]", "threads=1"]
SHAPE: dict[str, Any] = {"input_shape": (1, 8, 8), "num_classes": 10}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


def test_import_costs_nothing_and_the_function_stays_the_function() -> None:
    script = (
        "import sys, fedexp\n"
        "heavy = {'torch', 'numpy', 'hydra', 'yaml', 'fedexp.api'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert {'run', 'load', 'save_models', 'Run'} <= set(dir(fedexp))\n"
        "fedexp.Run, fedexp.load, fedexp.run\n"
        "assert 'torch' not in sys.modules\n"
        "import fedexp.running.execute, fedexp.commands.run\n"
        "assert fedexp.run.__module__ == 'fedexp.api' and callable(fedexp.run)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="nothing"):
        fedexp.nothing  # noqa: B018


def test_a_run_in_python_is_the_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    ran = fedexp.run(QUICK)
    told = capsys.readouterr()
    assert told.out == "" and told.err == ""
    written = (ran.folder / "result.json").stat().st_mtime_ns
    assert run_command(QUICK) == 0
    assert "already done" in capsys.readouterr().out
    assert fedexp.run(QUICK, say=print) == ran
    assert capsys.readouterr().out.startswith("already done")
    assert (ran.folder / "result.json").stat().st_mtime_ns == written
    assert ran.status == "done"
    assert ran.config["clients"] == 3 and ran.config["overrides"] == QUICK
    assert [row["round"] for row in ran.metrics] == [1, 2]
    assert ran.result["headline"]["value"] == ran.metrics[-1]["test/global/acc"]
    assert (
        ran.partition.num_clients == 3 and ran.partition.sha256 == ran.result["partition"]["sha256"]
    )


def test_say_shows_notes_and_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run then prints a note about its peak memory.
    monkeypatch.setattr("fedexp.running.run_engine.is_near_limit", lambda *arguments: True)
    fedexp.run(QUICK, say=print)
    told = capsys.readouterr().out
    assert "peak memory" in told and "round 2/2" in told


def test_a_module_gives_the_accuracy_that_was_reported() -> None:
    from fedexp.running.experiment import load_data

    ran = fedexp.run(QUICK)
    module = ran.module()
    assert isinstance(module, nn.Module) and not module.training
    test = load_data(ResolvedConfig.from_stored(ran.config)).test
    x = test.inputs(slice(0, len(test)))
    with torch.no_grad():
        accuracy = (module(x).argmax(1) == test.y).float().mean().item()
    assert accuracy == pytest.approx(ran.result["metrics"]["test/global/acc"], abs=1e-6)
    with torch.no_grad():
        next(module.parameters()).zero_()
    # The module is a separate copy.
    assert next(ran.module().parameters()).abs().sum() > 0
    with pytest.raises(IndexError):
        ran.module(1)


def test_every_clients_model_can_be_had() -> None:
    ran = fedexp.run(["method=local", *QUICK])
    assert len(ran.models) == 3
    for number, weights in enumerate(ran.models):
        state = ran.module(number).state_dict()
        assert list(state) == list(weights.params)
        assert all(torch.equal(state[name], value) for name, value in weights.params.items())


@contextlib.contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, float64])
def test_torch_settings_of_the_caller_do_not_change_a_run(around: Any) -> None:
    command = [*QUICK, "memo.enabled=false", "engine=serial"]
    expected = fedexp.run(command).result["metrics"]
    with around():
        again = fedexp.run([*command, "reuse=false"])
    assert again.result["metrics"] == expected
    with float64():
        fedexp.run([*QUICK, "model.hidden=[5]"])  # a network that was not checked before
        assert torch.get_default_dtype() == torch.float64


def test_load_finds_by_folder_and_by_part_of_a_name() -> None:
    ran = fedexp.run(QUICK)
    assert fedexp.load(ran.folder) == fedexp.load("fedavg") == fedexp.load(ran.folder.name) == ran
    assert fedexp.load("fedavg", output_root=Path("outputs").resolve()) == ran
    with pytest.raises(FedexpError, match="no run 'fedavgg-digits'") as refused:
        fedexp.load("fedavgg-digits")
    assert "did you mean" in str(refused.value)
    fedexp.run([*QUICK, "seed=1"])
    with pytest.raises(ConfigError, match="matches 2 runs"):
        fedexp.load("fedavg")


def test_path_of_5000_characters_is_refused() -> None:
    long = "x" * 5000
    for call in (
        lambda: fedexp.load(long),
        lambda: fedexp.load("fedavg", output_root=long),
        lambda: fedexp.run([f"output_root={long}"]),
        lambda: fedexp.run([f"client_models.path={long}"]),
    ):
        with pytest.raises(FedexpError) as refused:
            call()
        assert len(str(refused.value)) < 2000 and long not in str(refused.value)


def test_mistakes_raise_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="unknown method 'fedavgg'") as refused:
        fedexp.run(["method=fedavgg"])
    assert "did you mean 'fedavg'?" in str(refused.value)
    with pytest.raises(ConfigError, match="list of texts"):
        fedexp.run("method=fedavg")
    assert not Path("outputs").exists()
    assert capsys.readouterr().err == ""


def test_a_run_that_failed_raises_and_can_be_looked_at() -> None:
    with pytest.raises(FedexpError, match="NaN or infinity"):
        fedexp.run([*QUICK, "local.lr=1e30"])
    failed = fedexp.load("fedavg")
    assert (
        failed.status == "failed" and failed.metrics == [] and failed.config["local"]["lr"] == 1e30
    )
    for look in ("result", "models"):
        with pytest.raises(StorageError, match="status is failed"):
            getattr(failed, look)


def networks(count: int, hidden: int = 6) -> list[nn.Module]:
    from fedexp.models.mlp import MLP

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [MLP(hidden=[hidden], **SHAPE) for _ in range(count)]


def test_models_from_elsewhere_are_fused() -> None:
    """The result is the weighted mean of the saved models.

    The test computes this mean.
    """
    nets = networks(3)
    counts = np.zeros((3, 10), dtype=int)
    counts[:, 0] = [1, 2, 5]
    # The node leaves out arguments that keep their defaults.
    node = {"_target_": "fedexp.models.mlp.MLP", "hidden": [6]}
    fedexp.save_models(
        "mine",
        [net.state_dict() for net in nets],
        node,
        class_counts=torch.from_numpy(counts),
        **SHAPE,
    )
    assert json.loads(Path("mine/clients.json").read_text())["num_examples"] == [1, 2, 5]
    fused = fedexp.run(["rounds=1", *QUICK[1:], "client_models.path=mine"])
    for name, value in fused.module().state_dict().items():
        states = [net.state_dict()[name].double() for net in nets]
        expected = (states[0] + 2 * states[1] + 5 * states[2]) / 8
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)


STRANGER = """
from pathlib import Path
from omegaconf import OmegaConf
from torch import nn
Path("ran").touch()
class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
"""


def test_module_named_by_a_models_header_is_imported_only_if_allowed() -> None:
    from fedexp.core.outcome import Outcome
    from fedexp.core.weights import ModelSpec, Weights
    from fedexp.storage.model_folder import save_outcome

    Path("strangermod.py").write_text(STRANGER)
    ran = fedexp.run(QUICK)
    (ran.folder / "result.json").unlink()
    tensors = {"weight": torch.ones(10, 64), "bias": torch.zeros(10)}
    stored = Weights(ModelSpec("strangermod.Net", ()), tensors, {})
    save_outcome(Outcome((stored,), "global"), None, ran.folder)

    with pytest.raises(StorageError, match=r"strangermod\.Net") as refused:
        fedexp.load("fedavg").module()
    assert not Path("ran").exists()
    with pytest.raises(ConfigError, match="list of texts"):
        fedexp.load("fedavg", allow_classes="strangermod.Net")
    assert "allow_classes=['strangermod.Net']" in str(refused.value)

    sys.path.insert(0, "")
    for allowed in ("strangermod.Net", "strangermod"):
        assert fedexp.load("fedavg", allow_classes=[allowed]).module()(torch.ones(1, 64)).sum()
    with pytest.raises(StorageError, match=r"strangermod\.Net"):
        _ = fedexp.load("fedavg", allow_classes=["stranger", "strangermod.N"]).models


def test_models_of_the_runs_own_config_need_no_permission() -> None:
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/own.yaml").write_text("_target_: tests.world.Softmax\n")
    ran = fedexp.run(["rounds=1", "clients=2", "model=own", "threads=1"])
    assert ran.module()(torch.ones(1, 1, 8, 8)).shape == (1, 10)
    with pytest.raises(StorageError, match=r"tests\.world\.Softmax"):
        _ = fedexp.load(ran.folder).models


def test_class_named_by_clients_json_is_not_imported() -> None:
    Path("strangermod2.py").write_text(STRANGER)
    fedexp.save_models(
        "mine",
        [net.state_dict() for net in networks(3)],
        {"_target_": "fedexp.models.mlp.MLP", "hidden": [6]},
        **SHAPE,
    )
    path = Path("mine/clients.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "_target_": "strangermod2.Net"}))
    with pytest.raises(ConfigError, match="unknown key '_target_'"):
        fedexp.run(["rounds=1", *QUICK[1:], "client_models.path=mine"])
    assert not Path("ran").exists()


def test_a_recorded_normalisation_must_be_the_runs() -> None:
    node = {"_target_": "fedexp.models.mlp.MLP", "hidden": [6]}
    fedexp.save_models(
        "raw", [net.state_dict() for net in networks(3)], node, mean=[], std=[], **SHAPE
    )
    foreign = ["client_models.path=raw", "client_models.data=partition"]
    command = ["rounds=1", *QUICK[1:], *foreign]
    with pytest.raises(ConfigError, match="another normalisation"):
        fedexp.run(command)
    assert fedexp.run([*command, "dataset.mean=[]", "dataset.std=[]"]).status == "done"


def test_buffers_travel_and_a_class_path_is_enough() -> None:
    nets = [nn.BatchNorm1d(4), nn.BatchNorm1d(4)]
    for number, net in enumerate(nets):
        assert net.running_mean is not None
        net.running_mean.fill_(number)
    node = {"_target_": "torch.nn.BatchNorm1d", "num_features": 4}
    fedexp.save_models(
        "norms", [net.state_dict() for net in nets], node, num_examples=[3, 4], **SHAPE
    )
    stored = ModelFolder.open(Path("norms"))
    assert stored.weights(1).buffers["running_mean"].tolist() == [1.0] * 4
    assert stored.weights(1).buffers["num_batches_tracked"].dtype == torch.int64
    assert (
        stored.clients is not None
        and stored.clients.num_examples == (3, 4)
        and stored.clients.class_counts is None
    )
    fedexp.save_models("plain", [{"fc.weight": torch.ones(10, 64)}], "tests.world.Softmax", **SHAPE)
    assert ModelFolder.open(Path("plain")).weights(0).module()(torch.ones(1, 1, 8, 8)).tolist() == [
        [64.0] * 10
    ]


@pytest.mark.parametrize("change", [
    {"mean": [0.5], "std": (0.2,)},
    {"mean": np.array([0.5]), "std": torch.tensor([0.2])},
    {"mean": [], "std": []},
    {"input_shape": (3, 8, 8), "mean": [0.5], "std": [0.2]},  # one number for all channels
    {"input_shape": np.array([1, 8, 8]), "num_classes": np.int64(10)},
    {"num_examples": torch.tensor([3, 4])},
    {"class_counts": [[np.int64(1)] * 10, list(torch.arange(10))]},
    {"class_counts": [np.arange(10), torch.arange(10)]},
    {"data": np.arange(6).reshape(2, 3), "data_sha256": "a" * 64},
    {"data": [range(3), torch.arange(3)], "data_sha256": "a" * 64},
    {"model": OmegaConf.create([{"_target_": "fedexp.models.mlp.MLP", "hidden": [6]}] * 2)},
    {"model": OmegaConf.create({"_target_": "fedexp.models.mlp.MLP", "hidden": [6]})},
])  # fmt: skip
def test_models_are_saved_with_arrays_tensors_and_config_nodes(change: dict[str, Any]) -> None:
    shape = change.get("input_shape", (1, 8, 8))
    width = int(np.prod(shape))
    states = {
        f"client{i}": {
            "hidden.0.weight": torch.ones(6, width),
            "hidden.0.bias": torch.ones(6),
            "output.weight": torch.ones(10, 6),
            "output.bias": torch.ones(10),
        }
        for i in range(2)
    }
    arguments: dict[str, Any] = {
        "state_dicts": states.values(),
        "model": {"_target_": "fedexp.models.mlp.MLP", "hidden": [6]},
        **SHAPE,
        **change,
    }
    fedexp.save_models(Path("mine"), **arguments)
    stored = ModelFolder.open(Path("mine"))
    assert stored.weights(1).params["hidden.0.weight"].shape == (6, width)
    assert stored.clients is not None
    if "class_counts" in change:
        assert stored.clients.class_counts is not None
        assert stored.clients.class_counts[1] == tuple(range(10))
    if "mean" in change:
        assert stored.clients.mean == tuple(float(number) for number in change["mean"])


@pytest.mark.parametrize(("change", "said"), [
    ({"state_dicts": []}, ["no models to save"]),
    ({"data": [None, None]}, ["'data[0]' has the wrong type"]),
    # Integers that are not uint8 would not be divided by 255
    ({"data": [(torch.ones(2, 1, 8, 8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))] * 2},
     ["data[0]", "of type uint8", "of type torch.int64"]),
    ({"data": [(torch.full((2, 1, 8, 8), np.nan), torch.zeros(2, dtype=torch.int64))] * 2},
     ["data[0]", "torch.float32, with NaN or infinity"]),
    ({"mean": [0.5], "std": []}, ["mean and std do not fit"]),
    ({"model": "fedexp.models.mlp.MPL"}, ["no class 'MPL'", "did you mean 'MLP'?"]),
    ({"model": {"_target_": "fedexp.models.mlp.MLP", "hiden": [6]}}, ["did you mean 'hidden'?"]),
    ({"model": {"_target_": "fedexp.models.mlp.MLP", "hidden": [7]}}, ["state_dicts[0]", "size mismatch"]),
    ({"num_examples": [1]}, ["expected 2, got 1"]),
    ({"num_examples": [1.5, 2.0]}, ["num_examples"]),
    ({"class_counts": [[1, 2]]}, ["expected 2, got 1"]),
    ({"class_counts": [[1] * 9] * 2}, ["class_counts[0]", "10 numbers (num_classes)", "9 numbers"]),
    ({"class_counts": [[1] * 10] * 2, "num_examples": [10, 5]}, ["class_counts[1]", "a sum of 5"]),
    ({"state_dicts": [{name: value / 0 for name, value in net.state_dict().items()}
                      for net in networks(2)]}, ["state_dicts[0]", "NaN or infinity: hidden.0"]),
])  # fmt: skip
def test_what_cannot_be_saved_is_refused(change: dict[str, Any], said: list[str]) -> None:
    arguments: dict[str, Any] = {
        "state_dicts": [net.state_dict() for net in networks(2)],
        "model": {"_target_": "fedexp.models.mlp.MLP", "hidden": [6]},
        **SHAPE,
    }
    with pytest.raises(FedexpError) as refused:
        fedexp.save_models("mine", **(arguments | change))
    for words in said:
        assert words in str(refused.value)
    assert not Path("mine").exists()
