"""Fed-DAFL: tests against an independent loop, of the terms' weights, and of heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedexp.core.errors import ConfigError
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.distillation.generator import generator_spec
from tests.methods.distilled_world import (
    assert_student,
    divergence,
    fresh_student,
    normalised,
    same,
    small_world,
    states,
)
from tests.world import CPU

TINY = (
    "aggregator.iterations=3",
    "aggregator.nz=4",
    "aggregator.ngf=3",
    "aggregator.lr_generator=0.05",
)


def test_fed_dafl_epochs_equal_a_torch_loop() -> None:
    """Two epochs of three joint steps equal a loop that is written with torch.

    The loop uses torch's modules and optimizers. It computes the teachers and their
    features twice.
    """
    world = small_world(
        "fed_dafl", *TINY, "aggregator.T=2", "aggregator.w_oh=0.4", "aggregator.w_a=0.7"
    )
    after, rows = states(world)
    modules = [kept.load().module() for kept in after[0]["teachers"]]
    features: list[torch.Tensor] = []
    for module in modules:
        module.output.register_forward_hook(lambda layer, args, output: features.append(args[0]))
    student = fresh_student(world).train()
    slow = torch.optim.SGD(student.parameters(), lr=0.01, momentum=0.9)
    generator = (
        Weights.init(generator_spec((1, 4, 4), 4, 3), seed_of(0, "generator"), CPU, torch.float64)
        .module()
        .train()
    )
    fast = torch.optim.Adam(generator.parameters(), lr=0.05)
    for epoch in (1, 2):
        noise = torch.randn((3, 6, 4), generator=torch_generator(0, "z", 0, epoch)).double()
        terms = []
        for z in noise:
            features.clear()
            x = normalised(generator(z))
            d = torch.stack([module(x) for module in modules]).mean(0)
            p = d.softmax(1).mean(0)
            oh = nn.functional.cross_entropy(d, d.argmax(1))
            ie = (p * p.log10()).sum()
            a = -sum(value.abs().mean() for value in features) / 3
            loss = 0.4 * oh + 5 * ie + 0.7 * a
            terms.append(
                [float(value) for value in (loss.detach(), oh.detach(), ie.detach(), a.detach())]
            )
            fast.zero_grad()
            loss.backward()
            slow.zero_grad()
            divergence(d.detach(), student(x.detach()), 1.0).mean().backward()
            fast.step()
            slow.step()
        assert_student(student, world, after[epoch])
        logged = [rows[epoch][f"synthesis/{name}"] for name in ("loss", "oh", "ie", "a")]
        assert logged == pytest.approx(torch.tensor(terms).double().mean(0).tolist(), rel=1e-6)
        assert rows[epoch]["distillation/steps"] == 3


def test_the_generator_goes_on_in_later_rounds() -> None:
    after, _ = states(small_world("fed_dafl", *TINY, "rounds=2", "aggregator.T=1"))
    made, begun = after[1]["own"], after[2]["own"]
    assert same(begun["generator"], made["generator"]) and begun["optimizer"] is made["optimizer"]
    assert not same(after[3]["own"]["generator"], made["generator"])


class Headless(nn.Module):
    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.output(x.flatten(1))


def test_without_the_activations_weight_no_head_is_needed() -> None:
    spec = ModelSpec.of({"_target_": "tests.methods.test_fed_dafl.Headless"}, (1, 4, 4), 3)
    with pytest.raises(ConfigError, match="no head that runs on penultimate features"):
        small_world("fed_dafl").aggregator.check(spec, (1, 4, 4))
    small_world("fed_dafl", "aggregator.w_a=0").aggregator.check(spec, (1, 4, 4))
