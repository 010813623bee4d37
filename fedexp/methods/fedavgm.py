"""FedAvgM: FedAvg with momentum on the server.

Reference:
    Hsu, Qi & Brown, Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification, 2019.
    https://arxiv.org/abs/1909.06335

Update:
    U is the averaged update of a round, and b is the momentum buffer. The server
    computes ``b <- beta b + U``, then ``w <- w + lr b`` (heavy ball). With
    ``nesterov=true`` it computes ``w <- w + lr (U + beta b)`` instead. w is the global
    model, lr the server step size, and beta the momentum.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server: b (D floats for D parameters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from fedexp.core import trees
from fedexp.core.build import require, require_positive
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


class FedAvgMState(TypedDict):
    """The state of FedAvgM: the momentum buffer b."""

    b: Tree


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """The server step of FedAvgM.

    Args:
        lr: Server step size (eta_g).
        beta: Momentum. With 0 the step is FedAvg's.
        nesterov: Whether the step uses Nesterov momentum.
    """

    lr: float = 1.0
    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "lr")
        require(0 <= self.beta < 1, f"beta must be in [0, 1), got {self.beta}")

    def init(self, weights: Weights) -> FedAvgMState:
        return {"b": trees.zeros_like(weights.params)}

    def step(
        self, state: FedAvgMState, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[FedAvgMState, Tree, Metrics]:
        b = trees.add(direction, state["b"], alpha=self.beta)
        move = trees.add(direction, b, alpha=self.beta) if self.nesterov else b
        return {"b": b}, trees.add(params, move, alpha=self.lr), {}
