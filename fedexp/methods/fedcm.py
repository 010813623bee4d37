"""FedCM: the server's momentum is mixed into every local gradient.

Reference:
    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    https://arxiv.org/abs/2106.10874

Update:
    A local step uses ``v = alpha g + (1 - alpha) Delta``. Delta is fixed during the
    round. After the round, ``Delta = -U / (tau lr)``. U is the aggregate of the m
    clients' updates, before it is multiplied by the server's step size. tau and lr are
    the number of local steps and the local step size of this round. Delta is therefore
    in units of a gradient. Delta starts at zero. Under a constant gradient g it is
    ``(1 - (1 - alpha)^t) g`` after t rounds.

Communication:
    Up: the trained model y_i. Down: the global model w and Delta (2 D floats for D
    parameters).

State:
    Clients: none. Server: Delta (D floats).

Logged:
    ``server/Delta``, the norm of Delta.

Differences from the paper:
    In the paper and in FL-Simulator all clients have the same tau. If the tau_i of the
    clients differ, tau is their mean with the weights p_i, so that every local step
    counts alike. For a mean of the u_i / (tau_i lr), each client would have to send D
    more numbers.

    As in FL-Simulator, weight decay comes after clipping, outside the mix v. Delta
    carries the decay from round to round. The fixed points are then those of the decay
    ``weight_decay / alpha``: ``grad f + (weight_decay / alpha) w = 0``. With
    ``decay_inside_mix`` the step uses
    ``v = alpha (g + weight_decay w) + (1 - alpha) Delta`` and the fixed points are
    those of ``weight_decay``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.build import require
from fedexp.core.needs import SAME_INIT, SGD, Demand, Needs
from fedexp.core.trainer import Adjustment, Ctx, RoundStats, ServerUpdate, Trainer, elementwise
from fedexp.core.trees import Tree, Trees

NO_BUFFER = Demand(
    "local.momentum",
    0,
    "has its own momentum in units of a gradient, which a momentum buffer would amplify",
)


@dataclass(frozen=True)
class FedCM(Trainer):
    """The client's side of FedCM. The momentum Delta is kept by its server half.

    Args:
        alpha: Share of the fresh gradient (alpha). With 1 the method equals FedAvg
            bit-exactly.
        decay_inside_mix: Whether weight decay is part of the mix, as the gradient is.
            Then ``(1 - alpha) weight_decay w`` is subtracted before clipping, and the
            optimizer adds ``weight_decay w`` after clipping. The clipped gradient
            therefore includes the subtracted term.
    """

    alpha: float = 0.1
    decay_inside_mix: bool = False

    def __post_init__(self) -> None:
        require(0 < self.alpha <= 1, f"alpha must be in (0, 1], got {self.alpha}")

    @property
    def needs(self) -> Needs:
        return Needs((SGD, SAME_INIT, NO_BUFFER), local_steps=True)

    def init_shared(self, start: Tree) -> Trees:
        return {"Delta": trees.zeros_like(start)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        if self.alpha == 1:
            return None
        shift = trees.scale(ctx.shared["Delta"], 1 - self.alpha)
        excess = (
            (1 - self.alpha) * ctx.local_training.weight_decay if self.decay_inside_mix else 0.0
        )
        # Subtract the excess decay of w^t. `pull` subtracts that of w - w^t.
        if excess:
            shift = trees.sub(shift, ctx.start, alpha=excess)
        return Adjustment(gradient=self.alpha, pull=-excess, shift=shift)

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        tau = sum(p * tau for p, tau in zip(stats.p, stats.tau, strict=True))
        return {"Delta": trees.scale(update.mean, -1 / (tau * stats.lr))}
