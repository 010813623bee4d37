"""An aggregator that gives the mean update the mean length of the clients' updates.

Reference: An et al., NeurIPS 2023, Algorithm 1, line 15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.env import Env
from fedexp.core.needs import Needs
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.methods.fedavg import Mean


@dataclass(frozen=True)
class NormalizedMean(Mean):
    """An aggregator that applies ``(sum_i p_i ||u_i||) U / ||U||``.

    A mean update U of zero stays zero.
    """

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(update_norms=True)

    def factor(self, merged: Tree, stats: RoundStats, env: Env) -> float:
        length = math.sqrt(trees.squared_norm(merged))
        return (
            sum(p * math.sqrt(s) for p, s in zip(stats.p, stats.squared_norms, strict=True))
            / length
            if length
            else 1.0
        )
