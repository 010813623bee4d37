"""The server optimizer interface: what is done with an averaged update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from fedexp.core.needs import Needs
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """``direction`` points downhill (new minus old); the plain step is ``w + lr * direction``."""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def changes_update(self) -> bool:
        """Whether the step differs from ``w + direction``, so that an averaged update is needed."""
        return True

    def init(self, weights: Weights) -> dict[str, Any]:
        """State before round 0: a nest of dict, list, scalar, None, Tensor and Weights."""
        return {}

    @abstractmethod
    def step(
        self, state: dict[str, Any], params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[dict[str, Any], Tree, Metrics]:
        """New state, new parameters, and what to log."""

    def evaluated(self, state: dict[str, Any], params: Tree) -> Tree:
        """The parameters that are evaluated and reported; training continues from `params`."""
        return params
