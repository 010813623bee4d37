"""The server optimizer interface: a step of the server along an averaged update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from fedexp.core.needs import Needs
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights

# The state of a server optimizer: nested values of dict, list, scalar, None, Tensor and
# Weights. At run time the outermost value is a plain dict.
State = Any


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """The server's step along an averaged update.

    The averaged update is ``direction``, new weights minus old, so it points downhill.
    The plain step is ``w + lr * direction``.
    """

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def changes_update(self) -> bool:
        """Whether the step differs from ``w + direction``.

        If the step differs, the optimizer needs an aggregator that averages updates.
        """
        return True

    def init(self, weights: Weights) -> State:
        """Return the state before round 0.

        A state consists of nested dict, list, scalar, None, Tensor and Weights.
        """
        return {}

    @abstractmethod
    def step(
        self, state: State, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[State, Tree, Metrics]:
        """Take a step.

        Returns:
            The new state, the new parameters and the values to log.
        """

    def evaluated(self, state: State, params: Tree) -> Tree:
        """Return the parameters that are evaluated and reported after a round.

        Training continues from `params`, not from the returned parameters.
        """
        return params
