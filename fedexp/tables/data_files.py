"""The file names of fedexp's data sets.

The classes in `fedexp.data` read these files, but they import torch, which takes
seconds. This module does not import torch. A test checks that the file names in
`fedexp.data` and in this module are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedexp.core.paths import user_path

_IDX = tuple(
    f"raw/{part}-ubyte"
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
)
_DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

# Files by option of `dataset`, relative to the data root. An option is absent if its
# files are not fixed.
FILES: Mapping[str, tuple[str, ...]] = {
    "carvana": ("carvana/train", "carvana/train_masks"),
    "cifar10": tuple(
        f"cifar-10-batches-py/{name}"
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
    ),
    "cifar10_jpeg": ("cifar10-jpeg/train", "cifar10-jpeg/test"),
    "cifar100": tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta")),
    "digits": (),
    "domainnet": tuple(
        f"domainnet/{domain}{part}"
        for domain in _DOMAINS
        for part in ("", "_train.txt", "_test.txt")
    ),
    "fashion_mnist": tuple(f"FashionMNIST/{name}" for name in _IDX),
    "femnist": ("femnist/train", "femnist/test"),
    "mnist": tuple(f"MNIST/{name}" for name in _IDX),
    "shapes_masks": (),
    "svhn": ("train_32x32.mat", "test_32x32.mat"),
    "synthetic": (),
    "tiny_imagenet": (
        "tiny-imagenet-200/train",
        "tiny-imagenet-200/val/images",
        "tiny-imagenet-200/val/val_annotations.txt",
    ),
}


def data_root(overrides: Iterable[str] = ()) -> Path:
    """Return the folder of the data sets.

    It is the value of an override of ``data_root``. Without one, it is the value of the
    environment variable ``FEDEXP_DATA``. If that is not set, it is ``data``.
    """
    root = os.environ.get("FEDEXP_DATA", "data")
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "data_root":
            root = value
    return user_path(root, "data_root")


def has_files(dataset: str, root: Path) -> bool | None:
    """Return whether all files of a data set exist, None if their names are unknown."""
    files = FILES.get(dataset)
    return None if files is None else all((root / file).exists() for file in files)
