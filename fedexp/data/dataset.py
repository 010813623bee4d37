"""The base class of data sets: checks that open no file, and loading of arrays."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Targets, check_normalisation
from fedexp.core.errors import DataError
from fedexp.data.augment import Augment
from fedexp.data.cache import ArrayCache

# The last of the ways in which a user gives the files of a data set (`Dataset.ways`).
OTHER_ROOT = "set data_root=FOLDER or the variable FEDEXP_DATA to their location"


@dataclass(frozen=True, eq=False)
class Arrays:
    """A whole data set in memory, on the CPU.

    Args:
        train_x: Training samples of shape (n, *shape). Images are uint8, C x H x W,
            0..255. All other samples are floating point.
        train_y: Labels of shape (n,), int64, from 0 to num_classes - 1. Alternatively
            masks of the images, (n, H, W), uint8: 1 on the object, else 0.
        test_x: Test samples, as `train_x`.
        test_y: Test labels or masks, as `train_y`.
        train_owner: Natural owner of each training sample (writer, domain ...), of
            shape (n,), int64, counted from 0. None if the source does not name owners.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    train_owner: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the arrays that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @cached_property
    def fingerprint(self) -> str:
        """Compute the sha256 over names, dtypes, shapes and bytes of the arrays."""
        digest = hashlib.sha256()
        for name, value in self.tensors().items():
            tensor = value.contiguous()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """A data set.

    For your own data set, write a subclass with a `read` method and name it by
    ``_target_`` in your YAML.

    Args:
        num_classes: Number of classes. Labels run from 0 to num_classes - 1. A data set
            with masks has one class.
        shape: Shape of one sample. C, H, W for images.
        mean: Mean per channel. For uint8 samples it is the mean of pixels divided by
            255. For floating-point samples it is the mean of the values themselves.
        std: Standard deviation per channel, in the same unit as `mean`.
        augment: Random transform of training batches, or None.
        download: Whether the files may be fetched from their publisher.
    """

    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment | None = None
    download: bool = False

    # Whether `read` returns class labels or masks in train_y and test_y
    targets: ClassVar[Targets] = "labels"
    # Names of fields that only determine which or how many samples are read. Data sets
    # of one class that differ only in these fields may have the same samples. A class
    # that can tell whether they do overrides `may_share`
    selects: ClassVar[frozenset[str]] = frozenset()
    # Whether samples have 8 bits per value (False: floating point)
    pixels: ClassVar[bool] = True
    # Whether the config determines the samples completely. It is False for data sets
    # that read files, because the files can change
    pinned: ClassVar[bool] = False
    # Whether the samples are bit-identical to those in the papers. It is False for a
    # re-encoded data set, which cannot reproduce a published result exactly
    faithful: ClassVar[bool] = True
    # Name of the data set that this data set re-encodes, or None
    copy_of: ClassVar[str | None] = None
    # Whether `read` returns the owner of each training sample, which partition=natural
    # needs
    has_owners: ClassVar[bool] = False
    # Whether `read` downloads missing files if its argument `download` is true
    can_download: ClassVar[bool] = False
    # If not 0, decoded arrays are cached in <root>/.fedexp. Raise the number when you
    # change what `read` returns for the same files
    cache_version: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.targets == "labels":
            require(self.num_classes >= 2, "num_classes must be at least 2 for classification")
        else:
            require(
                self.num_classes == 1, "num_classes must be 1: images with masks are of one class"
            )

            require(
                self.augment is None,
                "augment would move the images but not their masks: set it to null",
            )
            require(len(self.shape) == 3, "masks need images: shape must be C, H, W")
        require(
            len(self.shape) > 0 and min(self.shape, default=0) > 0,
            "shape must list the positive sizes of one sample",
        )
        check_normalisation(self.mean, self.std, self.shape)
        require(
            self.augment is None or len(self.shape) == 3,
            "augment works on images: shape must be C, H, W",
        )

    @property
    def name(self) -> str:
        """Short name for messages and file names."""
        return type(self).__name__.lower()

    def may_share(self, other: Dataset) -> bool:
        """Return whether another data set may have some of the same samples.

        This is so if both have the same class and differ only in fields that select,
        resize or normalise samples.
        """
        outside = {"mean", "std", "augment", "download", "shape", *self.selects}
        names = {f.name for f in fields(self)} - outside
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    @abstractmethod
    def read(self, root: Path, download: bool) -> Arrays:
        """Decode the source.

        It is called only if the expected files exist, or if `download` is set and the
        class can fetch them.

        Args:
            root: Data root.
            download: Whether the files may be fetched.
        """

    def expected_files(self, root: Path) -> list[Path]:
        """Return the files or folders that the source is read from.

        The list is empty for an embedded source. If one of these files changes, the
        source is decoded again.
        """
        return []

    def check(self, root: Path, download: bool) -> None:
        """Check that the files exist, without opening them.

        Raises:
            DataError: Files are missing. The message names them and the ways to get
                them.
        """
        missing = [path for path in self.expected_files(root) if not path.exists()]
        if not missing or (download and self.can_download):
            return
        raise DataError(
            f"the files of data set '{self.name}' do not exist",
            where=f"data_root={root}",
            expected=", ".join(map(str, missing[:6]))
            + (f" and {len(missing) - 6} more" if len(missing) > 6 else ""),
            do=self.ways(root),
        )

    def ways(self, root: Path) -> str:
        """Describe how a user gets the files."""
        downloads = [
            "run with dataset.download=true",
            f"run 'fedexp-data prepare {self.name}' once",
        ]
        return "; or ".join(
            [
                *(downloads if self.can_download else ()),
                f"put the files in {root}",
                OTHER_ROOT,
            ]
        )

    def load(self, root: Path, download: bool) -> Arrays:
        """Load and check the arrays.

        If the cache contains the arrays for the current files, they are read from the
        cache. Otherwise they are decoded from the source.

        Raises:
            DataError: Files are absent or damaged, or the arrays do not match the
                declaration (see `verify`).
        """
        self.check(root, download)
        files = self.expected_files(root)
        if not (self.cache_version and files):
            return verify(self, self.read(root, download))

        cache = ArrayCache(root, self.name, self.recipe())

        stored = _stored(cache, files)
        if stored is None:
            # If several jobs start at once, one of them downloads and decodes. The
            # others read its result from the cache
            with cache.lock():
                stored = _stored(cache, files)
                if stored is None:
                    arrays = verify(self, self.read(root, download))
                    cache.store(files, arrays.tensors(), arrays.fingerprint)

                    return arrays

        return verify(self, stored)

    def content(self, root: Path) -> str | None:
        """Return the fingerprint of the arrays that `load` returns.

        The fingerprint is taken from the cache as long as the files keep their sizes
        and modification times. Otherwise the arrays are loaded to compute it.

        Returns:
            The fingerprint, or None if files are absent. Nothing is downloaded.
        """
        files = self.expected_files(root)
        if not all(file.exists() for file in files):
            return None
        known = (
            ArrayCache(root, self.name, self.recipe()).known(files)
            if self.cache_version and files
            else None
        )
        return known or self.load(root, download=False).fingerprint

    def recipe(self) -> tuple[str, ...]:
        """Return the settings that, with the files, determine the result of `read`."""
        # mean, std and augment are applied to batches, after `read`. download has no
        # effect once the files exist
        outside = {"mean", "std", "augment", "download"}
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            str(self.cache_version),
            *(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in outside),
        )


