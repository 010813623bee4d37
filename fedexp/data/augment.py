"""Random flips and crops of training batches.

They run on the batch's device. The caller passes their source of random numbers as the
argument `noise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.data import Noise


@dataclass(frozen=True)
class Augment:
    """A horizontal flip, then a random crop of the zero-padded image.

    The batch is already normalised, so a padding of 0 is the data set's mean colour.
    Crop offsets are uniform on {0, ..., 2 * crop_padding} in each direction. Crop and
    flip are independent of each other. FL-Simulator has the same order (first flip,
    then crop), and sets crop_probability=0.5. The usual setting is 1.0.

    Args:
        flip: Probability of a horizontal flip.
        crop_padding: Pixels of zero padding on each side. 0 switches the crop off.
        crop_probability: Probability that a sample is cropped. Otherwise it is not
            shifted.
        per: Unit of the random decisions. ``sample`` decides for every sample.
            ``batch`` takes one decision and one offset for the whole batch, as FedExP's
            code does.
    """

    flip: float = 0.5
    crop_padding: int = 0
    crop_probability: float = 1.0
    per: Literal["sample", "batch"] = "sample"

    def __post_init__(self) -> None:
        require(0 <= self.flip <= 1, "flip is a probability: give a number from 0 to 1")
        require(
            0 <= self.crop_probability <= 1,
            "crop_probability is a probability: give a number from 0 to 1",
        )
        require(self.crop_padding >= 0, "crop_padding is a number of pixels: give 0 or more")

    def __call__(self, x: Tensor, noise: Noise) -> Tensor:
        """Return a new batch of the same shape (batch, C, H, W).

        A flip or crop that is switched off uses no random numbers.
        """
        decisions = len(x) if self.per == "sample" else 1
        if self.flip > 0:
            flipped = noise("augment/flip", (decisions,)).to(x.device) < self.flip
            x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
        if self.crop_padding > 0 and self.crop_probability > 0:
            x = self._crop(x, noise, decisions)
        return x

    def _crop(self, x: Tensor, noise: Noise, decisions: int) -> Tensor:
        batch, channels, height, width = x.shape
        pad, reach = self.crop_padding, 2 * self.crop_padding
        offset = (
            (noise("augment/offset", (decisions, 2)).to(x.device) * (reach + 1))
            .long()
            .clamp_(max=reach)
        )

        if self.crop_probability < 1:
            cropped = noise("augment/crop", (decisions,)).to(x.device) < self.crop_probability
            # At offset (pad, pad), the crop is the original image
            offset = torch.where(cropped[:, None], offset, pad)

        padded = functional.pad(x, (pad, pad, pad, pad))
        rows = offset[:, 0, None] + torch.arange(height, device=x.device)
        columns = offset[:, 1, None] + torch.arange(width, device=x.device)
        sample = torch.arange(batch, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]

        return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
