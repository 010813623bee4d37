"""Precision and determinism settings apply to one run.

They are switched on for the run and switched off after it. A setting that is not
available is refused.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.config.keys import Config
from fedexp.core.engine import Engine, describe
from fedexp.core.errors import ConfigError
from fedexp.core.kernel import train_client
from fedexp.core.model_check import check_model
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.auto import Auto
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers
from fedexp.running.experiment import Experiment, choose_numerics
from fedexp.running.run_engine import first_numerics
from fedexp.runtime.numerics import use_numerics
from tests.engines.compare import assert_same_results
from tests.world import CPU, make_data, make_world

BASE = Numerics(engine={}, threads=1, device="cpu", dtype="float32")
CNN = ModelSpec.of(compose(["model=lenet"])["model"], (3, 32, 32), 10)


def switches() -> dict[str, Any]:
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,
    }


@pytest.mark.parametrize("before", [True, False])
def test_switches_are_set_for_a_run_and_put_back(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = switches()
    with use_numerics(BASE):
        exact = {
            "products": "highest",
            "convolutions": False,
            "deterministic": False,
            "benchmark": False,
        }
        assert switches() == found | exact
    with use_numerics(replace(BASE, precision="tf32")):
        assert switches() == found | exact | {"products": "high", "convolutions": True}
    with use_numerics(replace(BASE, cudnn_benchmark=True)):
        assert switches() == found | exact | {"benchmark": True}
    with pytest.raises(ZeroDivisionError), use_numerics(replace(BASE, deterministic=True)):
        assert switches() == found | exact | {
            "deterministic": True,
            "benchmark": False,
            "workspace": ":4096:8",
            "fills": False,
        }
        raise ZeroDivisionError
    assert switches() == found


def test_type_of_new_tensors_is_float32_in_a_run() -> None:
    torch.set_default_dtype(torch.float64)  # as a plug-in may do when it is imported
    try:
        with use_numerics(BASE):
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_numerics_that_were_stored_before_a_key_existed_are_resumed(tmp_path: Path) -> None:
    config = Config.of(compose(["threads=1", "device=cpu", "cudnn_benchmark=true"]))

    def once(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in wanted.items() if key != "cudnn_benchmark"}

    notes: list[str] = []
    folder = SimpleNamespace(path=tmp_path, once=once)
    found = first_numerics(config, Serial(), folder, notes.append)  # type: ignore[arg-type]
    assert not found.cudnn_benchmark
    assert "cudnn_benchmark" in notes[0]


@pytest.mark.parametrize(
    ("engine", "noted"),
    [(Serial(), True), (Workers(), False), (Workers(threads=2), True), (Auto(), False)],
)
def test_stored_threads_are_those_of_each_process(
    engine: Engine, noted: bool, tmp_path: Path
) -> None:
    """With two processes of one thread each, the same command has two threads again."""
    config = Config.of(compose(["threads=2", "device=cpu"]))

    def once(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "threads": 1, "engine": describe(Serial())}

    notes: list[str] = []
    folder = SimpleNamespace(path=tmp_path, once=once)
    first_numerics(config, engine, folder, notes.append)  # type: ignore[arg-type]
    assert bool(notes) is noted


def test_a_workspace_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with use_numerics(replace(BASE, deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_config_decides_the_numerics_and_refuses_what_does_not_go_together() -> None:
    experiment = Experiment.of(compose(["precision=bf16", "deterministic=true", "device=cpu"]))
    numerics = choose_numerics(experiment.config)
    assert (numerics.precision, numerics.deterministic, numerics.dtype) == ("bf16", True, "float32")
    for precision in ("bf16", "tf32"):
        with pytest.raises(ConfigError, match="float64"):
            Experiment.of(compose([f"precision={precision}", "dtype=float64"]))
    with pytest.raises(ConfigError, match="precision"):
        Experiment.of(compose(["precision=bf61"]))


def test_bf16_rounds_the_network_in_training_and_nothing_else() -> None:
    weights = Weights.init(CNN, 1, CPU, torch.float32)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exact, rounded = Net(CNN, CPU, torch.float32), Net(CNN, CPU, torch.float32, "bf16")

    def output(net: Net, training: bool) -> torch.Tensor:
        net.train(training)
        return net(weights.params, weights.buffers, x)

    assert torch.equal(output(exact, False), output(rounded, False))  # evaluation mode
    a, b = output(exact, True), output(rounded, True)
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)  # bf16 has 8 bits
    # TF32 is a setting of the device and not of the net.
    assert torch.equal(output(Net(CNN, CPU, torch.float32, "tf32"), True), a)


def test_clients_trained_under_bf16_stay_in_their_dtype() -> None:
    world = make_world("method=scaffold", "dtype=float32", "model=mlp")
    job = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))[0]
    samples = replace(world.data.train, dtype=torch.float32)
    index = torch.from_numpy(world.data.partition.of(job.client))
    results = [
        train_client(
            job,
            Net(job.start.spec, CPU, torch.float32, precision),
            samples,
            index,
            world.data.num_classes,
        )
        for precision in ("float32", "bf16", "bf16")
    ]
    for result in results:
        trees = [result.weights.params, *result.payload.values(), *(result.state or {}).values()]
        assert {value.dtype for tree in trees for value in tree.values()} == {torch.float32}
    exact, first, again = ([*result.weights.params.values()] for result in results)
    assert any(not torch.equal(a, b) for a, b in zip(exact, first, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for a, b in zip(exact, first, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


# ---------------------------------------------------------------- channels last


def one_step(x: torch.Tensor) -> tuple[Weights, list[torch.Tensor]]:
    weights = Weights.init(CNN, 1, CPU, torch.float32)
    params = {name: value.clone().requires_grad_() for name, value in weights.params.items()}
    output = Net(CNN, CPU, torch.float32)(params, weights.buffers, x)
    return weights, [output, *torch.autograd.grad(output.square().mean(), list(params.values()))]


def test_channels_last_gives_the_same_numbers(request: pytest.FixtureRequest) -> None:
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plain, expected = one_step(x)
    assert all(value.is_contiguous() for value in plain.params.values())
    request.getfixturevalue("channels_last_on_cpu")
    weights, found = one_step(x)
    maps = [value for value in weights.params.values() if value.dim() == 4]
    assert maps
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in maps)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    again = Weights(CNN, dict(plain.params), plain.buffers)  # as from a checkpoint
    assert all(torch.equal(value, plain.params[name]) for name, value in again.params.items())
    assert [value.stride() for value in again.params.values()] == [
        value.stride() for value in weights.params.values()
    ]
    # The tensors have this layout already, so that nothing is copied.
    assert Weights(CNN, again.params, again.buffers).params is again.params


@pytest.mark.usefixtures("channels_last_on_cpu")
def test_convolutions_with_channels_last_are_stacked() -> None:
    w = make_world(data=make_data((12, 12, 12)), model={"_target_": "tests.core.test_kernel.Small"})
    jobs = next_jobs(w.aggregator, w.env, Snapshot(0, w.aggregator.init(w.env)))
    engine = Vectorized(stack=3)
    found = list(engine.map(jobs, w.data))
    assert engine.stacked_steps == sum(result.num_steps for result in found) > 0
    assert_same_results(found, list(Serial().map(jobs, w.data)), 1e-9)


class Views(torch.nn.Module):
    """A model that flattens with `view`, which requires contiguous feature maps."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.conv2 = torch.nn.Conv2d(4, 4, 3)
        self.fc = torch.nn.Linear(4 * 16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv2(self.conv(x))
        return self.fc(x.view(x.shape[0], -1))


class OwnLayout(Views):
    channels_last = False


def test_a_model_that_needs_another_layout_is_refused_in_time_or_says_so(
    request: pytest.FixtureRequest,
) -> None:
    views, own = (
        ModelSpec.of({"_target_": f"tests.engines.test_numerics.{k}"}, (1, 8, 8), 3)
        for k in ("Views", "OwnLayout")
    )
    check_model(views, (1, 8, 8), (3,))  # the check passes on the CPU
    with pytest.raises(ConfigError, match="channels last") as error:
        check_model(views, (1, 8, 8), (3,), "cuda")
    assert "channels_last = False" in str(error.value)
    check_model(own, (1, 8, 8), (3,), "cuda")
    check_model(CNN, (3, 32, 32), (10,), "cuda")
    request.getfixturevalue("channels_last_on_cpu")
    assert all(
        value.is_contiguous() for value in Weights.init(own, 0, CPU, torch.float32).params.values()
    )
