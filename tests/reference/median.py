"""Coordinate-wise median of the updates (Yin et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedexp.aggregators.averaging import Collecting
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Median(Collecting):
    """Of an even number of clients the lower of the two middle values, as torch has it."""

    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        return {name: torch.stack([update[name] for update in updates]).median(0).values for name in updates[0]}
