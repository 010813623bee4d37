"""Generated images that show one shape each, with masks of the shapes.

They are generated in memory, for segmentation in tests, demos and reduced tables.
"""

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

# Smallest difference between the colours of an object and its background, averaged over
# the channels
_CONTRAST = 0.2


@dataclass(frozen=True, kw_only=True)
class ShapesMasks(Dataset):
    """Images of one shape each on a background with a brightness gradient.

    The shape is an ellipse, rectangle or triangle of random colour, place, size and
    rotation. The colours of object and background are random in each image. A threshold
    for brightness therefore cannot separate objects from backgrounds. Masks are 1 at
    pixels whose centre is in the shape. With the same seed, a smaller data set consists
    of the first samples of a larger one.

    Args:
        samples: Number of training samples.
        test_samples: Number of test samples.
        noise: Standard deviation of the noise of each pixel. Black is 0 and white is 1.
        seed: Seed of the images. It is independent of the run's seed.
    """

    name: ClassVar[str] = "shapes_masks"
    pinned: ClassVar[bool] = True
    selects: ClassVar[frozenset[str]] = frozenset({"samples", "test_samples"})
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

    def read(self, root: Path, download: bool) -> Arrays:
        return Arrays(*self._split("train", self.samples), *self._split("test", self.test_samples))

    def _split(self, split: str, n: int) -> tuple[Tensor, Tensor]:
        """Return images (n, C, H, W), uint8, and masks (n, H, W), uint8."""
        channels, height, width = self.shape
        rng = numpy_generator("shapes_masks", self.seed, split, "shapes")
        # One row per image
        drawn = rng.random((n, 7 + 2 * channels), np.float32)[:, :, None, None]
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
