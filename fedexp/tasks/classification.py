"""Single-label classification with cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.data import Noise
from fedexp.core.device import wide
from fedexp.core.net import Net
from fedexp.core.task import Batch, Task, member_shares
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Classification(Task):
    """Classification with int64 labels (b,) and logits (b, classes).

    The loss is the cross-entropy. The metrics are the accuracy ``acc`` in [0, 1] and
    ``loss`` in nats.
    """

    cross_entropy: ClassVar[bool] = True
    highest: ClassVar[float] = 1.0
    metric_names: ClassVar[tuple[str, ...]] = ("acc", "loss")

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        return F.cross_entropy(net(params, buffers, batch.x), batch.y)

    def combine(self, outputs: Sequence[Tensor], rule: str, weights: Tensor | None) -> Tensor:
        """Combine the logits of an ensemble's models into one output.

        ``rule='logits'`` computes the mean of the logits. ``rule='probs'`` computes the
        logarithm of the mean softmax probability. Means are weighted if weights are
        given. With ``rule='logits'`` the weights may have shape (models, classes). Each
        class then has its own weighted mean, which is 0 if all weights of the class are
        0.
        """
        stacked = torch.stack(list(outputs))
        if weights is not None and weights.dim() == 2:
            if rule != "logits":
                raise ValueError(f"weights per class need the rule 'logits', got '{rule}'")
            shares, totals = weights.to(stacked), weights.to(stacked).sum(0)
            return (stacked * shares[:, None]).sum(0) / totals.where(totals > 0, 1)

        share = member_shares(stacked, weights)

        # The mean is computed from log-probabilities. Otherwise a probability that is
        # too small for float32 would be rounded to 0, and the loss would be infinite.
        if rule == "probs":
            return torch.logsumexp(stacked.log_softmax(-1) + share.log(), 0)
        return (stacked * share).sum(0)

    def totals(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {
            "acc": wide((output.argmax(1) == y).sum()),
            "loss": wide(F.cross_entropy(output, y, reduction="sum")),
        }
