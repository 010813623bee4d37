"""The coordinate-wise median of the clients' updates.

Reference:
    Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates, ICML 2018, Definition 1 and Algorithm 1, option I.
    https://arxiv.org/abs/1803.01498

Update:
    Each coordinate of the merged update is the median of the clients' values. The
    median is robust as long as fewer than half of the participants are attackers.

Communication:
    Up: the trained model y_i. Down: the global model w.

State:
    None.

Differences from the paper:
    The paper's workers send gradients. Here, as usual in federated learning, the median
    is over updates u_i = y_i - w. Only parameters are protected. Floating-point buffers
    (of BatchNorm) and everything that a trainer sends besides the model are averaged
    over all participants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedexp.core.trees import Tree
from fedexp.methods.bases.averaging import Collecting


@dataclass(frozen=True)
class Median(Collecting):
    """The aggregator of the median.

    All clients have the same weight, whatever their numbers of samples. For an even
    number of clients the result is the midpoint of the two middle values.
    """

    def shares(self, merging: Sequence[Tree], p: Sequence[float]) -> Sequence[float]:
        return [1.0] * len(p)

    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        return {
            name: _middle(torch.stack([update[name] for update in updates])) for name in updates[0]
        }


def _middle(values: torch.Tensor) -> torch.Tensor:
    """Return the median of `values` (n, ...) over the first axis, of shape (...)."""
    ordered = values.sort(0).values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
