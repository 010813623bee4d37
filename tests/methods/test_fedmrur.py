"""Tests of FedCM, FedSAM, MoFedSAM and FedMRUR.

They cover switches, plain loops, fixed points and geometry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.kernel import batch_ranges, batches
from fedexp.core.net import Net
from fedexp.core.runner import run
from fedexp.core.task import Batch
from fedexp.core.trainer import RoundStats, ServerUpdate
from fedexp.core.trees import Tree
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.methods.fedcm import FedCM
from fedexp.methods.fedmrur.lorentz import squared_distance
from fedexp.methods.fedmrur.normalized_mean import amplification
from fedexp.methods.fedmrur.trainer import FedMRUR
from fedexp.methods.mofedsam import MoFedSAM
from fedexp.running.experiment import Experiment
from fedexp.tasks.classification import Classification
from tests.engines.compare import second_round_jobs
from tests.methods.test_averaging import DECAY, FULL_BATCH, LR, TAU, gradient, results_of
from tests.world import SOFTMAX, World, assert_same, make_data, make_world

ENGINES = {
    "serial": Serial,
    "linear": lambda: Vectorized(3, "linear"),
    "vmap": lambda: Vectorized(3, "vmap"),
}
UNIFORM = "aggregator.weights=uniform"

# ---------------------------------------------------------------- along the switches

SWITCHES = {
    "fedmrur without H, rho and N is fedcm": (
        ("method=fedmrur", "trainer.gamma=0.0", "trainer.rho=0.0", "aggregator=mean"),
        ("method=fedcm",),
    ),
    "fedmrur without H and N is mofedsam": (
        ("method=fedmrur", "trainer.gamma=0.0", "aggregator=mean"),
        ("method=mofedsam",),
    ),
    "fedmrur without H is fedmrur_n": (
        ("method=fedmrur", "trainer.gamma=0.0"),
        ("method=fedmrur_n",),
    ),
    "fedmrur without N is fedmrur_h": (
        ("method=fedmrur", "aggregator=mean"),
        ("method=fedmrur_h",),
    ),
    "mofedsam without momentum is fedsam": (
        ("method=mofedsam", "trainer.alpha=1.0"),
        ("method=fedsam", UNIFORM),
    ),
    "mofedsam without ascent is fedcm": (("method=mofedsam", "trainer.rho=0.0"), ("method=fedcm",)),
    "fedcm without momentum is fedavg": (
        ("method=fedcm", "trainer.alpha=1.0"),
        ("method=fedavg", UNIFORM),
    ),
    "fedsam without ascent is fedavg": (("method=fedsam", "trainer.rho=0.0"), ("method=fedavg",)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("switch", SWITCHES)
def test_methods_are_each_other_along_their_switches_to_the_bit(switch: str, engine: str) -> None:
    common = ("rounds=2", "local.clip=0.5", "local.weight_decay=0.05", "local.lr_decay=0.9")
    worlds = [make_world(*which, *common, data=make_data((18,) * 3)) for which in SWITCHES[switch]]
    assert_same(*(world.models(world.run(engine=ENGINES[engine]())) for world in worlds))


# ---------------------------------------------------------------- plain loops

ALPHA, RHO, LAMBDA = 0.3, 0.4, 0.05
SET = (f"trainer.alpha={ALPHA}", f"trainer.rho={RHO}")
NO_H = "trainer.gamma=0.0"
# Each case has the overrides and the arguments rho, normalised, source and printed of
# the loop.
CASES = {
    "fedcm": (("method=fedcm", f"trainer.alpha={ALPHA}"), 0.0, False, "applied", False),
    "inside": (
        ("method=fedcm", f"trainer.alpha={ALPHA}", "trainer.decay_inside_mix=true"),
        0.0,
        False,
        "inside",
        False,
    ),
    "mofedsam": (("method=mofedsam", *SET), RHO, False, "applied", False),
    "normalised": (("method=fedmrur_n", *SET), RHO, True, "applied", False),
    "momentum from the mean": (
        ("method=fedmrur", *SET, NO_H, "trainer.momentum_from=plain"),
        RHO,
        True,
        "mean",
        False,
    ),
    "N with momentum from the mean": (
        ("method=fedmrur_n", *SET, "trainer.momentum_from=plain"),
        RHO,
        True,
        "mean",
        False,
    ),
    "printed": (("method=fedmrur_printed", *SET, NO_H), RHO, True, "applied", True),
}


def plain_loop(
    world: World, rho: float, normalised: bool, source: str, printed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return w and Delta after three rounds of a plain loop."""
    w, delta = np.zeros((3, 4)), np.zeros((3, 4))
    for round in range(3):
        moved, lr = [], LR * DECAY**round
        for client in world.env.at(round).sample():
            y = w.copy()
            for _ in range(TAU):
                g = gradient(world, client, y)
                if rho:
                    g = gradient(world, client, y + rho * g / (np.linalg.norm(g) + 1e-7))
                decay = (ALPHA if source == "inside" else 1) * LAMBDA * y
                y = y - lr * (ALPHA * g + (1 - ALPHA) * delta + decay)
            moved.append(y - w)
        mean = np.mean(moved, 0)
        length = np.mean([np.linalg.norm(u) for u in moved])
        aggregate = mean * length / np.linalg.norm(mean) if normalised else mean
        if printed:
            w, delta = w - aggregate, aggregate
        else:
            w, delta = w + aggregate, -(mean if source == "mean" else aggregate) / (TAU * lr)
    return w, delta


