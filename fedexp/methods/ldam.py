"""LDAM: cross-entropy with larger margins for the client's rarer classes.

Reference:
    Cao, Wei, Gaidon, Arechiga and Ma, Learning Imbalanced Datasets with
    Label-Distribution-Aware Margin Loss, NeurIPS 2019, Eq. 13 and Algorithm 1. Used at
    the clients as in FedSyn (Zhang et al. 2021, Table 2).
    https://arxiv.org/abs/1906.07413

Update:
    Let n_j be the client's number of samples of class j, and let z be the unscaled
    logits. The margin of class j is ``Delta_j = M n_j^(-1/4) / max_i n_i^(-1/4)``,
    where M is the largest margin. The maximum is over all classes i. The loss is the
    cross-entropy of the logits ``s (z - Delta_y e_y)``. Here s is a scale, y is the
    label, and e_y is the unit vector of class y.

    The network outputs s z, not z. Only the loss uses s explicitly. Evaluation,
    ensembles, averages and teachers get the logits s z, on which the loss was computed,
    without knowing s.

    If the head is linear, its weights include the factor s. Then only the product of s
    and M has an effect, and training starts from ordinary logits. A separate factor
    s = 30 before the loss would multiply every gradient by 30. With
    ``model.cosine_scale`` = s the head is the authors' normalised head. Its logit of
    class j is ``s cos(h, w_j)``, with features h and the weight vector w_j of class j.
    FedSyn does not describe the head. DENSE's code has linear heads.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: none.

Differences from the authors' code:
    If a client has no sample of a class, the class has margin 0, has weight 0 in
    deferred re-weighting (DRW), and is left out of the maximum. In the authors' formula
    n_j = 0 gives an infinite margin, and every loss is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require, require_not_negative, require_positive
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
    """The client's side of LDAM.

    Args:
        M: Largest margin, that of the rarest class, in units of the unscaled logits z.
            With 0 and without `drw`, the loss equals plain cross-entropy bit-exactly.
        s: Scale of the logits. The network outputs s z.
        drw: Start of deferred re-weighting, as a share of a round's local steps in
            [0, 1]. From this step on, classes are weighted in the loss. None: classes
            are never weighted.
        beta: Parameter of the class weights (`class_weights`), in [0, 1). With 0 all
            weights are equal.
    """

    M: float = 0.5
    s: float = 30.0
    drw: float | None = None
    beta: float = 0.9999

    def __post_init__(self) -> None:
        require_not_negative(self, "M")
        require_positive(self, "s")
        require(
            self.drw is None or 0 <= self.drw <= 1,
            f"drw is a share of the steps, from 0 to 1, got {self.drw}",
        )
        require(0 <= self.beta < 1, f"beta must be in [0, 1), got {self.beta}")

    @property
    def needs(self) -> Needs:
        return Needs((Demand("task", Classification, "changes the cross-entropy of class labels"),))

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        scale = spec.arguments.get("cosine_scale")
        if scale not in (None, self.s):
            raise ConfigError(
                "the network scales its cosines differently from the loss",
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
    """Compute the margins ``Delta_j = M n_j^(-1/4) / max_i n_i^(-1/4)``.

    A class with n_j = 0 has margin 0 and is left out of the maximum.

    Args:
        counts: Numbers of samples n_j, of shape (classes,). At least one is positive.
        largest: The largest margin M.

    Returns:
        Margins of shape (classes,), float64.
    """
    powers = torch.where(counts > 0, counts.clamp(min=1).double() ** -0.25, 0.0)
    return largest * powers / powers.max()


def class_weights(counts: Tensor, beta: float) -> Tensor:
    """Compute class weights from numbers of samples (Cui et al. 2019).

    The weight of class j is proportional to ``(1 - beta) / (1 - beta^n_j)``. A class
    with n_j = 0 has weight 0. The weights sum to the number of classes with n_j > 0.

    Args:
        counts: Numbers of samples n_j, of shape (classes,).
        beta: Parameter in [0, 1).

    Returns:
        Class weights of shape (classes,), float64.
    """
    present = counts > 0
    w = torch.where(present, (1 - beta) / (1 - beta ** counts.clamp(min=1).double()), 0.0)
    return w * present.sum() / w.sum()
