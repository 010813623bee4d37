"""FedLAW: tests of mixing, its gradient, and learning against an independent loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.errors import ConfigError
from fedexp.methods.fedlaw import FedLAW
from fedexp.running.experiment import Experiment
from tests.methods.fusion_world import results_of
from tests.methods.server_world import models_near, round_of
from tests.methods.test_distilling import params_of, proxy_inputs, world_of
from tests.world import assert_same

FORMS = ["exp", "quad"]


def scalars_of(m: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(m, generator=random, dtype=torch.float64),
        "z": torch.tensor(0.7, dtype=torch.float64),
    }


def mixing_of(form: str, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lambda and gamma by their formulas."""
    if form == "exp":
        return x.exp() / x.exp().sum(), z.exp()
    return x**2 / (x**2).sum(), z**2


@pytest.mark.parametrize("form", FORMS)
def test_the_scalars_gradient_is_autograds_through_the_mix(form: Any) -> None:
    models = torch.randn(5, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    method, scalars = FedLAW(form=form), scalars_of(5)

    def loss(w: torch.Tensor) -> torch.Tensor:
        return (w.sin() * torch.arange(40)).sum() + w.square().sum()

    x, z = (value.clone().requires_grad_() for value in scalars.values())
    shares, gamma = mixing_of(form, x, z)
    w = gamma * (shares[:, None] * models).sum(0)
    expected = torch.autograd.grad(loss(w), (x, z))
    theta = method.mixed(scalars, models).requires_grad_()
    torch.testing.assert_close(theta, w, rtol=1e-12, atol=1e-12)
    (q,) = torch.autograd.grad(loss(theta), theta)
    for found, value in zip(method.gradients(scalars, models, q).values(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_shares_sum_to_one_and_copies_only_shrink(form: Any) -> None:
    method, scalars = FedLAW(form=form), scalars_of(4, 3)
    shares, gamma = method.mixing(scalars)
    assert (
        float(shares.sum()) == pytest.approx(1, abs=1e-12)
        and bool((shares >= 0).all())
        and gamma > 0
    )
    y = torch.arange(6, dtype=torch.float64)
    torch.testing.assert_close(method.mixed(scalars, y.expand(4, 6)), gamma * y)


def test_learning_starts_from_the_weighted_mean_or_from_the_plain_one() -> None:
    for form, expected in (("exp", [0.1, 0.3, 0.6]), ("quad", [1 / 3] * 3)):
        world = world_of("fedlaw", form=form)
        start = world.env.initial_weights()
        models = [
            torch.cat([v.flatten() for v in m.params.values()]) for m in models_near(start, 3)
        ]
        method: Any = world.aggregator
        work = method.begin({"models": models, "p": [1.0, 3.0, 6.0]}, start, start, world.env)
        shares, gamma = method.mixing(work["scalars"])
        assert shares.tolist() == pytest.approx(expected) and float(gamma) == pytest.approx(1)


@pytest.mark.parametrize("form", FORMS)
def test_learning_is_a_loop_of_torchs_own(form: str) -> None:
    """Learning equals a loop that is written with torch.

    The loop applies Adam to x and z, with full batches and autograd through the mix.
    """
    world = world_of("fedlaw", form=form, epochs=4, lr=0.1)
    start, proxy = world.env.initial_weights(), world.env.proxy
    assert proxy is not None
    models = models_near(start, 3)
    state, logged = round_of(world, models, [10, 20, 30])
    p = torch.tensor([1, 2, 3], dtype=torch.float64) / 6
    x = (
        p.log() if form == "exp" else torch.full((3,), 3**-0.5, dtype=torch.float64)
    ).requires_grad_()
    z = torch.tensor(0.0 if form == "exp" else 1.0, dtype=torch.float64, requires_grad=True)
    optimizer, module = torch.optim.Adam([x, z], 0.1, betas=(0.5, 0.999)), start.module().train()

    def mixed() -> dict[str, torch.Tensor]:
        shares, gamma = mixing_of(form, x, z)
        return {
            k: gamma * sum(s * m.params[k] for s, m in zip(shares, models, strict=True))
            for k in start.params
        }

    for row in logged[1:]:
        optimizer.zero_grad()
        loss = F.cross_entropy(
            torch.func.functional_call(module, mixed(), (proxy_inputs(world),)), proxy.y
        )
        loss.backward()
        optimizer.step()
        assert row["server/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert_same(params_of(state), [{k: v.detach() for k, v in mixed().items()}], 1e-6)


def test_of_one_model_gamma_alone_is_learned() -> None:
    world = world_of("fedlaw", epochs=3, lr=0.1)
    (model,) = models_near(world.env.initial_weights(), 1)
    state, logged = round_of(world, [model])
    gamma = logged[-1]["server/gamma"]
    assert gamma != 1 and all(row["server/lambda_max"] == 1 for row in logged[1:])
    assert_same(
        params_of(state), [{name: gamma * value for name, value in model.params.items()}], 1e-9
    )


def test_the_variant_of_averages_needs_two_epochs() -> None:
    with pytest.raises(ConfigError, match="epochs=2 or more"):
        build(FedLAW, {"learn": "swa", "epochs": 1}, "aggregator")


def test_in_the_variant_of_averages_the_shares_come_first_and_gamma_after_them() -> None:
    """In the variant of averages, the shares are learned first and gamma after them.

    In the first 4 of 8 epochs x changes, and its last two values are averaged. Then z
    changes.
    """
    world = world_of("fedlaw", learn="swa", epochs=8, lr=0.3)
    method, models = world.aggregator, models_near(world.env.initial_weights(), 3)
    state, _ = method.update(method.init(world.env), results_of(models), world.env)
    xs, gammas, averages = [], [], []
    for stage in range(1, 8):
        state, metrics = method.update(state, [], world.env.at(0, stage))
        xs.append(state["work"]["scalars"]["x"])
        averages.append(state["work"]["averaged"])
        gammas.append(metrics["server/gamma"])
    assert gammas[:4] == [1.0] * 4 and len({*gammas[3:]}) == 4
    assert len({tuple(x.tolist()) for x in xs[:4]}) == 4 and all(
        torch.equal(x, xs[3]) for x in xs[4:]
    )
    assert (
        averages[1] is None and averages[2]["count"] == 1 and torch.equal(averages[2]["sum"], xs[2])
    )
    torch.testing.assert_close(xs[3], averages[3]["sum"] / 2)


def test_a_server_optimizer_has_an_effect_only_if_nothing_is_learned() -> None:
    fedadam = ["method=fedlaw", "server_optimizer=fedadam"]
    Experiment.of(compose([*fedadam, "aggregator.epochs=0"]))
    with pytest.raises(ConfigError, match="server optimizer has no effect"):
        Experiment.of(compose(fedadam))
