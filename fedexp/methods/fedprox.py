"""FedProx: a proximal pull toward the received model.

Reference: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2:
``f_i(w) + (mu / 2) ||w - w^t||^2``, as its gradient ``mu (w - w^t)`` before clipping, so that momentum, clipping and
weight decay act as they do for FedAvg. Up: y_i. State: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.build import require
from fedexp.core.local_training import LocalTraining
from fedexp.core.trainer import Adjustment, Ctx, Trainer, elementwise


@dataclass(frozen=True)
class FedProx(Trainer):
    """Args: mu: strength of the pull (mu, Eq. 2); 0 is FedAvg to the bit."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        require(self.mu >= 0, f"mu must not be negative, got {self.mu}")

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        return Adjustment(pull=self.mu) if self.mu else None

    def normalizer(self, tau: int, local_training: LocalTraining) -> float:
        """a_i with the pull (Wang et al. 2020, Eq. 10): ``(1 - (1 - lr mu)^tau) / (lr mu)``; with momentum by recursion."""
        if not self.mu:
            return super().normalizer(tau, local_training)
        a = b = 0.0
        for _ in range(tau):  # u = -lr a under a constant unit gradient
            b = local_training.momentum * b + 1 - local_training.lr * self.mu * a
            a += b
        return a
