"""The device on which models are matched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedexp.core.weights import Weights

# Largest number of entries of a parameter with which models are matched on the CPU
_SMALL = 1 << 20


def placed(models: Sequence[Weights]) -> list[Weights]:
    """Return models on the device on which they are matched.

    Matching takes many small operations, and the assignment problems are solved on the
    CPU. If no parameter has more than 2^20 entries, the models are therefore copied to
    the CPU. Otherwise they stay on their device.
    """
    largest = max(value.numel() for model in models for value in model.params.values())
    if largest > _SMALL:
        return list(models)
    return [model.to(torch.device("cpu")) for model in models]
