"""FedProx: a proximal pull toward the received model.

Reference:
    Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2.
    https://arxiv.org/abs/1812.06127

Update:
    Client i minimises ``f_i(w) + (mu / 2) ||w - w^t||^2``. Here f_i is the client's
    loss, w^t is the received model, and mu is the strength of the pull. The gradient of
    the second term, ``mu (w - w^t)``, is added to the gradient of f_i. Then clipping,
    weight decay and momentum follow as in FedAvg.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: none.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.build import require_not_negative
from fedexp.core.local_training import LocalTraining
from fedexp.core.trainer import Adjustment, Ctx, Trainer, elementwise


@dataclass(frozen=True)
class FedProx(Trainer):
    """The client's side of FedProx.

    Args:
        mu: Strength of the pull (mu, Eq. 2). With 0 the method equals FedAvg
            bit-exactly.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        require_not_negative(self, "mu")

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        return Adjustment(pull=self.mu) if self.mu else None

    def normalizer(self, tau: int, local_training: LocalTraining) -> float:
        """Return FedNova's normaliser a_i for SGD with the proximal pull.

        Without momentum it is ``(1 - (1 - lr mu)^tau) / (lr mu)`` after tau steps of
        size lr (Wang et al. 2020, Eq. 10). The loop below also covers momentum.
        """
        if not self.mu:
            return super().normalizer(tau, local_training)
        a = b = 0.0
        # If every gradient of f_i is 1, the weights move by -lr a in total. b is the
        # momentum buffer.
        for _ in range(tau):
            b = local_training.momentum * b + 1 - local_training.lr * self.mu * a
            a += b
        return a
