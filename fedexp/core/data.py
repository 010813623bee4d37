"""What the engines know of data: samples that lie on the device once, and clients as index lists."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

POOLED = -1  # the 'client' that holds every client's training data (centralised training)

Targets = Literal["labels", "masks"]
"""What a data set has beside its inputs: (n,) int64 labels, or (n, height, width) uint8 masks of images, 1 on the object."""


class Noise(Protocol):
    """A source of uniform [0, 1) numbers that are a function of client, step and `name`."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class Augmentation(Protocol):
    """A random transform of a normalised training batch, on the batch's device."""

    def __call__(self, x: Tensor, noise: Noise) -> Tensor: ...


@dataclass(frozen=True)
class InputDomain:
    """How images become what networks are fed: clients' samples, proxy data and images that the server generates alike.

    Args:
        mean, std: per channel, of images with values in `pixel_range`, or of floating-point samples; (): not normalised.
        pixel_range: (0, 1) where the data set has 8-bit images, which count as value / 255; None: samples are floating
            point, with any values.
        augment: random transform of the clients' training batches, which are normalised, or None.
        dtype: of what networks are fed.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    pixel_range: tuple[float, float] | None = None
    augment: Augmentation | None = None
    dtype: torch.dtype = torch.float32

    def affine(self, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scale and shift of raw samples (8 bits where there is a pixel range) of `dim` dimensions, the batch's included."""
        unit = 255.0 if self.pixel_range else 1.0
        mean, std = self.mean or (0.0,), self.std or (1.0,)
        shape = (-1,) + (1,) * max(0, dim - 2)
        scale = torch.tensor(
            [1 / (unit * s) for s in std], dtype=self.dtype, device=device
        ).reshape(shape)
        shift = torch.tensor(
            [-m / s for m, s in zip(mean, std, strict=True)], dtype=self.dtype, device=device
        )
        return scale, shift.reshape(shape)

    def normalise(self, images: Tensor) -> Tensor:
        """Inputs of (batch, *shape) images with values in `pixel_range`; gradients flow through.

        To the bit what `Samples.inputs` makes of the same image: ``x / 255 * 255`` is x for all of the 256 values.
        """
        scale, shift = self.affine(images.dim(), images.device)
        raw = images.to(self.dtype)
        return (raw * 255.0 if self.pixel_range else raw) * scale + shift


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of one split.

    Args:
        x: (n, *shape), uint8 (images, 0..255) or floating point, on the training device.
        y: (n, ...) `Targets`.
        mean, std: per channel, in the unit of ``x`` after division by 255 (uint8) or of ``x`` itself.
        augment: applied to training batches only.
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
        """Scale and shift, so that the normalised input is ``x * scale + shift``."""
        return self.domain.affine(self.x.dim(), self.x.device)

    @property
    def domain(self) -> InputDomain:
        """How these samples become inputs."""
        pixel_range = (0.0, 1.0) if self.x.dtype == torch.uint8 else None
        return InputDomain(self.mean, self.std, pixel_range, self.augment, self.dtype)

    def inputs(self, index: Tensor | slice) -> Tensor:
        """Normalised inputs at `index`, (batch, *shape) in the run's dtype. Elementwise, so batching does not change bits."""
        scale, shift = self._affine
        # index_select is 15 times faster than x[index]
        x = self.x[index] if isinstance(index, slice) else self.x.index_select(0, index)
        return x.to(self.dtype, copy=True).mul_(scale).add_(shift)

    def labels(self, index: Tensor) -> Tensor:
        """(batch,) int64 labels at `index`; zeros where targets are masks, as all samples are of one class then."""
        return self.y.index_select(0, index) if self.y.dim() == 1 else torch.zeros_like(index)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which sample belongs to which client, as two flat arrays.

    Client ``c`` holds ``indices[offsets[c]:offsets[c + 1]]`` (positions in the training pool).

    Args:
        indices: (n,) int64.
        offsets: (clients + 1,) int64, ascending from 0 to n.
        info: plain facts of how it was drawn (scheme, draws needed, dropped clients ...).
    """

    indices: np.ndarray
    offsets: np.ndarray
    info: dict[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """(clients,) samples a client."""
        return np.diff(self.offsets)

    def size(self, client: int) -> int:
        """Samples of `client`; of all clients together for `POOLED`."""
        return (
            len(self.indices)
            if client == POOLED
            else int(self.offsets[client + 1] - self.offsets[client])
        )

    def of(self, client: int) -> np.ndarray:
        """Indices of `client`; of all clients together, ascending, for `POOLED`."""
        if client == POOLED:
            return np.sort(self.indices)
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def sha256(self) -> str:
        """Hash of the assignment (little-endian int64 of offsets, then indices)."""
        digest = hashlib.sha256()
        digest.update(np.ascontiguousarray(self.offsets, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.indices, dtype="<i8").data)
        return digest.hexdigest()

    @classmethod
    def from_lists(cls, parts: list[np.ndarray], **info: str | int | float | bool) -> Partition:
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        indices = np.concatenate(
            [np.zeros(0, np.int64), *(np.asarray(part, dtype=np.int64) for part in parts)]
        )
        return cls(indices, offsets, dict(info))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Everything a run knows of data. Aggregators never see it; they see `Env`.

    Args:
        train: the training pool, minus what `proxy` took.
        partition: clients' shares of `train` after the validation cut.
        test: the test set, untouched (minus a proxy that the config takes from it).
        val: the clients' held-out shares together, or samples that no client has; or None.
        proxy: server data, or None.
        fingerprint: sha256 of the arrays as loaded, before any split.
        labels: (n,) int64, `train.y`'s labels as a NumPy array, zeros where they are masks; may share memory with them.
        proxy_source: the split that `proxy` was taken from: none, train or test; or noise.
        proxy_dataset, proxy_fingerprint: name and `fingerprint` of the other data set that it was taken from, or None.
        after_split: state of the legacy generator that drew the partition, after it (``RandomState.get_state``), or None.
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

    @property
    def test_data_in_training(self) -> str | None:
        """Test data that the server may train on, in words, or None."""
        if self.proxy is None or self.proxy_source != "test":
            return None
        return f"proxy.source=test: {len(self.proxy):,} samples" + (
            f" of {self.proxy_dataset}" if self.proxy_dataset else ""
        )

    def positions(self, client: int) -> Tensor:
        """(n,) int64: where `client`'s samples lie in the training pool, on its device."""
        return torch.from_numpy(self.partition.of(client)).to(self.train.x.device)

    def class_counts(self) -> np.ndarray:
        """(clients, classes) int64: how many training samples of each class a client holds."""
        owner = np.repeat(np.arange(self.partition.num_clients), self.partition.sizes)
        flat = owner * self.num_classes + self.labels[self.partition.indices]
        counts = np.bincount(flat, minlength=self.partition.num_clients * self.num_classes)
        return counts.reshape(self.partition.num_clients, self.num_classes)
