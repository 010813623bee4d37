"""Training in which BatchNorm is frozen from the second local epoch on.

It is compared with a loop in plain PyTorch, and with training without freezing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientResult
from fedexp.core.kernel import batches, schedule_of
from fedexp.core.net import Net
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from tests.engines.compare import assert_same_results
from tests.world import MLP, World, make_data, make_world

NORMED = {"_target_": "tests.engines.test_bn_frozen.Normed"}
FROZEN = "trainer=bn_frozen_after_epoch1"
ENGINES = {"serial": Serial, "vmap": lambda: Vectorized(3, "vmap")}


class Normed(nn.Module):
    """A model with a convolution, BatchNorm and a linear layer."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = (
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3),
            nn.Linear(3, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


def world_of(*overrides: str, model: dict = NORMED) -> World:
    return make_world(
        "method=fedavg", "local.momentum=0.9", *overrides, data=make_data((18,) * 3), model=model
    )


def results(world: World, engine: Engine | None = None) -> list[ClientResult]:
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    return list((engine or Serial()).map(jobs, world.data))


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_torchs_loop_without_a_return_to_training_mode(engine: str) -> None:
    world = world_of(FROZEN, "local.epochs=3")
    found = results(world, ENGINES[engine]())
    job = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))[0]
    index = world.data.positions(0)
    schedule = schedule_of(job, Net(job.start.spec, index.device, torch.float64), len(index))
    module = job.start.module().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=job.local_training.lr, momentum=0.9)
    for (epoch, _, _), batch in zip(
        schedule,
        batches(job, world.data.train, index, schedule, lambda name, shape: torch.zeros(shape)),
        strict=True,
    ):
        if epoch == 1:
            module.eval()  # for this and all later epochs
        optimizer.zero_grad()
        F.cross_entropy(module(batch.x), batch.y).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        ours = {**found[0].weights.params, **found[0].weights.buffers}[name]
        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_are_those_of_the_first_epoch(engine: str) -> None:
    long, short, plain = (
        results(world_of(trainer, f"local.epochs={epochs}"), ENGINES[engine]())
        for trainer, epochs in ((FROZEN, 3), (FROZEN, 1), ("trainer=sgd", 3))
    )
    for a, b, c in zip(long, short, plain, strict=True):
        assert all(
            torch.equal(value, b.weights.buffers[name]) for name, value in a.weights.buffers.items()
        )
        assert any(
            not torch.equal(value, c.weights.buffers[name])
            for name, value in a.weights.buffers.items()
        )


def test_plain_training_where_nothing_stands_still() -> None:
    for epochs, model in ((1, NORMED), (3, MLP)):
        pair = [
            results(world_of(trainer, f"local.epochs={epochs}", model=model))
            for trainer in (FROZEN, "trainer=sgd")
        ]
        assert_same_results(*pair, tolerance=0)
