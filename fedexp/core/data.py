"""Data of a run: samples on the device, and the indices of each client's samples.

The device holds each sample only once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require

# Index of a virtual client that has the training data of all clients. Centralised
# training is the local training of this client.
POOLED = -1

Targets = Literal["labels", "masks"]
"""Kind of the targets of a data set.

``labels`` are int64 class labels of shape (n,). ``masks`` are uint8 masks of images, of
shape (n, height, width). A mask is 1 on the object and 0 elsewhere.
"""


class Noise(Protocol):
    """A function that returns uniform random numbers in [0, 1) of a given shape.

    The numbers depend on the client, the round, the step and `name`.
    """

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class Augmentation(Protocol):
    """A random transform of a normalised training batch, on the batch's device."""

    def __call__(self, x: Tensor, noise: Noise) -> Tensor: ...


@dataclass(frozen=True)
class InputDomain:
    """The normalisation that turns samples into inputs of networks.

    The clients' samples, proxy data and images that the server generates are all
    normalised in this way.

    Args:
        mean: Mean per channel. For 8-bit images it is the mean after the division by
            255. Empty if inputs are not normalised.
        std: Standard deviation per channel, in the unit of `mean`.
        pixel_range: (0, 1) for data sets of 8-bit images, whose values are divided by
            255. None for floating-point samples, which may have any values.
        augment: Random transform of the clients' normalised training batches, or None.
        dtype: Type of the inputs.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pixel_range: tuple[float, float] | None = None
    augment: Augmentation | None = None
    dtype: torch.dtype = torch.float32

    def affine(self, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the scale and the shift that turn raw samples into inputs.

        The input for a raw sample x is ``x * scale + shift``. Raw samples are 8-bit
        images (0 to 255) if `pixel_range` is set.

        Args:
            dim: Number of dimensions of a batch of samples.
            device: Device of the result.
        """
        unit = 255.0 if self.pixel_range else 1.0
        mean, std = self.mean or (0.0,), self.std or (1.0,)
        shape = (-1,) + (1,) * max(0, dim - 2)
        scale = torch.tensor(
            [1 / (unit * s) for s in std], dtype=self.dtype, device=device
        ).reshape(shape)
        shift = torch.tensor(
            [-m / s for m, s in zip(mean, std, strict=True)], dtype=self.dtype, device=device
        ).reshape(shape)
        return scale, shift

    def normalise(self, images: Tensor) -> Tensor:
        """Return the inputs for (batch, *shape) images with values in `pixel_range`.

        The operation is differentiable. Its result is bit-identical to the result of
        `Samples.inputs` for the same 8-bit images: ``x / 255 * 255`` equals x for each
        of the 256 values of a pixel.
        """
        scale, shift = self.affine(images.dim(), images.device)
        raw = images.to(self.dtype)
        return (raw * 255.0 if self.pixel_range else raw) * scale + shift


def check_normalisation(mean: Sequence[float], std: Sequence[float], shape: Sequence[int]) -> None:
    """Check the numbers by which inputs are normalised.

    Args:
        mean: Mean of each channel, one number for all channels, or no number.
        std: Standard deviation, like `mean`.
        shape: Shape of one sample. Its first size is the number of channels.

    Raises:
        ValueError: The numbers do not fit the shape, or `std` is not positive.
    """
    require(len(shape) > 0, "shape must list the sizes of one sample")
    require(len(mean) == len(std), "mean and std need one number per channel each")
    require(
        len(mean) in {0, 1, shape[0]},
        f"mean and std need {shape[0]} numbers, one per channel",
    )
    require(min(std, default=1.0) > 0, "std must be positive")


@dataclass(frozen=True, eq=False)
class Samples:
    """Raw inputs and targets of one split, for example of the training split.

    Args:
        x: (n, *shape), uint8 (images, 0..255) or floating point, on the training
            device.
        y: (n, ...), the targets (see `Targets`).
        mean: Mean per channel of ``x / 255`` if ``x`` is uint8, else of ``x``.
        std: Standard deviation per channel, in the unit of `mean`.
        augment: Random transform, applied only to training batches.
        dtype: Type of the normalised inputs.
    """

    x: Tensor
    y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augmentation | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        """Scale and shift. The normalised input is ``x * scale + shift``."""
        return self.domain.affine(self.x.dim(), self.x.device)

    @property
    def domain(self) -> InputDomain:
        """The normalisation that turns these samples into inputs of networks."""
        pixel_range = (0.0, 1.0) if self.x.dtype == torch.uint8 else None
        return InputDomain(self.mean, self.std, pixel_range, self.augment, self.dtype)

    def inputs(self, index: Tensor | slice) -> Tensor:
        """Return the normalised inputs at `index`, (batch, *shape), in the run's dtype.

        The operation is elementwise. The result for a sample therefore does not depend
        on the other samples of the batch, down to the last bit.
        """
        scale, shift = self._affine
        # index_select is 15 times faster than x[index].
        x = self.x[index] if isinstance(index, slice) else self.x.index_select(0, index)
        return x.to(self.dtype, copy=True).mul_(scale).add_(shift)

    def labels(self, index: Tensor) -> Tensor:
        """Return the (batch,) int64 labels at `index`.

        If the targets are masks, all samples count as one class and the labels are
        zeros.
        """
        return self.y.index_select(0, index) if self.y.dim() == 1 else torch.zeros_like(index)


