"""Images of one shape each with its mask, made in memory: segmentation for tests, demos and reduced tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Targets
from fedexp.core.seeds import numpy_generator
from fedexp.data.dataset import Arrays, Dataset
from fedexp.data.images import require_image_shape

_CONTRAST = 0.2  # the least mean difference between an object's colour and its background's


@dataclass(frozen=True, kw_only=True)
class ShapesMasks(Dataset):
    """An ellipse, rectangle or triangle of any colour, place, size and rotation before a background that shades off.

    Colours differ from image to image, so that no threshold tells objects from backgrounds: an object is what is enclosed.
    Masks are 1 where a pixel's centre lies in the shape. A smaller set is the beginning of a larger one.

    Args:
        samples, test_samples: of the two splits.
        noise: standard deviation of each pixel, where black is 0 and white is 1.
        seed: of the images; the run's seed has no part in them.
    """

    pinned: ClassVar[bool] = True
    targets: ClassVar[Targets] = "masks"

    num_classes: int = field(init=False, default=1)
    shape: tuple[int, ...] = (3, 32, 32)
    samples: int = 320
    test_samples: int = 80
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_image_shape(self.shape)
        for name in ("samples", "test_samples"):
            require(
                getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}"
            )
        require(self.noise >= 0, f"noise must not be negative, got {self.noise}")

    @property
    def name(self) -> str:
        return "shapes_masks"

    def read(self, root: Path, download: bool) -> Arrays:
        return Arrays(*self._split("train", self.samples), *self._split("test", self.test_samples))

    def _split(self, split: str, n: int) -> tuple[Tensor, Tensor]:
        """(n, C, H, W) uint8 images and (n, H, W) uint8 masks."""
        channels, height, width = self.shape
        rng = numpy_generator("shapes_masks", self.seed, split, "shapes")
        drawn = rng.random((n, 7 + 2 * channels), np.float32)[:, :, None, None]  # a row an image
        kind, turn, shade = np.floor(3 * drawn[:, 0]), np.pi * drawn[:, 1], 2 * np.pi * drawn[:, 2]
        y, x = np.meshgrid(
            (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij"
        )
        dx, dy = x - (0.3 + 0.4 * drawn[:, 3]), y - (0.3 + 0.4 * drawn[:, 4])
        u = (dx * np.cos(turn) + dy * np.sin(turn)) / (0.18 + 0.17 * drawn[:, 5])
        v = (dy * np.cos(turn) - dx * np.sin(turn)) / (0.18 + 0.17 * drawn[:, 6])
        inside = np.choose(
            kind.astype(np.int64),
            [u**2 + v**2 <= 1, np.maximum(abs(u), abs(v)) <= 1, (v >= -1) & (2 * abs(u) <= 1 - v)],
        )
        back, front = drawn[:, 7 : 7 + channels], drawn[:, 7 + channels :]
        near = abs(front - back).mean(1, keepdims=True) < _CONTRAST
        front = np.where(near, (back + 0.5) % 1, front)
        slope = 0.3 * ((x - 0.5) * np.cos(shade) + (y - 0.5) * np.sin(shade))
        images = np.where(inside[:, None], front, back + slope[:, None])
        grain = numpy_generator("shapes_masks", self.seed, split, "noise")
        images += self.noise * grain.standard_normal((n, *self.shape), np.float32)
        levels = np.rint(255 * images).clip(0, 255).astype(np.uint8)
        return torch.from_numpy(levels), torch.from_numpy(inside.astype(np.uint8))
