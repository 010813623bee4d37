"""FedMRUR's normalised aggregation: the mean's direction with the updates' mean length.

Reference:
    An et al., Federated Learning with Manifold Regularization and Normalized Update
    Reaggregation, NeurIPS 2023, Algorithm 1, line 15.
    https://arxiv.org/abs/2311.05924

Update:
    ``U = (sum_i p_i ||u_i||) Ubar / ||Ubar||`` with ``Ubar = sum_i p_i u_i``. Norms are
    over all parameters. The amplification, the factor of Ubar, is at least 1. It is
    sqrt(m) for orthogonal updates of equal length and equal weights p_i.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    None.

Logged:
    ``server/factor``, the amplification.

Differences from the paper:
    As printed, the algorithm subtracts the sum of ``w_K - w_0`` from w and therefore
    ascends the loss. FL-Simulator, whose authors overlap with the paper's, has the
    opposite sign for MoFedSAM. This implementation also has the opposite sign.
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
    """Return ``sum_i p_i ||u_i|| / ||mean||``.

    If the updates cancel and `mean` is no larger than their rounding error, return 1.
    """
    length = math.sqrt(trees.squared_norm(mean))
    each = sum(p * math.sqrt(s) for p, s in zip(stats.p, stats.squared_norms, strict=True))
    rounding = stats.m * torch.finfo(next(iter(mean.values())).dtype).eps
    return each / length if length > rounding * each else 1.0


@dataclass(frozen=True)
class NormalizedMean(Mean):
    """The normalised mean of the updates.

    Updates that cancel up to rounding hardly change w. The update of a single client is
    applied bit-exactly.

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
    """Return an update of `NormalizedMean` with the mean before its normalisation."""
    return replace(update, mean=trees.scale(update.mean, 1 / amplification(update.mean, stats)))
