"""Co-Boosting: perturbations, the clients' weights, what it is without them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedexp.aggregators.co_boosting import CoBoosting, direction, reweighted
from fedexp.aggregators.replay import Replay
from fedexp.distillation.bank import samples_of
from fedexp.distillation.ensemble import Ensemble
from tests.methods.distilled_world import same, small_world, states

TINY = ("aggregator.T_G=3", "aggregator.nz=4", "aggregator.ngf=3")


def test_with_even_weights_plain_and_unmoved_it_is_dense() -> None:
    """mu = epsilon = h = 0: DENSE in its profile of the same authors, all images counting in the divergence."""
    boosted = small_world("co_boosting", *TINY, "aggregator.mu=0", "aggregator.epsilon=0", "aggregator.h=0")
    plain = small_world("dense_coboost", *TINY, "aggregator.mask=none")
    (a, rows), (b, _) = states(boosted), states(plain)
    for left, right in zip(a, b, strict=True):
        for name, value in left["student"].params.items():
            torch.testing.assert_close(value, right["student"].params[name], rtol=1e-9, atol=1e-11)
    assert rows[-1]["weights/min"] == rows[-1]["weights/max"] == pytest.approx(1 / 3)


def test_every_pixel_moves_by_epsilon_along_the_gradient() -> None:
    world = small_world("co_boosting", *TINY)
    state, aggregator = states(world)[0][1], world.aggregator
    assert isinstance(aggregator, CoBoosting)
    ensemble, env = Ensemble([kept.load() for kept in state["teachers"]]), world.env.at(0, 2)
    samples = samples_of(state["own"]["bank"], env.domain)
    teach = partial(ensemble, weights=state["own"]["weights"])
    still = torch.cat(list(Replay.inputs(aggregator, samples, teach, env)))
    moved = torch.cat(list(aggregator.inputs(samples, teach, env)))
    steps = (moved - still).abs() * 0.25 * 255  # in 8 bits of the images
    assert torch.all((steps - 4).abs().minimum(steps) < 1e-9) and (steps > 1).float().mean() > 0.5
    x, u = still[:2], torch.tensor([[1.0, -0.5, 0.2], [0.3, 0.3, -1.0]], dtype=torch.float64)
    sign = direction(x, teach, u, 4.0)
    objective = lambda at: float((u * F.softmax(teach(at) / 4, 1)).sum())  # noqa: E731
    for at in map(tuple, sign.nonzero().tolist()[::7]):
        ends = [x.clone(), x.clone()]
        ends[0][at] += 1e-5
        ends[1][at] -= 1e-5
        assert float(sign[at]) * (objective(ends[0]) - objective(ends[1])) > 0


def test_weights_step_down_the_cross_entropy_within_their_box() -> None:
    random = torch.Generator().manual_seed(0)
    logits, y = torch.randn((3, 8, 4), generator=random, dtype=torch.float64), torch.arange(8) % 4
    logits[0] += 3 * F.one_hot(y, 4)  # the first client knows the labels
    w = torch.tensor([0.3, 0.5, 0.01], dtype=torch.float64)

    def loss(w: torch.Tensor) -> float:
        return float(F.cross_entropy(torch.einsum("k,kbc->bc", w / w.sum(), logits), y))

    slopes = []
    for k in range(3):
        h = torch.zeros(3, dtype=torch.float64)
        h[k] = 1e-6
        slopes.append(loss(w + h) - loss(w - h))
    expected = (w - 0.1 * torch.tensor(slopes, dtype=torch.float64).sign()).clamp(0, 1)
    torch.testing.assert_close(reweighted(w, logits, y, [torch.arange(8)], 0.1), expected, rtol=1e-12, atol=1e-12)
    far = reweighted(w, logits, y, [torch.arange(8)] * 30, 0.1)
    assert 0.8 < far[0] <= 1 and far.min() == 0
    assert reweighted(torch.zeros(3).double(), logits, y, [torch.arange(8)], 0.1).isfinite().all()


def test_weights_learn_from_the_second_epoch_on_from_the_banks_logits() -> None:
    """The first epoch's are even; the second's pass sees the first batch alone, with steps that decay; logits are stored."""
    world = small_world("co_boosting", *TINY, "aggregator.mu=0.05", "aggregator.B=6")
    after, _ = states(world)
    weights = [state["own"]["weights"] for state in after[1:]]
    assert torch.equal(weights[0], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert ((weights[1] - weights[0]).abs() / (0.05 * 0.99)).round().tolist() == [1.0] * 3
    ensemble = Ensemble([kept.load() for kept in after[0]["teachers"]])
    first, second = after[3]["own"]["bank"][:2]
    for batch, cached in zip((first, second), after[3]["own"]["logits"], strict=True):
        torch.testing.assert_close(ensemble.each(samples_of([batch], world.env.domain).inputs(slice(None))), cached)
    assert torch.equal(after[2]["own"]["logits"][0], after[3]["own"]["logits"][0])
    expected = reweighted(
        weights[0], after[2]["own"]["logits"][0], first["y"], [torch.arange(6)], 0.05 * 0.99
    )  # one batch: its order does not matter
    torch.testing.assert_close(weights[1], expected)
    assert not same(after[1]["student"], after[2]["student"])
