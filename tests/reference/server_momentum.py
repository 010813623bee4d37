"""A trainer that mixes the last update of the server into every local gradient.

Update: A local step uses ``alpha g - (1 - alpha) m`` in place of ``g``. Here ``m =
(w^{t+1} - w^t) / (tau lr)`` is the last update of the server in units of a gradient,
and tau is the mean number of local steps.

Communication: A client sends only y_i. The server sends w and m.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.trainer import Adjustment, Ctx, RoundStats, ServerUpdate, Trainer, elementwise
from fedexp.core.trees import Tree, Trees


@dataclass(frozen=True)
class ServerMomentum(Trainer):
    """A trainer with a momentum that the server computes.

    Args:
        alpha: Weight of the fresh gradient. The value 1 gives FedAvg.
    """

    alpha: float = 0.1

    def init_shared(self, start: Tree) -> Trees:
        return {"m": trees.zeros_like(start)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        return Adjustment(gradient=self.alpha, shift=trees.scale(ctx.shared["m"], self.alpha - 1))

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        tau = sum(p * tau for p, tau in zip(stats.p, stats.tau, strict=True))
        return {"m": trees.scale(update.applied, 1 / (tau * stats.lr))}
