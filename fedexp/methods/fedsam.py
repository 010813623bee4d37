"""FedSAM: sharpness-aware minimisation at the clients.

Reference:
    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML
    2022.
    https://arxiv.org/abs/2206.02618

Update:
    A local step uses the gradient at the ascent point ``w + rho g / (||g|| + eps)``.
    Here g is the gradient of the same batch at w, rho is the radius of the
    perturbation, and eps avoids a division by zero. The norm is over all trained
    parameters. The gradient at the ascent point is clipped. Then weight decay is added,
    computed from w and not from the ascent point. BatchNorm's running statistics come
    from the first pass, at w.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: none.

Logged:
    ``train/perturbation``, the norm of the perturbation.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.build import require_not_negative, require_positive
from fedexp.core.trainer import Ascent, Ctx, Trainer


@dataclass(frozen=True)
class FedSAM(Trainer):
    """The client's side of FedSAM.

    Args:
        rho: Radius of the perturbation. With 0 the method equals FedAvg bit-exactly,
            and a step computes only one gradient.
        eps: Number that is added to the gradient's norm.
    """

    rho: float = 0.5
    eps: float = 1e-7

    def __post_init__(self) -> None:
        require_not_negative(self, "rho")
        require_positive(self, "eps")

    def ascent(self, ctx: Ctx) -> Ascent | None:
        return Ascent(self.rho, self.eps) if self.rho else None
