"""Coordinate-wise beta-trimmed mean of the clients' updates.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, Definition 2 and
Algorithm 1, option II: of each coordinate's n values the beta n largest and the beta n smallest are left out. There workers
send gradients; here, as in federated use, updates u_i = y_i - w. Withstands a share beta of the participants, and so beta n is
rounded up where it is no whole number, which the paper takes it to be. Up: y_i. State: none.

Only parameters are protected: floating buffers (BatchNorm's) and what trainers send are averaged over all participants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedexp.core.build import require
from fedexp.core.env import Extent
from fedexp.core.errors import ConfigError
from fedexp.core.trees import Tree
from fedexp.methods.bases.averaging import Collecting


@dataclass(frozen=True)
class TrimmedMean(Collecting):
    """Every client counts once, whatever its samples. Where fewer come than planned, at least the middle value is left.

    Args:
        beta: share of the participants that is trimmed at each end, in [0, 1/2); 0 is the uniform mean.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.beta < 0.5, f"beta must lie in [0, 1/2), got {self.beta}")

    def trimmed(self, n: int) -> int:
        """How many of n values are left out at each end."""
        return math.ceil(self.beta * n - 1e-9)  # 0.07 * 100 is more than 7

    def check_extent(self, extent: Extent) -> None:
        n = int(extent.sampling.m)
        if extent.sampling.kind == "fixed" and 2 * self.trimmed(n) >= n:
            raise ConfigError(
                f"trimming {self.trimmed(n)} at each end leaves none of {n} participants",
                where="aggregator.beta",
                expected=f"at most {(n - 1) // 2 / n:g}: one or more are left",
                got=self.beta,
                do="lower aggregator.beta, or raise clients_per_round",
            )

    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        n = len(updates)
        k = min(self.trimmed(n), (n - 1) // 2)
        return {
            name: torch.stack([update[name] for update in updates])
            .sort(0)
            .values[k : n - k]
            .mean(0)
            for name in updates[0]
        }
