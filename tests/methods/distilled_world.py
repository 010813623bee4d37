"""A tiny federation whose images can be generated, and its teachers.

The tests of data-free distillation use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.core.aggregator import State
from fedexp.core.data import FederatedData
from fedexp.core.runner import run
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from tests.world import CPU, World, make_data, make_world

CNN = {
    "_target_": "fedexp.models.cnn.ConvNet", "channels": [3], "kernel": 3, "pool": 1, "hidden": [], "norm": "batch",
}  # fmt: skip
SMALL = ("rounds=1", "clients=3", "aggregator.T=3", "aggregator.b=6")
SIZES = (12, 9, 8)


def small_world(
    method: str, *overrides: str, model: dict[str, Any] = CNN, data: FederatedData | None = None
) -> World:
    """Return a world whose bank, if there is one, has batches of 4 images."""
    short = () if method == "fed_dafl" else ("aggregator.B=4",)
    data = data or make_data(SIZES, images=True)
    return make_world(f"method={method}", *SMALL, *short, *overrides, data=data, model=model)


def states(world: World) -> tuple[list[State], list[dict[str, float]]]:
    """Return the states and the metrics of all steps.

    The first state is that after the clients' training.
    """
    steps = list(run(world.aggregator, world.env, Serial(), world.data))
    return [step.after.state for step in steps], [step.metrics for step in steps]


def same(a: Weights, b: Weights) -> bool:
    """Return whether parameters and buffers are bit-identical."""
    left, right = ({**w.params, **w.buffers} for w in (a, b))
    return list(left) == list(right) and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )


def normalised(images: Tensor) -> Tensor:
    return (images - 0.4) / 0.25


def divergence(t: Tensor, s: Tensor, tau: float) -> Tensor:
    """Compute tau^2 KL(t || s), (b,), with torch's distributions."""
    p, q = (torch.distributions.Categorical(logits=value / tau) for value in (t, s))
    return tau**2 * torch.distributions.kl_divergence(p, q)


def fresh_student(world: World) -> nn.Module:
    return Weights.init(
        world.env.server_spec, seed_of(0, "student", 0), CPU, torch.float64
    ).module()


def labels(world: World, epoch: int, b: int = 6) -> Tensor:
    return torch.randint(3, (b,), generator=torch_generator(0, "labels", 0, epoch)).sort().values


def normal(name: str, epoch: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch_generator(0, name, 0, epoch)).double()


def of_norms(module: nn.Module, found: list[torch.Tensor]) -> None:
    """Make `module` append its distances of statistics to `found`."""

    def hook(layer: nn.BatchNorm2d, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        a = args[0].transpose(0, 1).flatten(1)
        mean = a.mean(1)
        var = (a - mean[:, None]).square().mean(1)
        found.append((mean - layer.running_mean).norm() + (var - layer.running_var).norm())

    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.register_forward_hook(hook)


def modules_of(state: State) -> tuple[list[nn.Module], list[Tensor]]:
    """Return the teachers as torch modules, and a list of distances of statistics.

    Each of their passes appends to the list.
    """
    modules, found = [kept.load().module() for kept in state["teachers"]], list[Tensor]()
    for module in modules:
        of_norms(module, found)
    return modules, found


def one_pass(
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    bank: list[Tensor],
    teachers: Any,
    tau: float,
    epoch: int,
    view: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Distil over the whole bank in batches of 4, each transformed by `view`."""
    images = torch.cat(bank)
    order = torch.randperm(
        len(images), generator=torch_generator(0, "distillation", 0, epoch, "order", 0)
    )
    student.train()
    for at in order.split(4):
        x = view(normalised(images[at]))
        loss = divergence(teachers(x).detach(), student(x), tau).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_student(student: nn.Module, world: World, state: State) -> None:
    found = world.aggregator.outcome(state).models[0]
    for name, value in student.state_dict().items():
        torch.testing.assert_close(
            {**found.params, **found.buffers}[name], value, rtol=1e-8, atol=1e-9
        )
