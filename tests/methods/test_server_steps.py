"""FedNova, the FedOpt family and FedExP equal formulas that are computed per tensor."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedexp.core.jobs import ClientResult
from fedexp.core.local_training import LocalTraining
from fedexp.core.trainer import RoundStats
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.methods.fedadam import FedAdam
from fedexp.methods.fedavg import PlainTrainer
from fedexp.methods.fedavgm import FedAvgM
from fedexp.methods.fedexp import FedExP
from fedexp.methods.fedprox import FedProx
from fedexp.methods.fedyogi import FedYogi
from tests.world import make_data, make_world

SPEC = ModelSpec("tests.world.Softmax", ())


def local_training(lr: float = 0.1, momentum: float = 0.0) -> LocalTraining:
    """Return the settings of a round whose `lr` is half the first round's."""
    return LocalTraining(None, 1, 8, "sgd", lr, 1.0, momentum, 0.0, None)


def stats(norms: tuple[float, ...] = (), lr: float = 0.1, lr_0: float = 0.1) -> RoundStats:
    m = max(1, len(norms))
    return RoundStats(
        round=0,
        N=m,
        m=m,
        share=1.0,
        lr=lr,
        lr_0=lr_0,
        p=(1 / m,) * m,
        tau=(1,) * m,
        squared_norms=norms,
    )


