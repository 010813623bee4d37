"""Handwritten digits that ship with scikit-learn: real data without a download."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from fedexp.data.dataset import Arrays, Dataset

TRAIN_SIZE = 1437  # 360 remain for the test


@dataclass(frozen=True, kw_only=True)
class Digits(Dataset):
    """The test part of UCI's optical recognition of handwritten digits.

    The source is Alpaydin & Kaynak 1998: 1,797 digits of 8 x 8 pixels, 16 grey levels.
    The source has no split into training and test samples. The split here is fixed: the
    first 1437 entries of ``RandomState(0).permutation(1797)`` are for training, the
    other 360 for the test. Grey levels 0..16 become 0..255, rounded.
    """

    pinned: ClassVar[bool] = True

    num_classes: int = 10
    shape: tuple[int, ...] = (1, 8, 8)

    def read(self, root: Path, download: bool) -> Arrays:
        pixels, labels = _table()
        x = torch.from_numpy(np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8))
        y = torch.from_numpy(labels.astype(np.int64))

        order = torch.from_numpy(np.random.RandomState(0).permutation(len(y)))
        train, test = order[:TRAIN_SIZE], order[TRAIN_SIZE:]
        return Arrays(x[train], y[train], x[test], y[test])


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Return grey levels 0..16 of shape (1797, 64), and labels of shape (1797,)."""
    # The data are a plain text file. It is read without importing scikit-learn, because
    # the import takes longer than the demo's first round
    spec = importlib.util.find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data, digits.target
