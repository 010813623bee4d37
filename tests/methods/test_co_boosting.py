"""Tests of Co-Boosting: perturbations, the clients' weights, and its special case."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.weights import Weights
from fedexp.distillation.bank import samples_of
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.views import View
from fedexp.methods.co_boosting import CoBoosting, direction, reweighted
from tests.methods.distilled_world import (
    assert_student,
    divergence,
    fresh_student,
    labels,
    modules_of,
    normal,
    normalised,
    one_pass,
    same,
    small_world,
    states,
)
from tests.world import CPU

TINY = ("aggregator.T_G=3", "aggregator.nz=4", "aggregator.ngf=3")


def test_co_boosting_without_its_parts_equals_dense() -> None:
    """With mu = epsilon = h = 0, Co-Boosting equals DENSE in the same authors' profile.

    All images count in the divergence.
    """
    boosted = small_world(
        "co_boosting", *TINY, "aggregator.mu=0", "aggregator.epsilon=0", "aggregator.h=0"
    )
    plain = small_world("dense_coboost", *TINY, "aggregator.mask=none")
    (a, rows), (b, _) = states(boosted), states(plain)
    for left, right in zip(a, b, strict=True):
        for name, value in left["student"].params.items():
            torch.testing.assert_close(value, right["student"].params[name], rtol=1e-9, atol=1e-11)
    assert rows[-1]["weights/min"] == rows[-1]["weights/max"] == pytest.approx(1 / 3)


def test_co_boosting_epochs_equal_a_torch_loop() -> None:
    """Three epochs equal a loop that is written with torch.

    The loop has every term, and weights that change from the second epoch on. Images
    are perturbed before each step of the student.
    """
    keys = (
        "h=2",
        "lambda_a=0.5",
        "lambda_bn=0.3",
        "mu=0.1",
        "mu_decay=0.9",
        "lr_generator=0.05",
        "schedule=constant",
    )
    clips = ("generator.clip=null", "student.clip=null")
    world = small_world("co_boosting", *TINY, *(f"aggregator.{key}" for key in (*keys, *clips)))
    after, rows = states(world)
    modules, found = modules_of(after[0])
    every = lambda x: torch.stack([module(x) for module in modules])  # noqa: E731
    mixed = lambda w, logits: torch.einsum("k,kbc->bc", w / w.sum(), logits)  # noqa: E731
    student, bank, known = fresh_student(world), [], []
    slow = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    w = torch.full((3,), 1 / 3, dtype=torch.float64)
    for epoch in (1, 2, 3):
        seed = seed_of(0, "generator", 0, epoch)
        generator = (
            Weights.init(generator_spec((1, 4, 4), 4, 3), seed, CPU, torch.float64).module().train()
        )
        z, y = normal("z", epoch, 6, 4).requires_grad_(), labels(world, epoch)
        fast = torch.optim.Adam([*generator.parameters(), z], lr=0.05, betas=(0.5, 0.999))
        student.eval()
        best = kept = None
        for _ in range(3):
            images = generator(z)
            found.clear()
            d, s = mixed(w, every(normalised(images))), student(normalised(images))
            p = d.softmax(1).gather(1, y[:, None])[:, 0]
            hard = ((1 - p.detach()) ** 2 * -p.log()).mean()
            loss = hard - 0.5 * divergence(d, s, 3.0).mean() + 0.3 * sum(found) / 3
            if best is None or loss < best:
                best, kept = loss.detach(), images.detach().clone()
            fast.zero_grad()
            loss.backward()
            fast.step()
        assert rows[epoch]["synthesis/loss"] == pytest.approx(float(best), rel=1e-8)
        if bank:
            logits, of = every(normalised(torch.cat(bank))).detach(), torch.cat(known)
            for at in torch.randperm(
                len(of), generator=torch_generator(0, "weights", 0, epoch, "order", 0)
            ).split(4):
                w.requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(mixed(w, logits[:, at]), of[at]), w)
                w = (w.detach() - 0.1 * 0.9 ** (epoch - 1) * slope.sign()).clamp(0, 1)
        torch.testing.assert_close(after[epoch]["own"]["weights"], w)
        bank, known = [*bank, (kept * 255).round() / 255], [*known, y]
        u = (
            2 * torch.rand(6 * len(bank), 3, generator=torch_generator(0, "directions", 0, epoch))
            - 1
        )
        order = torch.randperm(
            len(u), generator=torch_generator(0, "distillation", 0, epoch, "order", 0)
        )

        def moved(
            x: torch.Tensor,
            w: torch.Tensor = w,
            parts: Iterator[torch.Tensor] = iter(u[order].split(4)),
        ) -> torch.Tensor:
            u = next(parts).double()
            leaf = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad((u * (mixed(w, every(leaf)) / 4).softmax(1)).sum(), leaf)
            return x + 4 / 255 / 0.25 * slope.sign()

        one_pass(student, slow, bank, lambda x, w=w: mixed(w, every(x)), 4.0, epoch, moved)
        assert_student(student, world, after[epoch])
    assert len(set(w.tolist())) > 1


def test_every_pixel_moves_by_epsilon_along_the_gradient() -> None:
    world = small_world("co_boosting", *TINY)
    state, aggregator = states(world)[0][1], world.aggregator
    assert isinstance(aggregator, CoBoosting)
    ensemble, env = TeacherEnsemble([kept.load() for kept in state["teachers"]]), world.env.at(0, 2)
    samples = samples_of(state["own"]["bank"], env.domain)
    teach = partial(ensemble, weights=state["own"]["weights"])
    view = View.of("clients", env, "distillation")
    still = torch.cat([x for x, _ in aggregator.inputs(samples, view, env)])
    distillation_batches = list(
        aggregator.distillation_batches(state["own"], samples, ensemble, env)[1]
    )
    moved = torch.cat([x for x, _ in distillation_batches])
    for x, logits in distillation_batches:
        assert torch.equal(logits, teach(x)) and not logits.requires_grad
    steps = (moved - still).abs() * 0.25 * 255  # in units of 8-bit pixel values
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
    torch.testing.assert_close(
        reweighted(w, logits, y, [torch.arange(8)], 0.1), expected, rtol=1e-12, atol=1e-12
    )
    far = reweighted(w, logits, y, [torch.arange(8)] * 30, 0.1)
    assert 0.8 < far[0] <= 1 and far.min() == 0
    assert reweighted(w, logits, y, [torch.arange(8)], 0.9)[0] == 1  # it was 0.3
    assert reweighted(torch.zeros(3).double(), logits, y, [torch.arange(8)], 0.1).isfinite().all()


def test_weights_learn_from_the_second_epoch_on_from_the_banks_logits() -> None:
    """From the second epoch on, the weights learn from the stored logits of the bank.

    The weights of the first epoch are equal. The pass of the second epoch uses only the
    first batch, with decaying steps. Logits are stored.
    """
    world = small_world("co_boosting", *TINY, "aggregator.mu=0.05", "aggregator.B=6")
    after, _ = states(world)
    weights = [state["own"]["weights"] for state in after[1:]]
    assert torch.equal(weights[0], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert ((weights[1] - weights[0]).abs() / (0.05 * 0.99)).round().tolist() == [1.0] * 3
    ensemble = TeacherEnsemble([kept.load() for kept in after[0]["teachers"]])
    first, second = after[3]["own"]["bank"][:2]
    for batch, cached in zip((first, second), after[3]["own"]["logits"], strict=True):
        torch.testing.assert_close(
            ensemble.each(samples_of([batch], world.env.domain).inputs(slice(None))), cached
        )
    assert torch.equal(after[2]["own"]["logits"][0], after[3]["own"]["logits"][0])
    expected = reweighted(
        weights[0], after[2]["own"]["logits"][0], first["y"], [torch.arange(6)], 0.05 * 0.99
    )  # order does not matter in one batch
    torch.testing.assert_close(weights[1], expected)
    assert not same(after[1]["student"], after[2]["student"])