def _stored(cache: ArrayCache, files: list[Path]) -> Arrays | None:
    """Return the cached arrays of `files`.

    Returns:
        The arrays, or None if nothing is cached or the cached tensors do not have the
        stored fingerprint.
    """
    found = cache.load(files)
    if found is None:
        return None
    tensors, sha256 = found
    arrays = Arrays(**tensors)
    return arrays if arrays.fingerprint == sha256 else None


def verify(dataset: Dataset, arrays: Arrays) -> Arrays:
    """Return `arrays` if they match the declaration of `dataset`.

    Raises:
        DataError: `arrays` has another type, or an array breaks a rule. The message
            names the split and the rule.
    """
    if not isinstance(arrays, Arrays):
        raise DataError(
            f"data set '{dataset.name}': read() must return Arrays",
            where=f"{type(dataset).__name__}.read",
            expected="fedexp.data.dataset.Arrays",
            got=type(arrays).__name__,
            do="return Arrays(train_x, train_y, test_x, test_y)",
        )

    for split in ("train", "test"):
        x, y = getattr(arrays, f"{split}_x"), getattr(arrays, f"{split}_y")

        def check(
            holds: bool, what: str, expected: object, got: object, split: str = split
        ) -> None:
            if not holds:
                raise DataError(
                    f"data set '{dataset.name}': {what}",
                    where=f"{split} split",
                    expected=expected,
                    got=got,
                    do="correct dataset.* in the config, or the return value of the data set's "
                    "read()",
                )

        check(
            isinstance(x, Tensor) and isinstance(y, Tensor),
            "samples and labels must be torch tensors",
            "two tensors",
            f"{type(x)}, {type(y)}",
        )

        expected = "uint8 (0..255)" if dataset.pixels else "floating point"
        check(
            x.dtype == torch.uint8 if dataset.pixels else x.dtype.is_floating_point,
            "samples have the wrong dtype",
            f"{expected}, because the class has pixels = {dataset.pixels}",
            x.dtype,
        )
        check(
            tuple(x.shape[1:]) == dataset.shape,
            "samples have the wrong shape",
            f"(n, {', '.join(map(str, dataset.shape))})",
            tuple(x.shape),
        )

        form, dtype, top = (
            (x.shape[2:], torch.uint8, 1)
            if dataset.targets == "masks"
            else ((), torch.int64, dataset.num_classes - 1)
        )
        check(
            y.dtype == dtype and y.dim() > 0 and y.shape[1:] == form,
            f"{dataset.targets} have the wrong shape or dtype",
            f"(n, {', '.join(map(str, form))}) {dtype}",
            f"{tuple(y.shape)} {y.dtype}",
        )
        check(
            len(x) == len(y),
            f"the numbers of samples and {dataset.targets} differ",
            f"{len(x)} {dataset.targets}",
            len(y),
        )
        check(len(y) > 0, "the split is empty", "at least one sample", 0)

        low, high = int(y.min()), int(y.max())
        check(
            low >= 0 and high <= top,
            f"a {dataset.targets[:-1]} is out of range",
            f"0 .. {top}",
            f"{low} .. {high}",
        )
        check(
            not x.dtype.is_floating_point or bool(torch.isfinite(x).all()),
            "a sample contains NaN or infinity",
            "finite numbers",
            "not finite",
        )

    owner = arrays.train_owner
    if owner is not None and not isinstance(owner, Tensor):
        raise DataError(
            f"data set '{dataset.name}': train_owner must be a torch tensor",
            where="train split",
            expected=f"a tensor of {len(arrays.train_y)} int64 numbers from 0",
            got=type(owner),
            do="convert it in read(): torch.from_numpy(train_owner) for a NumPy array",
        )

    if dataset.has_owners != (owner is not None) or (
        owner is not None
        and (
            owner.shape != arrays.train_y.shape[:1]
            or owner.dtype != torch.int64
            or int(owner.min()) < 0
        )
    ):
        raise DataError(
            f"data set '{dataset.name}': the owners of samples do not match the declaration",
            where="train split",
            expected=f"{len(arrays.train_y)} int64 numbers from 0"
            if dataset.has_owners
            else "none",
            got="none" if owner is None else f"{tuple(owner.shape)} {owner.dtype}",
            do="correct the class's has_owners, or the train_owner that its read() returns",
        )
    return arrays


def labels_of(y: Tensor) -> np.ndarray:
    """Return the class label of each sample, given labels or masks.

    Returns:
        Array of shape (n,), int64: the labels themselves, or zeros for masks, because
        all images with masks are of one class.
    """
    return y.numpy() if y.dim() == 1 else np.zeros(len(y), np.int64)
