"""The coordinate-wise beta-trimmed mean of the clients' updates.

Reference:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates, ICML 2018, Definition 2 and Algorithm 1, option II.
    https://arxiv.org/abs/1803.01498

Update:
    A round has n participants, so each coordinate has n values. The beta n largest and
    the beta n smallest values are left out, and the others are averaged. The result is
    robust if at most a share beta of the participants are attackers.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    None.

Differences from the paper:
    The paper's workers send gradients. Here, as usual in federated learning, the mean
    is over updates u_i = y_i - w. The paper assumes that beta n is a whole number. Here
    beta n is rounded up, so that the result is robust against a share beta of
    attackers. Only parameters are protected. Floating-point buffers (of BatchNorm) and
    everything that a trainer sends besides the model are averaged over all
    participants.
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
    """The aggregator of the trimmed mean.

    All clients have the same weight, whatever their numbers of samples. If fewer
    clients return than planned, trimming is limited so that at least the middle value
    is left.

    Args:
        beta: Share of the participants that is trimmed at each end, in [0, 1/2). With 0
            the result is the uniform mean.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.beta < 0.5, f"beta must be in [0, 1/2), got {self.beta}")

    def trimmed(self, n: int) -> int:
        """Return how many of n values are left out at each end."""
        # Subtract a small number, because 0.07 * 100 is slightly more than 7 in
        # floating point and would be rounded up to 8
        return math.ceil(self.beta * n - 1e-9)

    def check_extent(self, extent: Extent) -> None:
        n = int(extent.sampling.m)
        if extent.sampling.kind == "fixed" and 2 * self.trimmed(n) >= n:
            # Rounded down, because a larger beta is refused
            largest = (n - 1) // 2 * 10**6 // n / 10**6
            raise ConfigError(
                f"trimming {self.trimmed(n)} at each end leaves none of {n} participants",
                where="aggregator.beta",
                expected=f"at most {largest:g}, so that one or more are left",
                got=self.beta,
                do="lower aggregator.beta, or raise clients_per_round",
            )

    def shares(self, merging: Sequence[Tree], p: Sequence[float]) -> Sequence[float]:
        return [1.0] * len(p)

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
