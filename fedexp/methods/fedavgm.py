"""FedAvgM: server momentum.

Reference: Hsu, Qi & Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. ``b = beta b + U``, ``w += lr b`` (heavy ball); with ``nesterov``, ``w += lr (U + beta b)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from fedexp.core import trees
from fedexp.core.build import require
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


class FedAvgMState(TypedDict):
    """The momentum buffer b."""

    b: Tree


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Args: lr: eta_g; beta: momentum, 0 is FedAvg; nesterov: look ahead."""

    lr: float = 1.0
    beta: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be positive, got {self.lr}")
        require(0 <= self.beta < 1, f"beta must lie in [0, 1), got {self.beta}")

    def init(self, weights: Weights) -> FedAvgMState:
        return {"b": trees.zeros_like(weights.params)}

    def step(
        self, state: FedAvgMState, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[FedAvgMState, Tree, Metrics]:
        b = trees.add(direction, state["b"], alpha=self.beta)
        move = trees.add(direction, b, alpha=self.beta) if self.nesterov else b
        return {"b": b}, trees.add(params, move, alpha=self.lr), {}
