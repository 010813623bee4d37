"""FedAdam: an adaptive server step without bias correction.

`fedexp.methods.fedyogi` derives FedYogi from this step.

Reference:
    Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2.
    https://arxiv.org/abs/2003.00295

Update:
    U is the averaged update of a round, b is the first moment, and v is the second
    moment. All operations are elementwise. b starts at 0, and v starts at tau^2. Both
    methods use ``b <- beta_1 b + (1 - beta_1) U``. FedAdam uses
    ``v <- beta_2 v + (1 - beta_2) U^2``. FedYogi uses
    ``v <- v - (1 - beta_2) U^2 sign(v - U^2)``. Then the global model w is updated by
    ``w <- w + lr b / (sqrt(v) + tau)``, where lr is the server step size.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server: b and v (2 D floats for D parameters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from fedexp.core import trees
from fedexp.core.build import require, require_positive
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


class FedAdamState(TypedDict):
    """The state of FedAdam: first moment b and second moment v of the updates."""

    b: Tree
    v: Tree


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """The server step of FedAdam.

    Args:
        lr: Server step size (eta_g).
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        tau: Number that is added to sqrt(v). The paper calls it the degree of
            adaptivity.
    """

    lr: float = 0.1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(self, "lr", "tau")
        require(
            0 <= self.beta_1 < 1 and 0 <= self.beta_2 < 1, "beta_1 and beta_2 must be in [0, 1)"
        )

    def init(self, weights: Weights) -> FedAdamState:
        v = {name: torch.full_like(value, self.tau**2) for name, value in weights.params.items()}
        return {"b": trees.zeros_like(weights.params), "v": v}

    def second_moment(self, v: Tree, squared: Tree) -> Tree:
        """Return v after a round.

        Args:
            v: Second moment before the round.
            squared: Elementwise square of the averaged update.
        """
        return trees.add(trees.scale(v, self.beta_2), squared, alpha=1 - self.beta_2)

    def step(
        self, state: FedAdamState, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[FedAdamState, Tree, Metrics]:
        b = trees.add(trees.scale(state["b"], self.beta_1), direction, alpha=1 - self.beta_1)
        v = self.second_moment(state["v"], trees.mul(direction, direction))
        denominator = {name: value.add_(self.tau) for name, value in trees.sqrt(v).items()}
        return {"b": b, "v": v}, trees.add(params, trees.div(b, denominator), alpha=self.lr), {}
