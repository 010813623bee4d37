"""The image bank: batches of generated images with 8 bits per value.

The bank is part of an aggregator's state. The student trains on all of its batches.
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
    """Convert a batch of images to the form in which the bank stores it.

    Args:
        images: Images of shape (b, channels, H, W), with values in [0, 1].
        labels: Labels of the images, of shape (b,).
        rounding: Rounding of pixels to 8 bits. ``round`` changes a value by at most
            1 / 510. ``floor`` lowers it by less than 1 / 255.

    Returns:
        Images ``x`` of shape (b, channels, H, W), uint8, and labels ``y`` of shape
        (b,), int64.
    """
    pixels = images.detach() * 255
    pixels = pixels.round() if rounding == "round" else pixels.floor()
    return {"x": pixels.clamp(0, 255).to(torch.uint8), "y": labels}


def samples_of(bank: Sequence[Tree], domain: InputDomain) -> Samples:
    """Join the batches of a bank into samples.

    They are normalised in the same way as the clients' inputs.
    """
    x, y = (torch.cat([batch[name] for batch in bank]) for name in ("x", "y"))
    return Samples(x, y, domain.mean, domain.std, dtype=domain.dtype)