def tree(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def drive(optimizer, directions):
    """Take one step per direction and return the path of the weights."""
    params = tree(*np.zeros(len(directions[0])))
    state = optimizer.init(Weights(SPEC, params, {}))
    path = []
    for direction in directions:
        state, params, _ = optimizer.step(state, params, tree(*direction), stats())
        path.append(params["w"].numpy().copy())
    return path


DIRECTIONS = np.random.default_rng(0).normal(size=(6, 5)) * 0.01


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_is_torch_sgd_with_momentum(nesterov: bool) -> None:
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.SGD([w], lr=0.7, momentum=0.9, nesterov=nesterov)
    for direction, ours in zip(
        DIRECTIONS, drive(FedAvgM(lr=0.7, nesterov=nesterov), DIRECTIONS), strict=True
    ):
        w.grad = torch.tensor(-direction)
        reference.step()
        np.testing.assert_allclose(ours, w.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("optimizer", [FedAdam(), FedYogi()])
def test_adaptive_steps_follow_algorithm_2(optimizer: FedAdam) -> None:
    b, v, w = np.zeros(5), np.full(5, optimizer.tau**2), np.zeros(5)
    for direction, ours in zip(DIRECTIONS, drive(optimizer, DIRECTIONS), strict=True):
        b = optimizer.beta_1 * b + (1 - optimizer.beta_1) * direction
        if isinstance(optimizer, FedYogi):
            v = v - (1 - optimizer.beta_2) * direction**2 * np.sign(v - direction**2)
        else:
            v = optimizer.beta_2 * v + (1 - optimizer.beta_2) * direction**2
        w = w + optimizer.lr * b / (np.sqrt(v) + optimizer.tau)
        np.testing.assert_allclose(ours, w, rtol=1e-12)


def test_yogis_second_moment_stays_positive() -> None:
    optimizer = FedYogi(beta_2=0.5)
    v = tree(*[1e-6] * 5)
    for direction in DIRECTIONS * 100:
        v = optimizer.second_moment(v, {"w": torch.tensor(direction**2)})
        assert float(v["w"].min()) >= 0


def test_first_yogi_step_from_zero_is_adams() -> None:
    squared = tree(*(DIRECTIONS[0] ** 2))
    zero = tree(*np.zeros(5))
    a, y = FedAdam().second_moment(zero, squared)["w"], FedYogi().second_moment(zero, squared)["w"]
    torch.testing.assert_close(a, y, rtol=1e-12, atol=0)


@pytest.mark.parametrize("m", [2, 3, 8])
def test_fedexp_extrapolates_orthogonal_updates_by_half_their_number(m: int) -> None:
    """With m orthogonal updates of equal norm and eps = 0, eta_g is max(1, m / 2)."""
    mean = tree(*[2.0 / m] * m)
    assert FedExP(eps=0.0).eta(mean, stats((4.0,) * m)) == pytest.approx(max(1.0, m / 2))


def test_fedexp_never_shrinks_and_ignores_agreement() -> None:
    assert FedExP(eps=0.0).eta(tree(3.0, 4.0), stats((25.0, 25.0))) == 1.0
    assert FedExP(eps=1e9).eta(tree(1e-3, 0.0), stats((25.0, 25.0))) == 1.0
    assert FedExP(eps=0.0).eta(tree(0.0, 0.0), stats((0.0, 0.0))) == 1.0


def test_fedexp_is_scale_free_if_eps_scales_too() -> None:
    u, norms, s = tree(0.5, 0.1), (3.0, 2.0, 4.0), 7.0
    a = FedExP(eps=0.01).eta(u, stats(norms))
    b = FedExP(eps=0.01 * s**2).eta(tree(0.5 * s, 0.1 * s), stats(tuple(n * s**2 for n in norms)))
    assert a == pytest.approx(b, rel=1e-12) and a > 1


def test_fedexp_eps_forms() -> None:
    u, norms = tree(0.1, 0.1), (3.0, 2.0)
    paper = FedExP(eps=0.02, eps_scaling="code").eta(u, stats(norms))
    assert paper == pytest.approx(2.5 / (2 * (0.02 + 2 * 0.02)))
    decayed = FedExP(eps=0.02).eta(u, stats(norms, lr=0.05, lr_0=0.1))
    assert decayed == pytest.approx(2.5 / (2 * (0.02 + 0.02 / 4)))


def test_fedexp_in_a_round_uses_the_updates_norms_and_evaluates_the_mean_of_two() -> None:
    world = make_world("method=fedexp", "rounds=1", "server_optimizer.eps=0.0")
    start = world.aggregator.init(world.env)["weights"].params
    jobs = world.aggregator.plan(world.aggregator.init(world.env), world.env)
    from fedexp.engines.serial import Serial

    updates = [
        np.concatenate([(r.weights.params[k] - start[k]).numpy().ravel() for k in start])
        for r in Serial().map(jobs, world.data)
    ]
    p = world.data.partition.sizes / world.data.partition.sizes.sum()
    mean = sum(pi * u for pi, u in zip(p, updates, strict=True))
    eta = max(
        1.0, sum(pi * (u @ u) for pi, u in zip(p, updates, strict=True)) / (2 * (mean @ mean))
    )
    state = world.run().state
    flat = {
        k: np.concatenate([state[k].params[n].numpy().ravel() for n in start])
        for k in ("weights", "evaluated")
    }
    begin = np.concatenate([v.numpy().ravel() for v in start.values()])
    np.testing.assert_allclose(flat["weights"], begin + eta * mean, rtol=1e-9)
    np.testing.assert_allclose(flat["evaluated"], begin + eta * mean / 2, rtol=1e-9)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 2, 7])
def test_fednova_normaliser_is_its_recursion(rho: float, tau: int) -> None:
    k = a = 0.0
    for _ in range(tau):
        k = rho * k + 1
        a += k
    assert PlainTrainer().normalizer(tau, local_training(momentum=rho)) == pytest.approx(
        a, rel=1e-12
    )


def test_fednova_normaliser_with_a_proximal_pull() -> None:
    lr, mu, tau = 0.1, 0.3, 9
    closed = (1 - (1 - lr * mu) ** tau) / (lr * mu)
    assert FedProx(mu=mu).normalizer(tau, local_training(lr)) == pytest.approx(closed, rel=1e-12)
    assert FedProx(mu=0.0).normalizer(tau, local_training(lr)) == tau
    assert FedProx(mu=1e-9).normalizer(tau, local_training(lr, 0.5)) == pytest.approx(
        PlainTrainer().normalizer(tau, local_training(lr, 0.5))
    )


