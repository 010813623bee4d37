"""The size of a fused network relative to the networks that were fused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedexp.matching.structure import Structure


def width_metrics(units: Sequence[Tensor], widths: Sequence[int]) -> dict[str, float]:
    """Compute metrics of the fused widths (none if there are no hidden layers).

    Local units are the units of the models. Global units are the units of the fused
    network. Each local unit is assigned to a global unit. The metrics are:

    - ``fusion/width_k``: number of global units of hidden layer k = 1, 2, ...
    - ``fusion/log_ratio``: natural logarithm of the number of all global units divided
      by the number of all local units.
    - ``fusion/matched``: share of the local units whose global unit also belongs to
      another model.

    Args:
        units: For each hidden layer, the global unit of every local unit, in any shape.
        widths: For each hidden layer, the number of global units.
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
    """Compute `width_metrics` for models whose units are matched one to one.

    Args:
        structure: The structure of the network.
        models: Number of models.
    """
    sizes = [group.size for group in structure.groups]
    return width_metrics([torch.arange(size).repeat(models) for size in sizes], sizes)
