"""A momentum of the server that is added to every local gradient.

The local direction is ``alpha g - (1 - alpha) m`` with ``m = (w^{t+1} - w^t) / (tau
lr)``. tau is the mean number of local steps, so m has the unit of a gradient. A client
sends only y_i. The server sends w and m.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.trainer import Adjustment, Ctx, RoundStats, ServerUpdate, Trainer, elementwise
from fedexp.core.trees import Tree, Trees


@dataclass(frozen=True)
class ServerMomentum(Trainer):
    """A server optimizer that delivers a momentum to the clients.

    Args:
        alpha: Share of the new gradient. With 1, the method is FedAvg.
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
