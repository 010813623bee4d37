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
# Weights. The outermost value is a plain dict.
State = Any


@dataclass(frozen=True)
class ServerOptimizer(ABC):
    """An optimizer that updates the server's model with the averaged client update.

    The averaged client update is the argument ``direction``. It is a difference, new
    weights minus old weights w, so it points downhill. A plain gradient step returns
    ``w + lr * direction``.
    """

    @property
    def needs(self) -> Needs:
        """The requirements of this optimizer, checked before anything runs."""
        return Needs()

    @property
    def changes_update(self) -> bool:
        """Whether the new weights may differ from ``w + direction``.

        If they may differ, the optimizer requires an aggregator whose result depends on
        it (`Aggregator.uses_server_step`).
        """
        return True

    def init(self, weights: Weights) -> State:
        """Return the optimizer's state before round 0.

        A state consists of nested dict, list, scalar, None, Tensor and Weights.

        Args:
            weights: The server's initial model.
        """
        return {}

    @abstractmethod
    def step(
        self, state: State, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[State, Tree, Metrics]:
        """Take the step of one round.

        Args:
            state: State of the optimizer before the step.
            params: The server's parameters before the step.
            direction: The averaged client update, new weights minus old.
            stats: Statistics of the round.

        Returns:
            The new state, the new parameters and the values to log.
        """

    def evaluated(self, state: State, params: Tree) -> Tree:
        """Return the parameters that are evaluated and reported after a round.

        Training continues from `params`, not from the returned parameters.

        Args:
            state: State of the optimizer after the step.
            params: The server's parameters after the step.
        """
        return params
