"""FedCM: the server's momentum is mixed into every local gradient.

Reference:
    Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.
    https://arxiv.org/abs/2106.10874

Update:
    A local step replaces the gradient g by ``v = alpha g + (1 - alpha) Delta``. Delta
    is fixed during the round. After the round, ``Delta = -U / (tau lr)``. U is the
    aggregate of the clients' updates, before it is multiplied by the server's step
    size. tau and lr are the number of local steps and the local step size of this
    round. Delta therefore has the unit of a gradient. It starts at zero. If g is
    constant, ``Delta = (1 - (1 - alpha)^t) g`` after t rounds.

Communication:
    Up: the trained model y_i. Down: the global model w and Delta, together 2 D floats
    for D parameters.

State:
    Clients: none. Server: Delta (D floats).

Logged:
    ``server/Delta``, the norm of Delta.

Differences from the paper:
    In the paper and in the code FL-Simulator all clients take the same number of steps
    tau. Here client i takes tau_i steps. If the tau_i differ, tau is their mean with
    the weights p_i, so that every local step counts alike. The alternative would be a
    mean of u_i / (tau_i lr), where u_i is client i's update. For it, each client would
    have to send D more numbers.

    As in FL-Simulator, weight decay is added after clipping and is not part of v.
    Nevertheless the updates contain the decay, and so does Delta in the next round. The
    fixed points of training are therefore those of a decay of ``weight_decay / alpha``.
    They satisfy ``grad f(w) + (weight_decay / alpha) w = 0``, where f is the training
    loss. With ``decay_inside_mix`` the step uses
    ``v = alpha (g + weight_decay w) + (1 - alpha) Delta``. Then the fixed points are
    those of a decay of ``weight_decay``.
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
    """The trainer of FedCM. Its server half stores the momentum Delta.

    Args:
        alpha: Share of the client's gradient in the mix v. With 1 the method equals
            FedAvg bit-exactly.
        decay_inside_mix: Whether weight decay is inside the mix v, with the factor
            alpha. To this end ``(1 - alpha) weight_decay w`` is subtracted before
            clipping, and the optimizer adds ``weight_decay w`` after clipping. Clipping
            therefore also acts on the subtracted term.
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
        # The term excess * w is subtracted in two parts: excess * w^t here, and
        # excess * (w - w^t) by `pull`
        if excess:
            shift = trees.sub(shift, ctx.start, alpha=excess)
        return Adjustment(gradient=self.alpha, pull=-excess, shift=shift)

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        tau = sum(p * tau for p, tau in zip(stats.p, stats.tau, strict=True))
        return {"Delta": trees.scale(update.mean, -1 / (tau * stats.lr))}
