"""Build the data of a run from a data set and a partition scheme.

The steps are:

1. Limit the numbers of training and test samples.
2. Take the proxy samples (the server's data).
3. Hold out training samples for validation, if configured.
4. Partition the remaining training samples among the clients.
5. Cut validation samples from each client's samples, as an alternative to step 3.
6. Change the clients' inputs, if they are to differ (feature skew).
7. Copy the data to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import FederatedData, Partition, Samples, offsets_of
from fedexp.core.device import to_device
from fedexp.core.errors import ConfigError, DataError
from fedexp.core.seeds import numpy_generator, torch_generator
from fedexp.data.dataset import Arrays, Dataset, labels_of
from fedexp.data.feature_skew import NO_SKEW, FeatureSkew
from fedexp.data.partition import CutPartition, Partitioner, hash_pool, validate

UNLABELLED = -1


@dataclass(frozen=True)
class Proxy:
    """The server's data, taken before the partition.

    Samples that the server takes are not in the clients' data or the test set.

    Args:
        source: Split of the data set from which the samples are taken, class-balanced
            as far as the split allows. ``none`` means no server data. ``noise``
            generates 8-bit images whose values are uniform and independent.
        size: Number of samples (int), or fraction of the split (float, at most 1).
        labelled: Whether the server knows the labels. If not, they are -1.
        dataset: Another data set that provides the split. Its samples are normalised
            with the statistics of the clients' data set.
        resize: Whether the images of `dataset` are resized to the clients' height and
            width, bilinearly, and rounded to 8 bits.
    """

    source: Literal["none", "train", "test", "noise"] = "none"
    size: int | float = 0
    labelled: bool = False
    dataset: Dataset | None = None
    resize: bool = False

    @property
    def takes_client_data(self) -> bool:
        """Whether the samples come from those that would otherwise go to clients."""
        return self.source == "train" and self.dataset is None

    def __post_init__(self) -> None:
        if self.source == "none":
            require(
                self.size == 0,
                f"proxy.size={self.size} has no effect: set proxy.source=train, test or noise",
            )

            require(
                self.dataset is None, "proxy.dataset has no effect: set proxy.source=train or test"
            )
        elif self.source == "noise":
            require(
                not self.labelled,
                "noise has no labels: set proxy.source=train, or proxy.labelled=false",
            )
            require(
                self.dataset is None,
                "noise does not come from a data set: "
                "set proxy.dataset=null, or proxy.source=train",
            )
            require(
                isinstance(self.size, int) and self.size >= 1,
                f"proxy.size must be a count with proxy.source=noise, e.g. 10000, got {self.size}",
            )
        elif isinstance(self.size, float):
            require(
                0 < self.size <= 1,
                f"proxy.size={self.size} is not a fraction: give one in (0, 1], or a whole number",
            )
        else:
            require(
                self.size >= 1,
                f"proxy.size must be at least 1 with proxy.source={self.source}, got {self.size}",
            )
        require(
            not self.resize or self.dataset is not None,
            "proxy.resize has no effect without proxy.dataset: set proxy.resize=false",
        )

    def check(self, main: Dataset) -> None:
        """Check that the proxy fits the clients' data set.

        Raises:
            ConfigError: The clients' networks cannot process the proxy's samples. Or
                the proxy and the clients have the same data set, possibly re-encoded
                (`Dataset.copy_of`), or with other numbers or sizes of samples.
        """
        if self.source == "noise" and not main.pixels:
            raise ConfigError(
                "noise consists of 8-bit images, but the clients' samples are not 8-bit images",
                where="proxy.source",
                expected="train or test",
                got="noise",
                do="set proxy.source=train",
            )

        other = self.dataset
        if other is None:
            return

        originals = {main.copy_of or main.name, other.copy_of or other.name}
        copied = len(originals) == 1 and (main.copy_of or other.copy_of)
        if copied or main.may_share(other):
            raise ConfigError(
                "the proxy would share its samples with the clients or the test set",
                where="proxy.dataset",
                expected="another data set",
                got=other.name,
                do="set proxy.dataset=null: the proxy's samples are then removed from their split",
            )

        resized = (
            self.resize
            and other.pixels
            and main.pixels
            and len(main.shape) == 3
            and other.shape[:-2] == main.shape[:-2]
        )
        if other.shape != main.shape and not resized:
            raise ConfigError(
                f"the proxy's samples do not fit networks for data set '{main.name}'",
                where="proxy.dataset",
                expected=f"samples of shape {list(main.shape)} (channels, height, width of images)",
                got=f"{list(other.shape)} of '{other.name}'",
                do="choose another data set, or set proxy.resize=true if only height and width of "
                "images differ",
            )
        if self.labelled and other.num_classes != main.num_classes:
            raise ConfigError(
                f"the proxy's labels do not fit networks for data set '{main.name}'",
                where="proxy.labelled",
                expected=f"{main.num_classes} classes, as in '{main.name}'",
                got=f"{other.num_classes} classes of '{other.name}'",
                do="choose another proxy.dataset, or set proxy.labelled=false if the method needs "
                "no labels",
            )


@dataclass(frozen=True, kw_only=True)
class Division:
    """The rules that assign a data set's samples to clients, server and evaluation.

    The order is: limits, proxy, held-out samples, partition, validation cut. The
    partition draws from a new ``RandomState(seed_data)``.

    Args:
        partitioner: The partition scheme.
        clients: Number of clients.
        seed_data: Seed of the partition, the proxy, the held-out samples and the
            validation cut.
        val_fraction: Share of each client's samples that is cut for validation. The
            number of samples is rounded, and every client keeps at least one sample.
        held_out: Number of training samples that are held out for validation before the
            partition, class-balanced as far as possible. It is an alternative to
            `val_fraction`.
        proxy: The server's data.
        limit_train: Largest number of training samples, or None for all. The first
            samples of each class are used, class-balanced as far as possible.
        limit_test: Largest number of test samples, chosen in the same way.
        limit_proxy: Largest number of samples for the server, or None for no limit.
    """

    partitioner: Partitioner
    clients: int
    seed_data: int
    val_fraction: float
    held_out: int
    proxy: Proxy
    limit_train: int | None
    limit_test: int | None
    limit_proxy: int | None

    def parts(self, dataset: Dataset, arrays: Arrays, source: Arrays) -> Parts:
        """Divide `arrays`, using only labels and owners.

        Args:
            dataset: The clients' data set.
            arrays: The arrays of `dataset`.
            source: The arrays from which the proxy samples are taken.

        Raises:
            DataError: The arrays cannot be divided.
        """
        proxy, seed_data, number = self.proxy, self.seed_data, dataset.num_classes
        proxy_y = source.test_y if proxy.source == "test" else source.train_y
        labels, test_labels, proxy_labels = map(labels_of, (arrays.train_y, arrays.test_y, proxy_y))

        train_at = _limited(labels, self.limit_train, number)
        test_at = _limited(test_labels, self.limit_test, number)

        proxy_at = held_at = np.zeros(0, np.int64)
        if proxy.dataset is not None:
            proxy_at, _ = self._take_proxy(
                proxy_labels, np.arange(len(proxy_y)), proxy.dataset.num_classes
            )
        elif proxy.source == "train":
            proxy_at, train_at = self._take_proxy(labels, train_at, number)
        elif proxy.source == "test":
            proxy_at, test_at = self._take_proxy(test_labels, test_at, number)

        if self.held_out:
            held_at, train_at = _hold_out(self.held_out, labels, train_at, number, seed_data)
        if len(train_at) < len(labels):
            labels = labels[train_at]

        kinds = labels
        if self.partitioner.deals == "owners":
            check_scheme(dataset, self.partitioner)
            assert arrays.train_owner is not None  # `verify` has checked it
            kinds, number = arrays.train_owner.numpy()[train_at], int(arrays.train_owner.max()) + 1

        generator = np.random.RandomState(seed_data)
        partition = self.partitioner.split(kinds, number, self.clients, generator)
        pool_sha256 = hash_pool(arrays.fingerprint, train_at)
        self.partitioner.check_pool(pool_sha256)
        if self.val_fraction and not isinstance(partition, CutPartition):
            partition = cut_validation(partition, self.val_fraction, seed_data)
            validate(partition, len(labels))

        return Parts(
            train_at,
            test_at,
            proxy_at,
            held_at,
            labels,
            partition,
            generator.get_state(legacy=False),
            pool_sha256,
        )

    def proxy_count(self, n: int) -> int:
        """Return how many of a split's `n` samples the server takes.

        With ``proxy.source=noise``, the samples do not come from a split. `Proxy` then
        accepts only an integer `size`, so the result does not depend on `n`.
        """
        size = self.proxy.size
        count = max(1, round(size * n)) if isinstance(size, float) else size
        return count if self.limit_proxy is None else min(count, self.limit_proxy)

    def _take_proxy(
        self, labels: np.ndarray, at: np.ndarray, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Divide `at` into the proxy's positions and the rest, both ascending."""
        proxy, count = self.proxy, self.proxy_count(len(at))
        most = len(at) - 1 if proxy.dataset is None else len(at)

        if count > most:
            raise ConfigError(
                f"the proxy would take {'all' if proxy.dataset is None else 'more than all'} "
                f"of the {proxy.source} split",
                where="proxy.size",
                expected=f"at most {most}",
                got=proxy.size,
                do="lower proxy.size, e.g. proxy.size=0.02",
            )

        return _apart(
            balanced(labels[at], count, num_classes, numpy_generator(self.seed_data, "proxy")), at
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """The result of a `Division`, as ascending positions in the data set's arrays.

    Args:
        train_at: Positions in the training split of the samples that are trained on.
        test_at: Positions in the test split of the samples that are tested on.
        proxy_at: Positions of the server's samples in the proxy's split.
        held_at: Positions in the training split of the held-out samples.
        labels: Labels of the samples at `train_at`.
        partition: Partition of the samples at `train_at`.
        after_split: State of the random generator after the partition was sampled.
        pool_sha256: Hash of the samples at `train_at` (`hash_pool`).
    """

    train_at: np.ndarray
    test_at: np.ndarray
    proxy_at: np.ndarray
    held_at: np.ndarray
    labels: np.ndarray
    partition: Partition
    after_split: Mapping[str, Any]
    pool_sha256: str


def federate(
    dataset: Dataset,
    division: Division,
    *,
    root: Path,
    download: bool,
    device: torch.device,
    dtype: torch.dtype,
    feature_skew: FeatureSkew = NO_SKEW,
) -> FederatedData:
    """Load, check and split the data, and copy the result to `device` once.

    Args:
        dataset: The clients' data set.
        division: The rules of the split.
        root: Data root.
        download: Whether missing files may be fetched.
        device: Device of all samples.
        dtype: Dtype of normalised inputs.
        feature_skew: The change of the clients' inputs.

    Raises:
        DataError: Data are absent or damaged, or cannot be split as configured.
    """
    proxy = division.proxy
    arrays = dataset.load(root, download)
    other = (
        None
        if proxy.dataset is None
        else proxy.dataset.load(root, download or proxy.dataset.download)
    )

    source = other or arrays
    proxy_x, proxy_y = (
        (source.test_x, source.test_y)
        if proxy.source == "test"
        else (source.train_x, source.train_y)
    )
    if (proxy_x.dtype == torch.uint8) != (arrays.train_x.dtype == torch.uint8):
        raise DataError(
            "the proxy's samples and the clients' samples cannot be normalised in the same way",
            where="proxy.dataset",
            expected=f"{arrays.train_x.dtype}, as in '{dataset.name}'",
            got=proxy_x.dtype,
            do="choose another data set: both need 8-bit images, "
            "or both need floating-point samples",
        )

    parts = division.parts(dataset, arrays, source)
    partition = parts.partition

    def samples(x: Tensor, y: Tensor, at: np.ndarray, training: bool = False) -> Samples:
        if len(at) < len(y):
            x, y = x[torch.from_numpy(at)], y[torch.from_numpy(at)]
        if training:
            x = feature_skew.applied(x, partition, division.seed_data)
        return Samples(
            to_device(x, device),
            to_device(y, device),
            dataset.mean,
            dataset.std,
            dataset.augment if training else None,
            dtype,
        )

    train = samples(arrays.train_x, arrays.train_y, parts.train_at, training=True)
    val = samples(arrays.train_x, arrays.train_y, parts.held_at) if division.held_out else None
    if isinstance(partition, CutPartition):
        # A partition that was read from a file may contain a validation share
        check_validation(division.held_out, in_split=True)
        held = torch.from_numpy(partition.held).to(device)
        val = Samples(train.x[held], train.y[held], dataset.mean, dataset.std, None, dtype)

    server = None
    if proxy.source != "none":
        at = torch.from_numpy(parts.proxy_at)
        x = (
            torch.randint(
                256,
                (division.proxy_count(0), *dataset.shape),
                generator=torch_generator(division.seed_data, "proxy noise"),
                dtype=torch.uint8,
            )
            if proxy.source == "noise"
            else proxy_x[at]
        )
        if proxy.resize:  # on the host, so that every device gets the same images
            x = _resized(x, dataset.shape[-2:])
        y = proxy_y[at] if proxy.labelled else torch.full((len(x),), UNLABELLED)
        server = samples(x, y, np.arange(len(x)))

    return FederatedData(
        train=train,
        partition=partition,
        test=samples(arrays.test_x, arrays.test_y, parts.test_at),
        num_classes=dataset.num_classes,
        fingerprint=arrays.fingerprint,
        labels=parts.labels,
        val=val,
        proxy=server,
        proxy_source=proxy.source,
        proxy_dataset=None if proxy.dataset is None else proxy.dataset.name,
        proxy_fingerprint=None if other is None else other.fingerprint,
        after_split=parts.after_split,
        pool_sha256=parts.pool_sha256,
    )


def check_scheme(dataset: Dataset, partitioner: Partitioner) -> None:
    """Check that the data set has the owners or classes that the scheme needs."""
    if partitioner.deals == "owners" and not dataset.has_owners:
        raise ConfigError(
            f"data set '{dataset.name}' does not name the owners of its samples",
            where="partition",
            expected="a data set with natural owners (femnist: writers, domainnet: domains)",
            got=f"partition={partitioner.name}",
            do="set partition=dirichlet, or write a Dataset with has_owners = True",
        )

    if partitioner.deals == "labels" and dataset.targets == "masks" and not partitioner.one_class:
        raise ConfigError(
            f"data set '{dataset.name}' has masks, but no classes by which its images can be split",
            where="partition",
            expected="a scheme for samples of one class: dirichlet (samples the clients' sizes), "
            "iid, file",
            got=f"partition={partitioner.name}",
            do="set partition=dirichlet or partition=iid",
        )


def balanced(
    labels: np.ndarray, size: int, num_classes: int, rng: np.random.Generator | None = None
) -> np.ndarray:
    """Choose `size` samples with class counts as equal as `labels` allows.

    Without `rng`, the first samples of each class are chosen, and a remainder that
    cannot be divided equally goes to the classes with the lowest labels. With `rng`,
    the samples are random, and the remainder goes to random classes.

    Returns:
        Ascending positions of the chosen samples.
    """
    members = [np.flatnonzero(labels == k) for k in range(num_classes)]
    supply = np.array([len(part) for part in members])

    quota = np.zeros(num_classes, dtype=np.int64)

    # In each pass but the last, all samples of at least one class are chosen
    while (rest := size - int(quota.sum())) > 0:
        open_classes = np.flatnonzero(quota < supply)
        share = rest // len(open_classes)
        if share == 0:
            extra = open_classes if rng is None else rng.permutation(open_classes)
            quota[extra[:rest]] += 1
        else:
            quota[open_classes] += np.minimum(share, supply[open_classes] - quota[open_classes])

    chosen = [
        (part if rng is None else rng.permutation(part))[:count]
        for part, count in zip(members, quota, strict=True)
    ]
    return np.sort(np.concatenate(chosen))


def cut_validation(partition: Partition, fraction: float, seed_data: int) -> CutPartition:
    """Hold out round(fraction * size) random samples of each client.

    Each client keeps at least one sample. The kept samples keep their order. Each
    sample of the training pool gets a random key. From each client's samples, those
    with the smallest keys are held out. The choice therefore does not depend on the
    client's index or on other clients.

    Raises:
        DataError: The fraction amounts to less than half a sample for every client, so
            that nothing would be held out. Or the partition contains repeated samples.
    """
    if repeated := partition.info.get("repeated_samples"):
        raise DataError(
            "validation samples of one client would be training samples of another",
            where="partition.val_fraction",
            expected="0, because this split assigns samples more than once",
            got=f"{fraction}, and {repeated} repeated samples",
            do="set partition.val_fraction=0 and eval.held_out=1000",
        )

    sizes = partition.sizes
    counts = np.clip(np.floor(fraction * sizes + 0.5).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    if not counts.any():
        raise DataError(
            "the validation share is empty",
            where="partition.val_fraction",
            expected=f"at least {1 / max(1, int(sizes.max())):.3g} "
            f"(the largest client has {int(sizes.max())} samples)",
            got=fraction,
            do="raise partition.val_fraction or use fewer clients",
        )

    pool_keys = numpy_generator(seed_data, "val").random(int(partition.indices.max()) + 1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    # Sorted by client, and within a client by key
    ranked = np.lexsort((pool_keys[partition.indices], owner))

    rank = np.empty(len(owner), dtype=np.int64)
    rank[ranked] = np.arange(len(owner)) - np.repeat(partition.offsets[:-1], sizes)

    is_held = rank < np.repeat(counts, sizes)

    return CutPartition(
        indices=partition.indices[~is_held],
        offsets=offsets_of(sizes - counts),
        info=partition.info | {"val_fraction": fraction, "val_samples": int(counts.sum())},
        held=partition.indices[is_held],
        held_offsets=offsets_of(counts),
    )


def _limited(labels: np.ndarray, limit: int | None, num_classes: int) -> np.ndarray:
    if limit is None or limit >= len(labels):
        return np.arange(len(labels))
    return balanced(labels, limit, num_classes)


def _hold_out(
    count: int, labels: np.ndarray, at: np.ndarray, num_classes: int, seed_data: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose `count` samples that no client trains on.

    Returns:
        The positions of the chosen samples and of the other samples, both ascending.
    """
    if count >= len(at):
        raise ConfigError(
            "all training samples would be held out",
            where="eval.held_out",
            expected=f"at most {len(at) - 1}",
            got=count,
            do="lower eval.held_out",
        )
    return _apart(
        balanced(labels[at], count, num_classes, numpy_generator(seed_data, "held out")), at
    )


def _resized(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize 8-bit images of shape (n, c, height, width) to `size` (height, width).

    The images are resized 1000 at a time to limit memory. Resizing needs floating-point
    copies, which are four times as large as the images.
    """
    parts = [
        F.interpolate(part.float(), size, mode="bilinear", antialias=True)
        for part in torch.split(images, 1000)
    ]
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def _apart(taken: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return at[taken], np.delete(at, taken)


def check_validation(held_out: int, in_split: bool) -> None:
    """Check that validation samples are taken in only one of the two ways.

    They are either held out before the split, or cut from the clients' own samples.

    Raises:
        ConfigError: `held_out` is not 0 and `in_split` is True.
    """
    if held_out and in_split:
        raise ConfigError(
            "samples are held out before the split, and also from the clients' own samples",
            where="eval.held_out",
            expected="one of eval.held_out and partition.val_fraction",
            got=f"eval.held_out={held_out}",
            do="set partition.val_fraction=0, or eval.held_out=0",
        )
