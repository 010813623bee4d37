"""A trainer whose clients also train on generated inputs.

The generator is part of the trees that the server sends. Its labels are drawn with the
client's own label frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec, Weights

CLASSES, LATENT, SHAPE = 3, 2, (1, 2, 2)


class Generator(nn.Module):
    """A network that maps labels (b,) and noise (b, LATENT) to inputs (b, *SHAPE).

    The output of its BatchNorm shows in which mode the network runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES + LATENT, math.prod(SHAPE))
        self.norm = nn.BatchNorm1d(math.prod(SHAPE))

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        code = torch.cat([F.one_hot(y, CLASSES).to(noise), noise], dim=-1)
        output: Tensor = self.norm(self.layer(code))
        return output.reshape(-1, *SHAPE)


SPEC = ModelSpec("tests.reference.generated.Generator", ())


@dataclass(frozen=True)
class Generated(Trainer):
    """A trainer with an additional loss on generated inputs.

    Args:
        weight: Weight of the loss on generated inputs in the first step. It halves with
            every epoch. It is also divided by 1 plus the step.
    """

    weight: float = 0.5

    def init_shared(self, start: Tree) -> Trees:
        first = next(iter(start.values()))
        weights = Weights.init(SPEC, 5, first.device, first.dtype)
        return {"generator": weights.params, "generator_buffers": weights.buffers}

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
        b = len(batch.x)
        shares = ctx.class_counts.cumsum(0) / ctx.num_examples
        y = (ctx.noise("labels", (b, 1)) >= shares).sum(1)
        noise = ctx.noise("generator", (b, LATENT)).to(batch.x)
        x = ctx.network(SPEC)(ctx.shared["generator"], ctx.shared["generator_buffers"], y, noise)
        extra = F.cross_entropy(net(params, buffers, x), y)
        loss = super().loss(net, params, buffers, batch, ctx)
        assert isinstance(loss, Tensor)
        return Measured(
            loss + self.weight * 0.5**ctx.epoch / (1 + ctx.step) * extra, {"generated": extra}
        )