@pytest.mark.parametrize("case", CASES)
def test_fedmrur_three_rounds_equal_a_plain_loop(case: str) -> None:
    """Three rounds equal a plain loop.

    The problem is softmax regression with full-batch steps and a decaying step size.
    Two of four clients take part per round. The printed variant ascends.
    """
    overrides, *how = CASES[case]
    extra = (*FULL_BATCH, "rounds=3", f"local.weight_decay={LAMBDA}")
    world = make_world(*overrides, *extra, data=make_data((20, 12, 20, 12)), model=SOFTMAX, m=2)
    w, delta = plain_loop(world, *how)
    assert np.abs(w).max() > 0.1
    *_, last = run(world.aggregator, world.env, Serial(), world.data)
    state = last.after.state
    torch.testing.assert_close(
        state["weights"].params["fc.weight"], torch.from_numpy(w), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(
        state["shared"]["Delta"]["fc.weight"], torch.from_numpy(delta), rtol=1e-9, atol=1e-12
    )
    assert last.metrics["server/Delta"] == pytest.approx(np.linalg.norm(delta))


NAIVE = [
    ("penultimate", "mean_exp"),
    ("logits", "exp_mean"),
    ("penultimate", "exp_sum"),
    ("logits", "sum_exp"),
]


def naive_distance(z: Tensor, a: Tensor, beta: float) -> Tensor:
    """Return the squared distance of the lifted points by its definition."""
    z_0, a_0 = ((beta + (each**2).sum(1)).sqrt() for each in (z, a))
    return -2 * beta - 2 * (-z_0 * a_0 + (z * a).sum(1))


def naive_reduction(d2: Tensor, sigma: float, reduction: str) -> Tensor:
    first, second = reduction.split("_")
    by = {"mean": torch.mean, "sum": torch.sum}
    return by[first]((d2 / sigma).exp()) if second == "exp" else (by[second](d2) / sigma).exp()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("layer", "reduction"), NAIVE)
