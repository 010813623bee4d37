"""MOON: tests of its loss in torch, its first round, and refused settings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.runner import run
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.running.experiment import Experiment
from tests.world import MLP, assert_same, make_data, make_world

NORMALISED = {"_target_": "tests.engines.plugins.Normalised"}
MU, TAU, LR = 3.0, 0.4, 0.2


class Headless(nn.Module):
    """A network whose output is a mean over positions. It has no linear layer."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.conv(x).mean((2, 3))
        return output


def features(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.relu(x.flatten(1) @ params["hidden.0.weight"].T + params["hidden.0.bias"])


def written_out(
    params: dict[str, Tensor],
    received: dict[str, Tensor],
    last: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
):
    """Return the loss and the contrast term, as printed in the paper.

    The loss is cross-entropy plus Eq. 3, with exponentials and a ratio.
    """
    z = features(params, x)
    p = (z @ params["output.weight"].T + params["output.bias"]).softmax(1)

    def similar(other: dict[str, Tensor]) -> Tensor:
        theirs = features(other, x)
        return torch.exp((z * theirs).sum(1) / (z.norm(dim=1) * theirs.norm(dim=1)) / TAU)

    contrast = -torch.log(similar(received) / (similar(received) + similar(last))).mean()
    return -torch.log(p[torch.arange(len(y)), y]).mean() + MU * contrast, contrast


def test_rounds_are_those_of_the_loss_written_out() -> None:
    """The rounds equal those of the written-out loss with torch's autograd.

    There are two clients and three rounds of three full-batch steps.
    """
    world = make_world(
        "method=moon",
        f"trainer.mu={MU}",
        f"trainer.temperature={TAU}",
        f"local.lr={LR}",
        "local.batch_size=100",
        "local.epochs=3",
        "aggregator.weights=uniform",
        data=make_data((12, 12)),
        model={**MLP, "hidden": [24]},  # so wide that no features are all zero
    )
    w = world.aggregator.init(world.env)["weights"].params
    last = [w, w]
    logged = []
    for _ in range(3):
        received, contrasts = w, []
        for client in range(2):
            index = torch.from_numpy(world.data.partition.of(client))
            x, y = world.data.train.x[index], world.data.train.y[index]
            params = received
            for _ in range(3):
                at = {name: value.clone().requires_grad_() for name, value in params.items()}
                loss, contrast = written_out(at, received, last[client], x, y)
                grads = torch.autograd.grad(loss, list(at.values()))
                params = {
                    n: v.detach() - LR * g for (n, v), g in zip(at.items(), grads, strict=True)
                }
                contrasts.append(float(contrast.detach()))
            last[client] = params
        w = {name: (last[0][name] + last[1][name]) / 2 for name in w}
        logged.append(sum(contrasts) / len(contrasts))
    steps = list(run(world.aggregator, world.env, Serial(), world.data))
    assert_same(world.models(steps[-1].after), [w], 1e-9)
    for client in range(2):
        assert_same([steps[-1].after.clients[client]["params"]], [last[client]], 1e-9)
    assert [step.metrics["train/contrast"] for step in steps] == pytest.approx(logged, rel=1e-9)
    assert abs(logged[2] - math.log(2)) > 1e-3


def test_the_first_round_is_fedavgs_and_later_ones_are_not() -> None:
    def models(method: str, rounds: int):
        world = make_world(f"method={method}", f"rounds={rounds}")
        return world.models(world.run())

    assert_same(models("moon", 1), models("fedavg", 1), 1e-12)
    with pytest.raises(AssertionError):
        assert_same(models("moon", 2), models("fedavg", 2), 1e-6)
    world = make_world("method=moon", "rounds=1")
    (step,) = run(world.aggregator, world.env, Serial(), world.data)
    assert step.metrics["train/contrast"] == pytest.approx(math.log(2))


def test_with_mu_zero_nothing_is_kept() -> None:
    world = make_world(
        "method=moon", "trainer.mu=0.0", model={"_target_": "tests.methods.test_moon.Headless"}
    )
    assert not world.run().clients


def test_moon_other_models_do_not_change_batch_norm_statistics() -> None:
    """The other models of MOON do not change BatchNorm's statistics.

    BatchNorm's counter shows one training batch per step. The last model is stored with
    its statistics.
    """
    world = make_world("method=moon", "rounds=2", model=NORMALISED)
    plain = make_world("method=fedavg", "rounds=2", model=NORMALISED)
    after = world.run()
    counters = [
        w.run().state["weights"].buffers["norm.num_batches_tracked"] for w in (world, plain)
    ]
    assert torch.equal(*counters)
    kept = [own["buffers"]["norm.num_batches_tracked"] for own in after.clients.values()]
    # These are the statistics after its training and not the received ones.
    assert max(kept) == counters[0]


def test_stacked_is_serial() -> None:
    runs = [make_world("method=moon", data=make_data((16, 16, 16))) for _ in range(2)]
    engine = Vectorized(3, "vmap")
    assert_same(runs[0].models(runs[0].run()), runs[1].models(runs[1].run(engine=engine)), 1e-9)
    assert engine.stacked_steps


@pytest.mark.parametrize("method", ["local", "ensemble", "centralized"])
def test_clients_that_get_their_own_model_back_are_refused(method: str) -> None:
    with pytest.raises(
        ConfigError, match="trainer Moon compares a client's model with the one it receives"
    ):
        Experiment.of(compose([f"method={method}", "trainer=moon"]))
    assert Experiment.of(compose([f"method={method}", "trainer=moon", "trainer.mu=0.0"]))


def test_networks_without_features_are_refused_before_training() -> None:
    headless = {"_target_": "tests.methods.test_moon.Headless"}
    config = compose(["method=moon"]).with_values(model=headless)
    with pytest.raises(ConfigError, match="no linear layer"):
        Experiment.of(config)
