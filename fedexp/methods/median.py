"""Coordinate-wise median of the clients' updates.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, Definition 1 and
Algorithm 1, option I. There workers send gradients; here, as in federated use, updates u_i = y_i - w. Withstands fewer than
half of the participants. Up: y_i. State: none.

Only parameters are protected: floating buffers (BatchNorm's) and what trainers send are averaged over all participants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedexp.core.trees import Tree
from fedexp.methods.bases.averaging import Collecting


@dataclass(frozen=True)
class Median(Collecting):
    """Every client counts once, whatever its samples; of an even number the midpoint of the two middle values."""

    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        return {
            name: _middle(torch.stack([update[name] for update in updates])) for name in updates[0]
        }


def _middle(values: torch.Tensor) -> torch.Tensor:
    """(...) median of (n, ...) values over the first dimension."""
    ordered = values.sort(0).values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