@pytest.mark.parametrize("momentum", ["0.0", "0.5"])
def test_fednova_round_is_the_formula(momentum: str) -> None:
    world = make_world("method=fednova", "rounds=1", f"local.momentum={momentum}", "local.epochs=3")
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    assert len({r.num_steps for r in results}) > 1
    sizes = world.data.partition.sizes
    a = [world.env.trainer.normalizer(r.num_steps, world.env.local_training) for r in results]
    p = sizes / sizes.sum()
    effective = float(sum(p * a))
    after = world.run().state["weights"].params
    for name, old in state["weights"].params.items():
        step = sum(
            pi * (r.weights.params[name] - old) / ai
            for pi, ai, r in zip(p, a, results, strict=True)
        )
        torch.testing.assert_close(after[name], old + effective * step, rtol=1e-10, atol=1e-12)


def test_fednova_normalises_by_the_lr_of_the_round() -> None:
    """FedNova normalises by the learning rate of the round.

    In the third round it is 0.1. With a pull of 2, a_i = (1 - 0.8^tau_i) / 0.2.
    """
    keys = ("trainer=fedprox", "trainer.mu=2.0", "local.lr=0.4", "local.lr_decay=0.5")
    world = make_world("method=fednova", *keys)
    stats = RoundStats(2, 4, 2, 0.5, 0.1, 0.4, p=(0.75, 0.25), tau=(2, 1))
    assert world.aggregator.factor({}, stats, world.env.at(2)) == pytest.approx(0.75 * 1.8 + 0.25)  # type: ignore[attr-defined]


def test_fednova_direction_ignores_how_many_steps_a_client_took() -> None:
    """FedNova's direction does not depend on the numbers of steps.

    Under a constant gradient, a client with twice the steps does not turn the
    direction.
    """
    world = make_world("method=fednova", "rounds=1", data=make_data((10, 10)))
    state = world.aggregator.init(world.env)
    old = state["weights"]
    directions = {}
    for tau in (5, 10):
        results = []
        for client, steps in ((0, tau), (1, 5)):
            moved = {
                k: v - 0.01 * steps * (1 + client + torch.arange(v.numel()).reshape(v.shape) % 2)
                for k, v in old.params.items()
            }
            weights = dataclasses.replace(old, params=moved)
            results.append(ClientResult(client, weights, 10, steps, {}, None, {"loss": 0.0}))
        after, _ = world.aggregator.update(state, results, world.env)
        step = torch.cat(
            [(after["weights"].params[k] - v).flatten() for k, v in old.params.items()]
        )
        directions[tau] = step / step.norm()
    torch.testing.assert_close(directions[5], directions[10], rtol=1e-10, atol=1e-12)
    assert math.isclose(float(directions[5].norm()), 1.0, rel_tol=1e-9)


def test_updates_are_as_long_as_they_entered_fednovas_mean() -> None:
    """FedExP gets the updates with the scale that they have in FedNova's mean.

    For four clients, u_i / a_i are orthogonal and equally long. Therefore eta_g is half
    the number of clients, for any numbers of steps.
    """
    world = make_world(
        "method=fednova",
        "server_optimizer=fedexp",
        "server_optimizer.eps=0",
        "rounds=1",
        data=make_data((10,) * 4),
    )
    state = world.aggregator.init(world.env)
    old = state["weights"]
    results = []
    for client, steps in enumerate((5, 10, 15, 5)):
        moved = {
            k: v + 0.01 * steps * (torch.arange(v.numel()) % 4 == client).reshape(v.shape)
            for k, v in old.params.items()
            if v.numel() % 4 == 0
        }
        weights = dataclasses.replace(old, params={**old.params, **moved})
        results.append(ClientResult(client, weights, 10, steps, {}, None, {"loss": 0.0}))
    _, metrics = world.aggregator.update(state, results, world.env)
    assert metrics["server/factor"] == pytest.approx(8.75) and metrics[
        "server/eta_g"
    ] == pytest.approx(2.0)
