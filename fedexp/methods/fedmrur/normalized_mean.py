"""FedMRUR's normalised aggregation: the mean's direction with the updates' mean length.

Reference:
    An et al., Federated Learning with Manifold Regularization and Normalized Update
    Reaggregation, NeurIPS 2023, Algorithm 1, line 15.
    https://arxiv.org/abs/2311.05924

Update:
    Let ``Ubar = sum_i p_i u_i`` be the mean of the m clients' updates u_i with weights
    p_i. The merged update is ``U = (sum_i p_i ||u_i||) Ubar / ||Ubar||``. Norms are
    over all parameters. The factor ``(sum_i p_i ||u_i||) / ||Ubar||`` is called
    amplification. It is at least 1. It is sqrt(m) for orthogonal updates of equal
    length and equal weights.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    None.

Logged:
    ``server/factor``, the amplification.

Differences from the paper:
    As printed, the algorithm subtracts the sum of the updates ``w_K - w_0`` from the
    global model w. Here w_0 and w_K are a client's weights before and after K local
    steps. With this sign the server ascends the loss. The code FL-Simulator, whose
    authors overlap with the paper's, has the opposite sign in MoFedSAM. This
    implementation also has the opposite sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedexp.core import trees
from fedexp.core.env import Env
from fedexp.core.needs import Demand, Needs
from fedexp.core.trainer import RoundStats, ServerUpdate
from fedexp.core.trees import Tree
from fedexp.methods.fedavg import Mean


def amplification(mean: Tree, stats: RoundStats) -> float:
    """Return the amplification ``(sum_i p_i ||u_i||) / ||mean||``.

    `mean` is the mean of the clients' updates u_i with weights p_i. If the updates
    cancel, so that the norm of `mean` is only their rounding error, return 1.
    """
    length = math.sqrt(trees.squared_norm(mean))
    each = sum(p * math.sqrt(s) for p, s in zip(stats.p, stats.squared_norms, strict=True))
    rounding = stats.m * torch.finfo(next(iter(mean.values())).dtype).eps
    return each / length if length > rounding * each else 1.0


@dataclass(frozen=True)
class NormalizedMean(Mean):
    """The aggregator that computes the normalised mean of the updates.

    If the updates cancel up to rounding, their mean is not amplified, so the global
    model hardly changes. If there is a single client, its update is applied
    bit-exactly.

    Args:
        ascends: Whether the update is subtracted, as in the printed Algorithm 1.
    """

    ascends: bool = False

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(update_norms=True)

    def factor(self, merged: Tree, stats: RoundStats, env: Env) -> float:
        d = amplification(merged, stats) if stats.m > 1 else 1.0
        return -d if self.ascends else d


# Needs of trainers whose momentum is the mean before normalisation
PLAIN_MOMENTUM = Needs(
    (
        Demand(
            "aggregator",
            NormalizedMean,
            "takes its momentum from the mean before normalisation (momentum_from=plain)",
            "trainer.momentum_from=normalised, which takes the aggregate as it is applied",
        ),
    ),
    update_norms=True,
)


def before_normalisation(update: ServerUpdate, stats: RoundStats) -> ServerUpdate:
    """Return the server's update with its mean as it was before normalisation.

    Args:
        update: The update of a round with the aggregator `NormalizedMean`.
        stats: The statistics of the round.
    """
    return replace(update, mean=trees.scale(update.mean, 1 / amplification(update.mean, stats)))
