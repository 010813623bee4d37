"""The device on which models are matched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedexp.core.weights import Weights

_SMALL = 1 << 20  # maximum number of entries of a tensor for matching on the CPU


def placed(models: Sequence[Weights]) -> list[Weights]:
    """Return models on the device on which they are matched.

    Matching takes many small operations, and the assignment problems are solved on the
    CPU. Models without large layers are therefore matched on the CPU. Each of them is
    copied once. Other models stay on their device.
    """
    largest = max(value.numel() for model in models for value in model.params.values())
    if largest > _SMALL:
        return list(models)
    return [model.to(torch.device("cpu")) for model in models]