def test_a_clients_round_is_its_formula(layer: str, reduction: str, engine: str) -> None:
    """A client's round equals its formula.

    In the reference loop with torch, H is in both gradients. Mixing, clipping and decay
    follow in this order. All measured scalars are compared.
    """
    gamma, sigma, beta, rho, alpha = 0.5, 0.3, 0.7, 0.2, 0.4
    values = f"gamma={gamma} sigma={sigma} beta={beta} rho={rho} alpha={alpha} layer={layer} reduction={reduction}"
    trainer = [f"trainer.{value}" for value in (*values.split(), "measure_gradient=true")]
    local = ("local.lr=0.3", "local.clip=0.2", "local.weight_decay=0.1", "local.epochs=2")
    world = make_world("method=fedmrur", *trainer, *local, data=make_data((18,) * 3))
    jobs, runs = second_round_jobs(world), ENGINES[engine]()
    for job, result in zip(jobs, runs.map(jobs, world.data), strict=True):
        module, frozen = (job.start.module().train() for _ in range(2))
        live, local_training = list(module.parameters()), job.local_training
        delta = torch.cat(
            [job.shared["Delta"][name].flatten() for name, _ in module.named_parameters()]
        )
        assert float(delta.norm()) > 0

        def represented(net: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
            features = F.relu(net.hidden[0](x.flatten(1)))
            logits = net.output(features)
            return (features if layer == "penultimate" else logits), logits

        def parts(batch: Batch, module=module, frozen=frozen) -> tuple[Tensor, ...]:
            (z, logits), (a, _) = represented(module, batch.x), represented(frozen, batch.x)
            d2 = naive_distance(z, a.detach(), beta)
            return (
                F.cross_entropy(logits, batch.y),
                naive_reduction(d2, sigma, reduction),
                d2.mean(),
                z,
            )

        def flat(loss: Tensor, live=live) -> Tensor:
            return torch.cat([g.flatten() for g in torch.autograd.grad(loss, live)])

        measured = []
        index = torch.from_numpy(world.data.partition.of(job.client))
        schedule = list(batch_ranges(len(index), local_training, 1))
        for batch in batches(job, world.data.train, index, schedule, None):  # type: ignore[arg-type]
            loss, R, d2, z = parts(batch)
            pull, push = (
                torch.autograd.grad(part, z, retain_graph=True)[0].norm()
                for part in (gamma * R, loss)
            )
            measured.append(
                [(loss + gamma * R).item(), d2.item(), R.item() - 1, float(pull / push)]
            )
            g = flat(loss + gamma * R)
            here = torch.nn.utils.parameters_to_vector(live).detach().clone()
            torch.nn.utils.vector_to_parameters(here + rho * g / (g.norm() + 1e-7), live)
            loss, R, *_ = parts(batch)
            v = alpha * flat(loss + gamma * R) + (1 - alpha) * delta
            v = (
                v * min(1.0, local_training.clip / (float(v.norm()) + 1e-6))
                + local_training.weight_decay * here
            )
            torch.nn.utils.vector_to_parameters(here - local_training.lr * v, live)
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                result.weights.params[name], value.detach(), rtol=1e-8, atol=1e-10
            )
        names = ("loss", "lorentz", "hyperbolic", "hyperbolic_gradient")
        expected = dict(zip(names, np.mean(measured, 0), strict=True))
        assert expected["lorentz"] > 1e-4
        assert {name: result.metrics[name] for name in names} == pytest.approx(expected, rel=1e-7)
    assert engine == "serial" or runs.stacked_steps


def test_the_momentum_is_over_the_mean_number_of_steps_by_the_models_weights() -> None:
    """The momentum is -U / (tau lr), with the learning rate of the round.

    Here lr is 0.1. The mean number of steps tau is 0.75 * 8 + 0.25 * 4 = 7, with the
    weights of the models.
    """
    stats = RoundStats(round=2, N=4, m=2, share=0.5, lr=0.1, lr_0=0.4, p=(0.75, 0.25), tau=(8, 4))
    mean, applied = {"w": torch.tensor([1.4])}, {"w": torch.tensor([5.0])}
    after = FedCM(alpha=0.3).update_shared({}, {}, ServerUpdate(mean, applied), stats)
    torch.testing.assert_close(after["Delta"]["w"], torch.tensor([-2.0]))


def test_at_the_received_model_the_term_is_constant() -> None:
    """At the received model the hyperbolic term is constant.

    In one step from w^t without ascent, R is 1 and its gradient is 0. Therefore the
    step is bit-identical to FedCM's.
    """
    one = ("rounds=1", "local.epochs=null", "local.steps=1")
    hyperbolic = make_world(
        "method=fedmrur_h", "trainer.rho=0.0", "trainer.gamma=50", "trainer.sigma=0.01", *one
    )
    plain = make_world("method=fedcm", *one)
    (step,) = run(hyperbolic.aggregator, hyperbolic.env, Serial(), hyperbolic.data)
    assert step.metrics["train/lorentz"] == step.metrics["train/hyperbolic"] == 0
    assert_same(hyperbolic.models(step.after), plain.models(plain.run()))


