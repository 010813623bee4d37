"""A trainer with inputs that a generator makes.

The generator is in the server's trees. It makes inputs for labels that are distributed
like the client's labels. The client also learns these inputs.
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
    """A map from labels (b,) and noise (b, LATENT) to inputs (b, *SHAPE).

    The output of its BatchNorm shows in which mode the generator runs.
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
    """A trainer that adds a loss on generated inputs.

    Args:
        weight: Weight of this loss in the first step. It halves with every epoch,
            and is divided by the number of the step in the round, from 1.
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
