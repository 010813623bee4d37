"""Trainers for tests of engines.

They train as FedAvg does and do something more. Actors import them from here.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

from torch import Tensor, nn

from fedexp.core import trees
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.methods.fedavg import PlainTrainer


@dataclass(frozen=True)
class Slow(PlainTrainer):
    """A trainer that sleeps after each client.

    Thus a test can disturb a round before it ends.
    """

    seconds: float = 0.2

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        time.sleep(self.seconds)
        return super().finish(params, buffers, ctx)


@dataclass(frozen=True)
class Deadly(PlainTrainer):
    """A trainer that ends its process, as the system does if memory is short."""

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        os._exit(1)


@dataclass(frozen=True)
class NoBatchingRule(Trainer):
    """A trainer with a loss that has no batching rule.

    The loss is written with foreach operations, which `torch.vmap` does not support.
    """

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return (
            super().loss(net, params, buffers, batch, ctx)
            + 0.1 * trees.norm(trees.sub(params, ctx.start)) ** 2
        )


@dataclass(frozen=True)
class StackableLater(Trainer):
    """A trainer whose loss reads a number in round 0, which stacks do not allow."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        loss = super().loss(net, params, buffers, batch, ctx)
        return loss * (1.0 if ctx.round else float(loss.detach() >= 0))


class Normalised(nn.Module):
    """A model with BatchNorm before a linear layer.

    It has floating-point buffers and a counter.
    """

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        size = math.prod(input_shape)
        self.norm, self.fc = nn.BatchNorm1d(size), nn.Linear(size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.norm(x.flatten(1)))
        return output
