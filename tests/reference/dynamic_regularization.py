"""A trainer that needs its server optimizer: dynamic regularisation (Acar et al., ICLR 2021).

Client: ``g - g_i + a (w - w^t)``, then ``g_i -= a u_i``. Server: ``d += (1 / N) sum_i u_i``, ``w += U + d`` (d is -h / a).
Up: y_i alone. Client state: g_i. Server state: d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedexp.core import trees
from fedexp.core.needs import SGD, Demand, Needs
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import Adjustment, Ctx, Received, RoundStats, Trainer, elementwise
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class DynamicServer(ServerOptimizer):
    """The mean of what clients moved in all rounds, those at rest included, is applied again."""

    @property
    def needs(self) -> Needs:
        return Needs((Demand("aggregator.weights", "uniform", "needs the plain mean of the updates"),))

    def init(self, weights: Weights) -> dict[str, Any]:
        return {"d": trees.zeros_like(weights.params)}

    def step(
        self, state: dict[str, Any], params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[dict[str, Any], Tree, Metrics]:
        d = trees.add(state["d"], direction, alpha=stats.m / stats.N)
        return {"d": d}, trees.add(trees.add(params, direction), d), {}


@dataclass(frozen=True)
class DynamicTrainer(Trainer):
    """Args: a: strength of the pull."""

    a: float = 0.1

    @property
    def needs(self) -> Needs:
        return Needs((SGD, Demand("server_optimizer", DynamicServer, "needs the server that corrects its drift")))

    def init_state(self, start: Tree, received: Received) -> Trees:
        return {"g_i": trees.zeros_like(start)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        return Adjustment(pull=self.a, shift=trees.scale(ctx.state["g_i"], -1.0))

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees]:
        return {}, {"g_i": trees.sub(ctx.state["g_i"], trees.sub(params, ctx.start), alpha=self.a)}
