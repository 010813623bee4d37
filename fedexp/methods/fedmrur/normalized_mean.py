"""FedMRUR's normalised aggregation: the mean update's direction, the updates' mean length.

Reference: An et al., Federated Learning with Manifold Regularization and Normalized Update Reaggregation, NeurIPS 2023,
Algorithm 1, line 15: ``U = (sum_i p_i ||u_i||) Ubar / ||Ubar||`` with ``Ubar = sum_i p_i u_i``; norms over all parameters. The
amplification is at least 1, and sqrt(m) for orthogonal updates of one length. Up: y_i. State: none. Logged: ``server/factor``.

As printed, the algorithm subtracts that sum of ``w_K - w_0`` from w and so ascends; FL-Simulator, whose authors overlap, turns
the sign for MoFedSAM, as is done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedexp.core import trees
from fedexp.core.env import Env
from fedexp.core.needs import Needs
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.methods.fedavg import Mean


def amplification(mean: Tree, stats: RoundStats) -> float:
    """``sum_i p_i ||u_i|| / ||mean||``; 1 where the updates cancel and `mean` is no more than their rounding."""
    length = math.sqrt(trees.squared_norm(mean))
    each = sum(p * math.sqrt(s) for p, s in zip(stats.p, stats.squared_norms, strict=True))
    rounding = stats.m * torch.finfo(next(iter(mean.values())).dtype).eps
    return each / length if length > rounding * each else 1.0


@dataclass(frozen=True)
class NormalizedMean(Mean):
    """Updates that cancel, but for rounding, leave w about where it is; one client's update is applied to the bit.

    Args:
        ascends: turn the sign, as Algorithm 1 is printed.
    """

    ascends: bool = False

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(update_norms=True)

    def factor(self, merged: Tree, stats: RoundStats, env: Env) -> float:
        d = amplification(merged, stats) if stats.m > 1 else 1.0
        return -d if self.ascends else d
