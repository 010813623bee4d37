"""Five classic data sets, read and fetched by torchvision.

torchvision checks the publishers' checksums.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import DataError
from fedexp.data._torchvision import torchvision_datasets
from fedexp.data.dataset import Arrays, Dataset

_IDX = tuple(
    f"{part}-ubyte"
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
# Paths below the data root, in torchvision's layout
_FILES = {
    "MNIST": tuple(f"MNIST/raw/{name}" for name in _IDX),
    "FashionMNIST": tuple(f"FashionMNIST/raw/{name}" for name in _IDX),
    "CIFAR10": tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
    ),
    "CIFAR100": tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
    "SVHN": ("train_32x32.mat", "test_32x32.mat"),
}
_NAMES = {
    "MNIST": "mnist",
    "FashionMNIST": "fashion_mnist",
    "CIFAR10": "cifar10",
    "CIFAR100": "cifar100",
    "SVHN": "svhn",
}


@dataclass(frozen=True, kw_only=True)
class TorchvisionSet(Dataset):
    """MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 or SVHN, with the publisher's split.

    SVHN consists of its `train` and `test` parts, without `extra`. Its label 10 is the
    digit 0.

    Args:
        source: Name of the data set.
    """

    source: Literal["MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "SVHN"]

    can_download: ClassVar[bool] = True
    cache_version: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return _NAMES[self.source]

    def expected_files(self, root: Path) -> list[Path]:
        return [root / file for file in _FILES[self.source]]

    def read(self, root: Path, download: bool) -> Arrays:
        # Even if nothing is missing, torchvision's download() computes checksums of
        # gigabytes or asks the network
        fetch = download and not all(file.exists() for file in self.expected_files(root))
        kind = getattr(torchvision_datasets(), self.source)

        arrays: list[Tensor] = []

        try:
            for train in (True, False):
                choice: dict[str, Any] = (
                    {"split": "train" if train else "test"}
                    if self.source == "SVHN"
                    else {"train": train}
                )
                arrays += _arrays(kind(str(root), download=fetch, **choice), self.source)
        except (
            RuntimeError,
            OSError,
            URLError,
            ValueError,
            TypeError,
            AssertionError,
            EOFError,
            KeyError,
            IndexError,
            pickle.UnpicklingError,
        ) as error:
            if fetch:
                raise DataError(
                    f"data set '{self.name}' could not be downloaded",
                    where=f"data_root={root}",
                    got=str(error).strip() or type(error).__name__,
                    do="check the network and that the folder can be written; "
                    "or download the files in another way and put them there as "
                    f"{', '.join(_FILES[self.source][:2])} ...",
                ) from error
            raise DataError(
                f"the files of data set '{self.name}' are damaged or not the publisher's",
                where=", ".join(str(path) for path in self.expected_files(root)[:4]),
                got=str(error).strip() or type(error).__name__,
                do=f"delete them, then {self.ways(root)}",
            ) from error

        return Arrays(*arrays)


def _arrays(loaded: Any, source: str) -> tuple[Tensor, Tensor]:
    """Return images (n, C, H, W), uint8, and labels (n,), int64, of `loaded`."""
    if source in ("MNIST", "FashionMNIST"):
        x, y = loaded.data[:, None], loaded.targets
    elif source == "SVHN":
        x = torch.from_numpy(np.ascontiguousarray(loaded.data))
        y = torch.from_numpy(np.atleast_1d(loaded.labels))
    else:
        x = torch.from_numpy(np.ascontiguousarray(loaded.data.transpose(0, 3, 1, 2)))
        y = torch.tensor(loaded.targets)
    return x.contiguous(), y.to(torch.int64)
