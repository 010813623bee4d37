"""Five classic data sets, which torchvision downloads and reads.

torchvision compares the files with the publishers' checksums, except the unpacked files
of MNIST and Fashion-MNIST. These are checked here.
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
from fedexp.data._torchvision import torchvision_module
from fedexp.data.dataset import Arrays, Dataset
from fedexp.storage.files import file_sha256

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
# Size and sha256 of the publishers' unpacked files. torchvision checks only the packed
# files, and only when it downloads them
_PUBLISHED = {
    "MNIST": (
        (47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        (60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        (7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        (10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    "FashionMNIST": (
        (47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        (60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        (7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        (10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
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

    # Whether a file of MNIST or Fashion-MNIST that has the publisher's size must also
    # have the publisher's content. For other images in this file format, set it to
    # False in a subclass
    checks_content: ClassVar[bool] = True
    can_download: ClassVar[bool] = True
    cache_version: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return _NAMES[self.source]

    def expected_files(self, root: Path) -> list[Path]:
        return [root / file for file in _FILES[self.source]]

    def read(self, root: Path, download: bool) -> Arrays:
        # Downloads are requested only if files are missing. Otherwise torchvision's
        # download() would compute checksums of gigabytes or access the network
        fetch = download and not all(file.exists() for file in self.expected_files(root))
        kind = getattr(torchvision_module("torchvision.datasets"), self.source)

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

        if self.checks_content:
            self._check_content(root)
        return Arrays(*arrays)

    def _check_content(self, root: Path) -> None:
        """Refuse a file that has the publisher's size, but other content.

        A file of another size is accepted as a user's own data. This is possible
        because the file format stores the number of samples.
        """
        published = _PUBLISHED.get(self.source, ())
        for path, (size, sha256) in zip(self.expected_files(root), published, strict=False):
            if path.stat().st_size == size and (found := file_sha256(path)) != sha256:
                raise DataError(
                    f"a file of data set '{self.name}' is not the publisher's: it is damaged "
                    "or was changed",
                    where=str(path),
                    expected=f"sha256 {sha256}",
                    got=f"sha256 {found}",
                    do=f"delete it, then {self.ways(root)}. For other images in this format, let "
                    "dataset._target_ name a subclass of TorchvisionSet with "
                    "checks_content = False",
                )


def _arrays(loaded: Any, source: str) -> tuple[Tensor, Tensor]:
    """Return the images (n, C, H, W), uint8, and labels (n,), int64, of one split."""
    if source in ("MNIST", "FashionMNIST"):
        x, y = loaded.data[:, None], loaded.targets
    elif source == "SVHN":
        x = torch.from_numpy(np.ascontiguousarray(loaded.data))
        y = torch.from_numpy(np.atleast_1d(loaded.labels))
    else:
        x = torch.from_numpy(np.ascontiguousarray(loaded.data.transpose(0, 3, 1, 2)))
        y = torch.tensor(loaded.targets)
    return x.contiguous(), y.to(torch.int64)
