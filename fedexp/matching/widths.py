"""How large a fused network is beside those that it was made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedexp.matching.structure import Structure


def width_metrics(units: Sequence[Tensor], widths: Sequence[int]) -> dict[str, float]:
    """Width of each hidden layer, the natural log of all global units over all local ones, the share of local units that
    share theirs with another model; nothing without hidden layers.

    Args:
        units: of each layer, the global units of all local ones, in any shape.
        widths: of each layer, the number of global units.
    """
    if not units:
        return {}
    local = sum(each.numel() for each in units)
    shared = sum(int((torch.bincount(each.flatten())[each] > 1).sum()) for each in units)
    return {
        **{f"fusion/width_{number}": float(width) for number, width in enumerate(widths, start=1)},
        "fusion/log_ratio": math.log(sum(widths) / local),
        "fusion/matched": shared / local,
    }


def one_to_one(structure: Structure, models: int) -> dict[str, float]:
    """`width_metrics` where every unit has a partner in each of so many models, of one network."""
    sizes = [group.size for group in structure.groups]
    return width_metrics([torch.arange(size).repeat(models) for size in sizes], sizes)
