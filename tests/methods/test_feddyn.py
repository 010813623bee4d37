"""FedDyn: tests of its minimiser in closed form, its fixed point, and an invariant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core import trees
from fedexp.core.data import Noise
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.net import Net
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.core.task import Batch
from fedexp.core.trees import Tree
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.tasks.classification import Classification
from tests.world import SOFTMAX, World, assert_same, make_data, make_world

A = 0.5


@dataclass(frozen=True)
class LeastSquares(Classification):
    """A task with half the squared distance of the output to the one-hot target.

    Every client's f_i is a quadratic.
    """

    cross_entropy: ClassVar[bool] = False

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        output = net(params, buffers, batch.x)
        return (output - F.one_hot(batch.y, output.shape[1])).square().sum(1).mean() / 2


def quadratics(
    method: str, sizes: tuple[int, ...], rounds: int, steps: int, *overrides: str
) -> World:
    """Return a world of linear models with full-batch steps and quadratic losses."""
    world = make_world(
        f"method={method}",
        "aggregator.weights=uniform",
        "local.batch_size=100",
        "local.epochs=null",
        f"local.steps={steps}",
        "local.lr=0.15",
        f"rounds={rounds}",
        *overrides,
        data=make_data(sizes, num_classes=2, seed=3),
        model=SOFTMAX,
    )
    world.env = replace(world.env, task=LeastSquares())
    return world


def normal_equations(world: World, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return H (features, features) and C (classes, features).

    The gradient of f_i at W is ``W H - C``.
    """
    index = world.data.partition.of(client)
    x = world.data.train.x[index].flatten(1).numpy()
    y = np.eye(2)[world.data.train.y[index].numpy()]
    return x.T @ x / len(x), y.T @ x / len(x)


def test_one_client_follows_its_exact_minimisers() -> None:
    """With N = 1, a round gives ``argmin f - <g, w> + (a/2) ||w - w^t||^2``.

    The test computes this minimiser by linear algebra in every round.
    """
    world = quadratics("feddyn", (32,), 3, 300, f"trainer.a={A}")
    H, C = normal_equations(world, 0)
    w, g, d = np.zeros((2, 4)), np.zeros((2, 4)), np.zeros((2, 4))
    for step in run(world.aggregator, world.env, Serial(), world.data):
        y = (C + g + A * w) @ np.linalg.inv(H + A * np.eye(4))
        g, d = g - A * (y - w), d + (y - w)
        w = y + d
        np.testing.assert_allclose(world.models(step.after)[0]["fc.weight"].numpy(), w, atol=1e-8)
        np.testing.assert_allclose(step.after.clients[0]["g_i"]["fc.weight"].numpy(), g, atol=1e-8)


def test_clients_that_differ_reach_the_minimiser_of_their_mean() -> None:
    """Clients with different data reach the minimiser of their mean objective.

    FedAvg's fixed point is biased and FedDyn's is not. At the fixed point, every g_i is
    the gradient of its client.
    """
    fedavg, feddyn = (quadratics(method, (32, 20, 26), 60, 5) for method in ("fedavg", "feddyn"))
    # The run is fastest if `a` has the order of magnitude of H.
    feddyn.env = replace(feddyn.env, trainer=replace(feddyn.env.trainer, a=1.0))
    parts = [normal_equations(feddyn, client) for client in range(3)]
    best = sum(C for _, C in parts) @ np.linalg.inv(sum(H for H, _ in parts))
    after = feddyn.run()
    biased, found = (
        fedavg.models(fedavg.run())[0]["fc.weight"].numpy(),
        feddyn.models(after)[0]["fc.weight"].numpy(),
    )
    assert np.abs(biased - best).max() > 1e-3
    np.testing.assert_allclose(found, best, atol=1e-6)
    for client, (H, C) in enumerate(parts):
        np.testing.assert_allclose(
            after.clients[client]["g_i"]["fc.weight"].numpy(), best @ H - C, atol=1e-5
        )


def test_the_first_round_trains_as_fedprox_and_moves_twice_as_far() -> None:
    feddyn = make_world("method=feddyn", f"trainer.a={A}", "rounds=1")
    fedprox = make_world(
        "method=fedprox", f"trainer.mu={A}", "rounds=1", "aggregator.weights=uniform"
    )
    assert_same(*([r.weights.params for r in first_results(world)] for world in (feddyn, fedprox)))
    start = fedprox.aggregator.init(fedprox.env)["weights"].params
    twice = trees.add(start, trees.sub(fedprox.models(fedprox.run())[0], start), alpha=2.0)
    assert_same(feddyn.models(feddyn.run()), [twice], 1e-12)


def first_results(world: World) -> list[ClientResult]:
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    return list(Serial().map(jobs, world.data))


@pytest.mark.parametrize("m", [4, 2])
def test_the_server_keeps_the_mean_over_all_who_can_take_part(m: int) -> None:
    """The server's state is the mean over all clients that can take part.

    D = -(1 / (a N)) sum_i g_i. A client without data does not count as a client.
    """
    world = make_world(
        "method=feddyn", f"trainer.a={A}", "rounds=6", data=make_data((20, 0, 13, 8, 20)), m=m
    )
    after = world.run()
    total = trees.zeros_like(after.state["server"]["d"])
    for own in after.clients.values():
        total = trees.add(total, own["g_i"], alpha=-1 / (A * 4))
    assert_same([after.state["server"]["d"]], [total], 1e-10)
    state, metrics = world.aggregator.update(
        world.aggregator.init(world.env), first_results(world), world.env
    )
    length = torch.cat([value.flatten() for value in state["server"]["d"].values()]).norm()
    assert metrics["server/d"] == pytest.approx(float(length), rel=1e-10) and length > 0


def test_stacked_is_serial() -> None:
    runs = [make_world("method=feddyn", data=make_data((16, 16, 16))) for _ in range(2)]
    engine = Vectorized(3, "linear")
    assert_same(runs[0].models(runs[0].run()), runs[1].models(runs[1].run(engine=engine)), 1e-10)
    assert engine.stacked_steps


def test_without_a_nothing_is_regularised() -> None:
    with pytest.raises(ConfigError, match="a must be positive"):
        make_world("method=feddyn", "trainer.a=0.0")