def test_repr_of_trainers_keeps_its_form() -> None:
    """The `repr` of trainers does not change.

    The client cache finds its entries by the `repr`. MoFedSAM's `repr` leaves out the
    field that only the server uses.
    """
    assert repr(MoFedSAM()) == "MoFedSAM(alpha=0.1, decay_inside_mix=False, rho=0.5, eps=1e-07)"
    assert repr(MoFedSAM(momentum_from="plain")) == repr(MoFedSAM())
    assert repr(FedMRUR()) == (
        "FedMRUR(alpha=0.1, decay_inside_mix=False, rho=0.5, eps=1e-07, gamma=0.005, "
        "sigma=10000.0, beta=1.0, layer='penultimate', reduction='mean_exp', "
        "momentum_from='normalised', momentum_units='gradient', measure_gradient=False)"
    )


# ---------------------------------------------------------------- known gradients


@dataclass(frozen=True)
class Slope(Classification):
    """A task whose loss has a gradient of 1 everywhere."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: object) -> Tensor:
        return params["fc.weight"].sum()


CURVATURE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4) / 12


@dataclass(frozen=True)
class Bowl(Classification):
    """The loss ``1/2 (w - c)' H (w - c)``, with a diagonal H.

    The number c is the mean label of the batch.
    """

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: object) -> Tensor:
        return 0.5 * (CURVATURE * (params["fc.weight"] - batch.y.double().mean()) ** 2).sum()


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_the_momentum_is_in_units_of_a_gradient_whatever_the_schedule(decay: float) -> None:
    """Under a constant gradient of 1, the momentum is 1 - (1 - alpha)^t.

    This holds for any step sizes and for clients with unequal numbers of steps.
    """
    world = make_world(
        "method=fedcm", "trainer.alpha=0.25", f"local.lr_decay={decay}", "rounds=4", model=SOFTMAX
    )
    world.env = replace(world.env, task=Slope())
    delta = world.run().state["shared"]["Delta"]["fc.weight"]
    torch.testing.assert_close(delta, torch.full_like(delta, 1 - 0.75**4), rtol=1e-12, atol=0)


@pytest.mark.parametrize("inside", [False, True])
def test_fixed_points_on_a_quadratic(inside: bool) -> None:
    """Fixed points on a quadratic satisfy an equation that depends on the decay.

    With decay outside the mix the equation is ``grad f + (lambda / alpha) w = 0``. With
    decay inside the mix it is ``grad f + lambda w = 0``.
    """
    alpha, decay = 0.5, 0.4
    keys = (
        f"trainer.alpha={alpha}",
        f"trainer.decay_inside_mix={str(inside).lower()}",
        f"local.weight_decay={decay}",
    )
    steps = (
        "local.epochs=null",
        "local.steps=1",
        "local.batch_size=100",
        "local.lr=0.8",
        "rounds=90",
    )
    world = make_world("method=fedcm", *keys, *steps, data=make_data((9, 9)), model=SOFTMAX)
    world.env = replace(world.env, task=Bowl())
    fixed = world.models(world.run())[0]["fc.weight"]
    centre = world.data.train.y.double().mean()  # all clients have the same size
    at = CURVATURE * centre / (CURVATURE + (decay if inside else decay / alpha))
    torch.testing.assert_close(fixed, at, rtol=1e-8, atol=0)


def test_fedsam_on_a_quadratic() -> None:
    """FedSAM's step on a quadratic equals its formula.

    The gradient is ``g = H (w + rho H (w - c) / ||H (w - c)|| - c)``. The decay is
    computed at w only.
    """
    rho, lr, decay = 0.5, 0.3, 0.2
    steps = (
        "local.epochs=3",
        "local.batch_size=100",
        f"local.lr={lr}",
        f"local.weight_decay={decay}",
        "rounds=1",
    )
    world = make_world(
        "method=fedsam", f"trainer.rho={rho}", *steps, data=make_data((9,)), model=SOFTMAX
    )
    world.env = replace(world.env, task=Bowl())
    c, w = world.data.train.y.double().mean(), torch.zeros(3, 4).double()
    for _ in range(3):
        uphill = CURVATURE * (w - c)
        w = w - lr * (CURVATURE * (w + rho * uphill / uphill.norm() - c) + decay * w)
    torch.testing.assert_close(world.models(world.run())[0]["fc.weight"], w, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- Lorentz geometry


@pytest.mark.parametrize("beta", [0.1, 1.0, 30.0])
def test_the_distance_and_its_gradient_are_their_definitions(beta: float) -> None:
    z, a = 3 * torch.from_numpy(np.random.default_rng(0).normal(size=(2, 20, 5)))
    d2, found = squared_distance(z, a, beta)
    torch.testing.assert_close(d2, naive_distance(z, a, beta), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(d2, squared_distance(a, z, beta)[0])
    assert bool((d2 > 0).all() and (d2 < (z - a).square().sum(1)).all())
    z_0, a_0 = ((beta + each.square().sum(1, keepdim=True)).sqrt() for each in (z, a))
    torch.testing.assert_close(found, 2 * (a_0 / z_0) * z - 2 * a, rtol=1e-10, atol=1e-12)


def test_small_distances_of_long_vectors_keep_their_digits_in_float32() -> None:
    """Computed in float32, the definition is wrong by at least a quarter of its value.

    The size of the error depends on the order in which the processor adds.
    """
    rng = np.random.default_rng(1)
    a = torch.from_numpy(rng.normal(size=(50, 512)) * 1.3).float()
    z = a + torch.from_numpy(rng.normal(size=a.shape) * 1e-3).float()
    exact, _ = squared_distance(z.double(), a.double(), 1.0)
    torch.testing.assert_close(squared_distance(z, a, 1.0)[0].double(), exact, rtol=1e-5, atol=0)
    assert float((naive_distance(z, a, 1.0).double() - exact).abs().max()) > 0.25 * float(
        exact.mean()
    )
    longer = 1e3 * a
    steps = torch.linspace(-1e-3, 1e-3, 50)[:, None]
    # The vectors are parallel.
    assert bool((squared_distance(longer * (1 + steps), longer, 1.0)[0] >= 0).all())


@pytest.mark.parametrize("reduction", ["mean_exp", "exp_mean", "exp_sum", "sum_exp"])
def test_hyperbolic_regularizer_of_extreme_inputs_is_finite(reduction: str) -> None:
    """Extreme inputs give finite values.

    The representations are zero, equal, opposite and huge in float32. With this sigma
    every exponent exceeds its bound.
    """
    trainer = FedMRUR(sigma=1e-3, reduction=reduction)  # type: ignore[arg-type]
    a = torch.tensor([0.0, 1.0, 1e15, -1e15])[:, None].repeat(1, 3)
    for at in (a, -a, torch.zeros_like(a), a * (1 + 1e-6)):
        d2, slope = squared_distance(at, a, 1.0)
        R, rate = trainer.reduced(d2, 1 / 4)
        assert bool(R.isfinite() and (rate.unsqueeze(-1) * slope).isfinite().all())


@pytest.mark.parametrize("padded", [False, True])
def test_r_is_1_at_no_distance_whatever_the_batch(padded: bool) -> None:
    """R is exactly 1 in float32 if all distances are 0, for every batch size.

    This is not obvious: in float32 the sum of ten tenths is not 1.
    """
    for b in range(1, 129):
        share = torch.full((2, b), 1 / b) if padded else 1 / b
        R, _ = FedMRUR().reduced(torch.zeros(2, b), share)
        assert R.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("reduction", ["mean_exp", "exp_mean", "exp_sum", "sum_exp"])
def test_the_derivatives_of_r_are_its_slopes(reduction: str) -> None:
    """The returned slopes are the derivatives of R.

    This also holds beyond the bound of the exponent, where R is constant.
    """
    trainer = FedMRUR(sigma=2.0, reduction=reduction)  # type: ignore[arg-type]
    for d2 in ([0.1, 3.0, 70.0], [0.5, 2.0, 4.0], [90.0, 70.0, 60.0]):
        at = torch.tensor(d2, dtype=torch.float64, requires_grad=True)
        R, rate = trainer.reduced(at, 1 / 3)
        torch.testing.assert_close(rate.expand(3), torch.autograd.grad(R, at)[0])


# ---------------------------------------------------------------- normalised aggregation


N = "aggregator=normalized_mean"


def aggregated(moves: list[Tensor], *overrides: str) -> tuple[Tensor, dict[str, float]]:
    """Return the weights and metrics after one step of the server.

    Args:
        moves: Updates u_i of the clients.
        overrides: Config overrides of the method.
    """
    data = make_data((10,) * len(moves))
    world = make_world("method=fedavg", *(overrides or [N]), data=data, model=SOFTMAX)
    state = world.aggregator.init(world.env)
    after, metrics = world.aggregator.update(state, results_of(state["weights"], moves), world.env)
    return after["weights"].params["fc.weight"], metrics


def test_the_update_has_the_means_direction_and_the_mean_length() -> None:
    moves = list(torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3, 4))))
    (U, metrics), mean = aggregated(moves), torch.stack(moves).mean(0)
    length = torch.stack([u.norm() for u in moves]).mean()
    torch.testing.assert_close(U, mean / mean.norm() * length, rtol=1e-12, atol=0)
    assert (
        metrics["server/factor"] == pytest.approx(float(length / mean.norm()))
        and metrics["server/factor"] > 1
    )
    torch.testing.assert_close(aggregated(moves, N, "aggregator.ascends=true")[0], -U)


def test_lengths_are_weighted_as_the_updates_are() -> None:
    """The mean of the lengths has the weights of the updates.

    It is 3/4 * 2 + 1/4 * 6 = 3. The mean update has length 1.
    """
    stats = RoundStats(
        0, 4, 2, 0.5, 0.1, 0.1, p=(0.75, 0.25), tau=(1, 1), squared_norms=(4.0, 36.0)
    )
    assert amplification({"w": torch.tensor([0.6, 0.8])}, stats) == pytest.approx(3.0)


def test_normalized_mean_of_special_cohorts_is_exact() -> None:
    """The normalised mean is exact for special cohorts.

    Orthogonal unit updates have a factor of sqrt(m), and the result has length 1. With
    equal updates the result equals the update. With opposite updates, w does not
    change. With one update, the result is bit-identical to the mean.
    """
    eye = torch.eye(12, dtype=torch.float64)[:4].reshape(4, 3, 4)
    U, metrics = aggregated(list(eye))
    assert float(U.norm()) == pytest.approx(1.0) and metrics["server/factor"] == pytest.approx(2.0)
    move = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 4)))
    torch.testing.assert_close(aggregated([move] * 3)[0], move, rtol=1e-12, atol=0)
    # The difference is a rounding error. It is not relative to the updates' length.
    assert float(aggregated([move, -move])[0].norm()) < 1e-14
    assert not aggregated([torch.zeros_like(move)] * 2)[0].any()
    alone = [[scale * move] for scale in (0.1, 1 / 3, 0.7, 1.1)]
    assert all(torch.equal(aggregated(u)[0], aggregated(u, "aggregator=mean")[0]) for u in alone)


# ---------------------------------------------------------------- refusals

REFUSED = {
    "method=fedcm local.momentum=0.9": "its own momentum",
    "method=fedmrur local.momentum=0.9": "its own momentum",
    "method=mofedsam local.optimizer=adam": "needs SGD",
    "method=fedcm trainer.alpha=0.0": "alpha must be in",
    "method=mofedsam trainer.alpha=1.5": "alpha must be in",
    "method=fedsam trainer.rho=-0.1": "rho must not be negative",
    "method=fedmrur trainer.rho=-0.1": "rho must not be negative",
    "method=fedsam trainer.eps=0.0": "eps must be positive",
    "method=fedmrur trainer.gamma=-1.0": "gamma must not be negative",
    "method=fedmrur trainer.sigma=0.0": "sigma must be positive",
    "method=fedmrur trainer.beta=0.0": "beta must be positive",
    "method=fedmrur trainer.layer=first": "not a choice",
    "method=fedmrur aggregator=mean trainer.momentum_from=plain": "from the mean before normalisation",
    "method=mofedsam trainer.momentum_from=plain": "from the mean before normalisation",
    "method=fedmrur task=cvae model=cvae": "no head",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_bad_input_is_refused_in_words(overrides: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        Experiment.of(compose(overrides.split()))
