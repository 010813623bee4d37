"""Gaussian clusters, generated in memory without files.

Tests of speed and scale use them, because any number of samples is possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import numpy_generator
from fedexp.data.dataset import Arrays, Dataset

# Number of samples drawn at a time. It affects the values, because each chunk has a
# separate random stream
_CHUNK = 65_536
# A standard deviation of the values is this many of the 256 levels of a stored byte.
_UNIT = 24.0


@dataclass(frozen=True, kw_only=True)
class Synthetic(Dataset):
    """One Gaussian cluster per class.

    Class k has the cluster ``N(m_k, I)`` with the centre
    ``m_k ~ N(0, separation^2 I)``. Sample i has class ``i % num_classes``. Each feature
    x is stored as one byte: ``128 + 24 x``, rounded and clipped. With the same seed, a
    smaller data set consists of the first samples of a larger one.

    Args:
        samples: Number of training samples.
        test_samples: Number of test samples.
        features: Number of features of a sample.
        separation: Standard deviation of each coordinate of the centres. At 0, all
            classes have the same distribution. At 1, the distance of two centres is
            about ``sqrt(2 * features)``.
        seed: Seed of centres and samples. It is independent of the run's seed.
    """

    pinned: ClassVar[bool] = True
    selects: ClassVar[frozenset[str]] = frozenset({"samples", "test_samples"})

    num_classes: int = 10
    shape: tuple[int, ...] = field(init=False)
    mean: tuple[float, ...] = (0.501961,)  # 128 / 255
    std: tuple[float, ...] = (0.094118,)  # _UNIT / 255
    samples: int = 10_000
    test_samples: int = 2_000
    features: int = 8
    separation: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "test_samples", "features"):
            require(
                getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}"
            )
        require(self.separation >= 0, f"separation must not be negative, got {self.separation}")
        object.__setattr__(self, "shape", (self.features,))
        super().__post_init__()

    def read(self, root: Path, download: bool) -> Arrays:
        rng = numpy_generator("synthetic", self.seed, "centres", self.num_classes, self.features)
        centres = self.separation * rng.standard_normal(
            (self.num_classes, self.features), np.float32
        )
        return Arrays(
            *self._split("train", self.samples, centres),
            *self._split("test", self.test_samples, centres),
        )

    def _split(self, split: str, n: int, centres: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return samples (n, features), uint8, and labels (n,).

        Besides the result, only one chunk of samples is in memory at a time.
        """
        y = np.arange(n, dtype=np.int64)
        y %= self.num_classes

        x = np.empty((n, self.features), dtype=np.uint8)
        for start in range(0, n, _CHUNK):
            labels = y[start : start + _CHUNK]
            rng = numpy_generator("synthetic", self.seed, split, start // _CHUNK)

            values = rng.standard_normal((len(labels), self.features), np.float32)
            values += centres[labels]
            values *= _UNIT
            values += 128
            np.rint(values, out=values)
            x[start : start + _CHUNK] = values.clip(0, 255, out=values)

        return torch.from_numpy(x), torch.from_numpy(y)
