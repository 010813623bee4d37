"""The image bank: batches of generated images in 8 bits, as a state holds them, and together as samples to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.data import InputDomain, Samples
from fedexp.core.trees import Tree

Rounding = Literal["round", "floor"]


def stored(images: Tensor, labels: Tensor, rounding: Rounding = "round") -> Tree:
    """A batch as the bank keeps it: ``x`` (b, c, H, W) uint8 and ``y`` (b,) int64.

    Args:
        images: with values in [0, 1]; the stored ones differ by 1 / 510 at most, with ``floor`` by less than 1 / 255, downwards.
    """
    pixels = images.detach() * 255
    pixels = pixels.round() if rounding == "round" else pixels.floor()
    return {"x": pixels.clamp(0, 255).to(torch.uint8), "y": labels}


def samples_of(bank: Sequence[Tree], domain: InputDomain) -> Samples:
    """All batches of the bank as samples whose inputs are normalised as the clients' are."""
    x, y = (torch.cat([batch[name] for batch in bank]) for name in ("x", "y"))
    return Samples(x, y, domain.mean, domain.std, dtype=domain.dtype)
