"""The image bank: batches of generated images in 8 bits.

An aggregator's state stores the batches. The student trains on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.data import InputDomain, Samples
from fedexp.core.trees import Tree

Rounding = Literal["round", "floor"]


def stored(images: Tensor, labels: Tensor, rounding: Rounding = "round") -> Tree:
    """Return a batch as the bank stores it.

    Args:
        images: Images of shape (b, c, H, W), with values in [0, 1].
        labels: Labels of the images, of shape (b,).
        rounding: Rounding of pixels to 8 bits. ``round`` changes a value by at most
            1 / 510. ``floor`` lowers it by less than 1 / 255.

    Returns:
        ``x`` of shape (b, c, H, W), uint8, and ``y`` of shape (b,), int64.
    """
    pixels = images.detach() * 255
    pixels = pixels.round() if rounding == "round" else pixels.floor()
    return {"x": pixels.clamp(0, 255).to(torch.uint8), "y": labels}


def samples_of(bank: Sequence[Tree], domain: InputDomain) -> Samples:
    """Return the bank's batches as samples, normalised as the clients' inputs are."""
    x, y = (torch.cat([batch[name] for batch in bank]) for name in ("x", "y"))
    return Samples(x, y, domain.mean, domain.std, dtype=domain.dtype)
