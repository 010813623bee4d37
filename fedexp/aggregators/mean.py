"""FedAvg's weighted mean.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1. In update form, ``w + sum_i p_i (y_i - w)``, so that every averaging method shares its rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedexp.aggregators.averaging import Averaging
from fedexp.core import trees
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Mean(Averaging):
    """The weighted mean of the updates, as a stream: memory does not grow with the number of clients."""

    def add(self, merging: Tree | None, update: Tree, p: float, a: float) -> Tree:
        total = trees.zeros_like(update) if merging is None else merging
        torch._foreach_add_(trees.tensors(total), trees.tensors(update), alpha=p / a)
        return total

    def merged(self, merging: Tree, p: Sequence[float]) -> Tree:
        torch._foreach_mul_(trees.tensors(merging), 1 / sum(p))
        return merging