def count_classes(labels: Tensor, num_classes: int) -> Tensor:
    """Return how often each class occurs in `labels`, (classes,) int64.

    `torch.bincount` is not used, because it synchronises a GPU.
    """
    counts = labels.new_zeros(num_classes)
    return counts.scatter_add_(0, labels, torch.ones_like(labels))


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Return the offsets of a partition (`Partition.offsets`) from the clients' sizes.

    Args:
        sizes: Number of samples of each client, (clients,).
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@dataclass(frozen=True, eq=False)
class Partition:
    """The assignment of samples to clients, as two flat arrays.

    The samples of client ``c`` have the positions
    ``indices[offsets[c]:offsets[c + 1]]`` in the training pool.

    Args:
        indices: (n,) int64.
        offsets: (clients + 1,) int64, ascending from 0 to n.
        info: Details of how the partition was made (scheme, attempts, dropped clients
            ...).
    """

    indices: np.ndarray
    offsets: np.ndarray
    info: dict[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client, (clients,)."""
        return np.diff(self.offsets)

    def size(self, client: int) -> int:
        """Return the number of samples of `client`, or of all clients for `POOLED`."""
        return (
            len(self.indices)
            if client == POOLED
            else int(self.offsets[client + 1] - self.offsets[client])
        )

    def of(self, client: int) -> np.ndarray:
        """Return the positions of `client`'s samples in the training pool, (n,) int64.

        For `POOLED`, return the positions of all clients' samples in ascending order.
        """
        return (
            np.sort(self.indices)
            if client == POOLED
            else self.indices[self.offsets[client] : self.offsets[client + 1]]
        )

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the offsets followed by the indices, as little-endian int64."""
        assignment = np.concatenate([self.offsets, self.indices], dtype="<i8")
        return hashlib.sha256(assignment.data).hexdigest()

    @classmethod
    def from_lists(cls, parts: list[np.ndarray], **info: str | int | float | bool) -> Partition:
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        empty = np.zeros(0, np.int64)  # for a partition without clients
        indices = np.concatenate([empty, *parts], dtype=np.int64, casting="unsafe")
        return cls(indices, offsets_of(sizes), info)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data of a run. Aggregators see only `Env`, never this object.

    Args:
        train: The training pool, without samples that the config moves to `proxy`.
        partition: The clients' parts of `train`, without validation samples.
        test: The test set, without samples that the config moves to `proxy`.
        num_classes: Number of classes.
        fingerprint: SHA-256 of the arrays as loaded, before any split.
        labels: (n,) int64 labels of `train` as a NumPy array, or zeros if the targets
            are masks. The array may share memory with ``train.y``.
        val: Validation samples, or None. They are samples that were held out from the
            clients' data, or samples that no client ever had.
        proxy: Data that the server may use (proxy data), or None.
        proxy_source: Source of `proxy`: ``none``, ``train``, ``test`` or ``noise``.
        proxy_dataset: Name of the data set that `proxy` was taken from, if it is not
            the clients' data set, else None.
        proxy_fingerprint: Fingerprint of the data set `proxy_dataset`, or None.
        after_split: State of NumPy's legacy generator (``RandomState.get_state``) after
            this generator sampled the partition, or None.
        pool_sha256: Hash of `fingerprint` and of the positions of `train` in the data
            set, or None if `train` does not consist of samples of the data set.
    """

    train: Samples
    partition: Partition
    test: Samples
    num_classes: int
    fingerprint: str
    labels: np.ndarray
    val: Samples | None = None
    proxy: Samples | None = None
    proxy_source: str = "none"
    proxy_dataset: str | None = None
    proxy_fingerprint: str | None = None
    after_split: Mapping[str, Any] | None = None
    pool_sha256: str | None = None

    @property
    def test_data_in_training(self) -> str | None:
        """Description of test data that the server may train on, or None."""
        if self.proxy is None or self.proxy_source != "test":
            return None
        return f"proxy.source=test: {len(self.proxy):,} samples" + (
            f" of {self.proxy_dataset}" if self.proxy_dataset else ""
        )

    def positions(self, client: int) -> Tensor:
        """Return the positions of `client`'s samples in the training pool.

        Returns:
            Positions of shape (n,), int64. They are on the CPU, where the order of the
            batches is computed.
        """
        return torch.from_numpy(self.partition.of(client))

    def class_counts(self) -> np.ndarray:
        """Return how many training samples of each class each client holds.

        Returns:
            Counts of shape (clients, classes), int64.
        """
        owner = np.repeat(np.arange(self.partition.num_clients), self.partition.sizes)
        flat = owner * self.num_classes + self.labels[self.partition.indices]
        shape = self.partition.num_clients, self.num_classes
        return np.bincount(flat, minlength=math.prod(shape)).reshape(shape)
