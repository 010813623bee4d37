"""A trainer with a contrastive term like that of MOON.

The term moves outputs closer to those of the received model and away from those of the
client's own last model.

Reference: Li, He and Song 2021, Eq. 3. This trainer uses logits in place of projected
features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees


@dataclass(frozen=True)
class MoonLike(Trainer):
    """A trainer that adds the contrastive term to the loss.

    Args:
        mu: Weight of the term.
        temperature: Temperature tau of the term.
    """

    mu: float = 1.0
    temperature: float = 0.5

    def init_state(self, start: Tree, received: Received) -> Trees:
        return {"params": received.params, "buffers": received.buffers}

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
        z = net(params, buffers, batch.x)
        near = (
            F.cosine_similarity(z, ctx.reference(*ctx.received, batch.x), dim=-1) / self.temperature
        )
        last = ctx.reference(ctx.state["params"], ctx.state["buffers"], batch.x)
        far = F.cosine_similarity(z, last, dim=-1) / self.temperature
        term: Tensor = F.softplus(far - near).mean()
        return Measured(F.cross_entropy(z, batch.y) + self.mu * term, {"contrast": term})

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees]:
        return {}, {"params": {**ctx.received.params, **params}, "buffers": buffers}
