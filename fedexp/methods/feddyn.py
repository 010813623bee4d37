"""FedDyn: dynamic regularisation.

It makes the minimisers of the clients' objectives agree with the minimiser of the mean
objective.

Reference:
    Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021,
    Algorithm 1.
    https://arxiv.org/abs/2111.04263

Update:
    Client i has the loss f_i, which includes weight decay, and a correction vector g_i.
    In round t it starts from the global model w^t and minimises
    ``f_i(w) - <g_i, w> + (a / 2) ||w - w^t||^2``. The number ``a`` is the strength of
    the regularisation. Every step uses the gradient ``g + a (w - (w^t + g_i / a))``,
    where g is the gradient of the batch's loss. The correction is added before
    clipping. The trained model is y_i, and the update is ``u_i = y_i - w^t``. After
    local training ``g_i <- g_i - a u_i``. If local training reaches the minimum, the
    new g_i is the gradient of f_i at y_i.

    Let P_t be the participants of round t, and N the number of clients that may take
    part. The server computes ``h <- h - (a / N) sum_{i in P_t} u_i`` and
    ``w^{t+1} = mean_{i in P_t} y_i - h / a``. At a fixed point every u_i is 0 and h is
    0, so the gradients g_i of all clients sum to zero. Then w minimises the mean of all
    f_i, in which every client has the same weight.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Clients: g_i (one float per parameter, initially zero). Server: ``d = -h / a`` (one
    float per parameter, initially zero). d is the sum of all updates u_i of all rounds
    so far, divided by N. The server stores d instead of h, so it does not need ``a``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from fedexp.core import trees
from fedexp.core.build import require
from fedexp.core.needs import SAME_INIT, Demand, Needs
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import Adjustment, Ctx, Received, RoundStats, Trainer, elementwise
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import Weights


class FedDynState(TypedDict):
    """The state of FedDyn's server: the drift correction d."""

    d: Tree


@dataclass(frozen=True)
class FedDynServer(ServerOptimizer):
    """The server step of FedDyn: ``d <- d + (m / N) U``, then ``w <- w + U + d``.

    w is the global model, d is the drift correction, and U is the plain mean of the m
    participants' updates. N is the number of clients that may take part. The norm
    ||d|| = ||h|| / a is logged as ``server/d``.
    """

    @property
    def needs(self) -> Needs:
        return Needs(
            (
                Demand("aggregator.weights", "uniform", "gives every client the same weight"),
                Demand(
                    "trainer",
                    FedDyn,
                    "corrects the drift of clients that are regularised dynamically",
                ),
            ),
            plain_mean=True,
        )

    def init(self, weights: Weights) -> FedDynState:
        return {"d": trees.zeros_like(weights.params)}

    def step(
        self, state: FedDynState, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[FedDynState, Tree, Metrics]:
        d = trees.add(state["d"], direction, alpha=stats.m / stats.N)
        return (
            {"d": d},
            trees.add(trees.add(params, direction), d),
            {"server/d": trees.squared_norm(d) ** 0.5},
        )


@dataclass(frozen=True)
class FedDyn(Trainer):
    """The client's side of FedDyn.

    Args:
        a: Strength of the regularisation (alpha in the paper).
    """

    a: float = 0.1

    def __post_init__(self) -> None:
        require(
            self.a > 0,
            f"a must be positive, got {self.a}: without it nothing corrects the clients' drift",
        )

    @property
    def needs(self) -> Needs:
        return Needs(
            (
                SAME_INIT,
                Demand(
                    "server_optimizer", FedDynServer, "needs the server that corrects its drift"
                ),
            )
        )

    def init_state(self, start: Tree, received: Received) -> Trees:
        return {"g_i": trees.zeros_like(start)}

    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        return Adjustment(
            pull=self.a, toward=trees.add(ctx.start, ctx.state["g_i"], alpha=1 / self.a)
        )

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees]:
        return {}, {"g_i": trees.sub(ctx.state["g_i"], trees.sub(params, ctx.start), alpha=self.a)}
