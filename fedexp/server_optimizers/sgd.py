"""The plain server step ``w + lr * direction``; lr = 1 is averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedexp.core import trees
from fedexp.core.build import require
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Sgd(ServerOptimizer):
    """Args: lr: server step size (eta_g)."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        require(self.lr > 0, f"lr must be positive, got {self.lr}")

    def step(
        self, state: dict[str, Any], params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[dict[str, Any], Tree, Metrics]:
        return state, trees.add(params, direction, alpha=self.lr), {}
