"""Local training with the network in training mode only in the first local epoch.

The trainer reproduces an oddity of DENSE's code, for comparisons with DENSE's results.

Reference:
    The authors' code of DENSE (Zhang et al., NeurIPS 2022).

Update:
    The authors' code tests the model after every local epoch, for which it switches to
    evaluation mode. It does not return to training mode. From the second epoch on,
    BatchNorm therefore normalises by the running statistics of the first epoch and does
    not update them. Dropout is off in these epochs. For a network without BatchNorm and
    dropout, the trainer equals plain local training bit-exactly. The only exception is
    ``precision=bf16``. Networks use autocast only in training mode, so the epochs after
    the first one run in float32.
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
    """The trainer that reproduces local training in DENSE's code.

    It has no settings.
    """

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        net.train(ctx.epoch == 0)
        try:
            return super().loss(net, params, buffers, batch, ctx)
        finally:
            net.train()
