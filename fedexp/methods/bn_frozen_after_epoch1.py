"""Local SGD in training mode during the first local epoch alone: an oddity of DENSE's code, for comparisons with its figures.

Reference: the authors' code of DENSE (Zhang et al., NeurIPS 2022). It tests the model after every local epoch and does not set
training mode again: from the second epoch on BatchNorm normalises by the running statistics of the first one and updates none,
and dropout is off. Of networks with neither it is plain local training to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Trainer
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class BnFrozenAfterEpoch1(Trainer):
    """Has no settings."""

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        net.train(ctx.epoch == 0)
        try:
            return super().loss(net, params, buffers, batch, ctx)
        finally:
            net.train()
