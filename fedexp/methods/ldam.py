"""LDAM: cross-entropy with a margin that is larger the rarer a class is at the client.

Reference: Cao, Wei, Gaidon, Arechiga and Ma, Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss, NeurIPS
2019, Eq. 13 and Algorithm 1; at the clients as in FedSyn (Zhang et al. 2021, Table 2). With n_j the client's samples of class j,
``Delta_j = M n_j^(-1/4) / max_i n_i^(-1/4)`` and the loss is the cross-entropy of ``s (z - Delta_y e_y)``. Up: models.

The network's output is s z, not z: evaluation, ensembles, averages and teachers have calibrated logits and nothing else needs to
know of s. Of a linear head the factor is part of its weights (s and M then count by their product alone, and training starts
from ordinary logits; a factor before the loss would multiply every gradient by 30). With ``model.cosine_scale`` = s the head is
the authors' normalised one, ``s cos(h, w_j)``. FedSyn says nothing of the head, and DENSE's code has linear ones.

Departure: a class that a client has none of has margin 0 and DRW weight 0 and takes no part in the maximum; in the authors'
formula its margin is infinite and every loss NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import ConfigError
from fedexp.core.needs import Demand, Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec
from fedexp.tasks.classification import Classification


@dataclass(frozen=True)
class Ldam(Trainer):
    """Args:
    M: the largest margin, the rarest class's, in units of z; 0 is plain cross-entropy to the bit.
    s: the scale of z in the logits.
    drw: deferred re-weighting: from this share of a round's steps on, classes are weighted; None: never.
    beta: of those weights, in [0, 1); 0 weights all alike.
    """

    M: float = 0.5
    s: float = 30.0
    drw: float | None = None
    beta: float = 0.9999

    def __post_init__(self) -> None:
        require(self.M >= 0, f"M must not be negative, got {self.M}")
        require(self.s > 0, f"s must be positive, got {self.s}")
        require(
            self.drw is None or 0 <= self.drw <= 1,
            f"drw is a share of the steps, from 0 to 1, got {self.drw}",
        )
        require(0 <= self.beta < 1, f"beta must lie in [0, 1), got {self.beta}")

    @property
    def needs(self) -> Needs:
        return Needs((Demand("task", Classification, "changes the cross-entropy of class labels"),))

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        scale = spec.arguments.get("cosine_scale")
        if scale not in (None, self.s):
            raise ConfigError(
                "the network scales its cosines otherwise than the loss does",
                where="trainer.s",
                expected=f"model.cosine_scale, {scale}",
                got=str(self.s),
                do=f"set trainer.s={scale}, or model.cosine_scale={self.s}",
            )

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        counts = ctx.class_counts
        scaled = net(params, buffers, batch.x)  # s z
        own = batch.y[:, None] == torch.arange(len(counts), device=batch.y.device)
        logits = scaled - torch.where(own, self.s * margins(counts, self.M).to(scaled), 0)
        if self.drw is None or ctx.step < self.drw * ctx.num_steps:
            return F.cross_entropy(logits, batch.y)
        w = class_weights(counts, self.beta).to(scaled).gather(0, batch.y)
        log_p = logits.log_softmax(1).gather(1, batch.y[:, None]).squeeze(1)
        return -(w * log_p).sum() / w.sum()


def margins(counts: Tensor, largest: float) -> Tensor:
    """(classes,) float64 margins Delta of sample counts (classes,), at least one of them positive; 0 where the count is."""
    powers = torch.where(counts > 0, counts.clamp(min=1).double() ** -0.25, 0.0)
    return largest * powers / powers.max()


def class_weights(counts: Tensor, beta: float) -> Tensor:
    """(classes,) float64 weights proportional to ``(1 - beta) / (1 - beta^n_j)``, 0 where n_j is; their sum is the number of
    classes that are present (Cui et al. 2019).
    """
    present = counts > 0
    w = torch.where(present, (1 - beta) / (1 - beta ** counts.clamp(min=1).double()), 0.0)
    return w * present.sum() / w.sum()
