"""FedExP: an extrapolated server step.

Reference:
    Jhunjhunwala, Wang & Joshi, FedExP: Speeding Up Federated Averaging via
    Extrapolation, ICLR 2023, Eq. 9.
    https://arxiv.org/abs/2301.09604

Update:
    U is the mean of the clients' updates u_i with weights p_i. The server step is
    ``w <- w + eta_g U``, where w is the global model. Its step size is
    ``eta_g = max(1, sum_i p_i ||u_i||^2 / (2 (||U||^2 + eps)))``, with a small constant
    eps. The mean of the last two iterates of w is evaluated. Training continues from
    the last iterate.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    Server: the previous iterate (one float per parameter).

Differences from the paper:
    eps is multiplied by ``(lr_t / lr_0)^2``, where lr_t is the local step size of round
    t. If the local step size decays, both terms of the denominator then shrink at the
    same rate. Norms are accumulated in float64.

Differences from the authors' code:
    The code has ``m eps`` in the denominator, for m participants. With
    ``eps_scaling=code`` this implementation has it, too. After the first round, the
    code evaluates only the new iterate. Here the mean of the initial model and the new
    iterate is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from fedexp.core import trees
from fedexp.core.build import require_not_negative
from fedexp.core.needs import Needs
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


class FedExPState(TypedDict):
    """The state of FedExP: the previous iterate of the global model."""

    previous: Tree


@dataclass(frozen=True)
class FedExP(ServerOptimizer):
    """The server step of FedExP.

    Args:
        eps: The eps in the denominator. It bounds eta_g near convergence.
        eps_scaling: Whether the denominator contains eps (``paper``) or m eps for m
            participants (``code``).
    """

    eps: float = 1e-3
    eps_scaling: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        require_not_negative(self, "eps")

    @property
    def needs(self) -> Needs:
        return Needs(update_norms=True)

    def init(self, weights: Weights) -> FedExPState:
        return {"previous": weights.params}

    def eta(self, direction: Tree, stats: RoundStats) -> float:
        """Return eta_g of this round (Eq. 9)."""
        eps = (
            self.eps * (stats.lr / stats.lr_0) ** 2 * (stats.m if self.eps_scaling == "code" else 1)
        )
        mean = sum(p * s for p, s in zip(stats.p, stats.squared_norms, strict=True))
        denominator = 2 * (trees.squared_norm(direction) + eps)
        return max(1.0, mean / denominator) if denominator else 1.0

    def step(
        self, state: FedExPState, params: Tree, direction: Tree, stats: RoundStats
    ) -> tuple[FedExPState, Tree, Metrics]:
        eta = self.eta(direction, stats)
        return {"previous": params}, trees.add(params, direction, alpha=eta), {"server/eta_g": eta}

    def evaluated(self, state: FedExPState, params: Tree) -> Tree:
        return trees.scale(trees.add(params, state["previous"]), 0.5)
