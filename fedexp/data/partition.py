"""Partition schemes, the rules that every partition obeys, and the file format."""

from __future__ import annotations

import hashlib
import heapq
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition, offsets_of
from fedexp.core.errors import ConfigError, DataError
from fedexp.storage.files import write_bytes

FORMAT = "fedexp-partition-1"


@dataclass(frozen=True, eq=False)
class CutPartition(Partition):
    """A partition whose clients each gave a share of their samples to validation.

    `indices` contains the remaining samples, on which the clients train.

    Args:
        held: Positions of the validation samples in the training pool, (n_val,), int64,
            sorted by client.
        held_offsets: Offsets, (clients + 1,), int64. Client k's validation samples are
            ``held[held_offsets[k] : held_offsets[k + 1]]``.
    """

    held: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    held_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))


@dataclass(frozen=True, kw_only=True)
class Partitioner(ABC):
    """A scheme that assigns the training pool's samples to clients.

    For your own scheme, write a subclass with a `sample` method.

    Args:
        val_fraction: Share of each client's samples that is held out for validation
            after the split.
        min_size: Smallest number of samples that a client must have.
        on_small: Policy for clients with fewer samples. ``error`` stops with an error.
            ``allow`` allows them. ``drop`` drops them with their samples and renumbers
            the other clients. ``repair`` moves samples to them one by one. Each time it
            takes the last sample of the client that has the most samples.
    """

    # Whether the scheme splits by class labels or by natural owners. `sample` receives
    # the label or the owner of every sample as its argument `labels`
    deals: ClassVar[Literal["labels", "owners"]] = "labels"
    # Whether the scheme makes sense if all samples are of one class (images with masks)
    one_class: ClassVar[bool] = False
    # Whether the scheme can split fewer samples among fewer clients. If False, the
    # config keys limit.clients and limit.train are ignored
    scales: ClassVar[bool] = True

    val_fraction: float = 0.0
    min_size: int = 1
    on_small: Literal["error", "allow", "drop", "repair"] = "error"

    def __post_init__(self) -> None:
        require(
            0 <= self.val_fraction < 1, f"val_fraction must be in [0, 1), got {self.val_fraction}"
        )
        require(
            self.min_size >= 1,
            f"min_size must be at least 1, got {self.min_size}; on_small=allow accepts all",
        )

    @property
    def name(self) -> str:
        """Name for messages and records."""
        return type(self).__name__

    def check(self, clients: int, num_classes: int) -> None:
        """Raise an error for settings that cannot work, before data are loaded.

        Raises:
            ConfigError: `clients` or `num_classes` does not fit the scheme.
        """
        if clients < 1:
            raise impossible(
                "a partition needs at least one client",
                "clients",
                "at least 1",
                clients,
                "set clients=10",
            )

    def pool_size(self) -> int | None:
        """Return the size of the only pool that can be split, or None for any."""
        return None

    def check_pool(self, sha256: str) -> None:
        """Refuse a pool of samples for which the partition was not made.

        Args:
            sha256: Hash of the pool (`hash_pool`).

        Raises:
            DataError: The partition was made for another pool.
        """

    @abstractmethod
    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        """Sample a partition, without the policy for small clients.

        `split` calls this method. It then applies the policy, and checks that every
        sample belongs to exactly one client.

        Args:
            labels: Labels of the training pool, (n,), int64. If `deals` is ``owners``:
                the owner of each sample, out of `num_classes` owners.
            num_classes: Number of classes, or of owners.
            clients: Number of clients.
            rng: The only source of randomness: ``RandomState(seed_data)``, from which
                nothing has been drawn yet.
        """

    def split(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        """Return a valid partition: call `sample`, then apply the small-client policy.

        Raises:
            DataError: The scheme fails on these labels, returns too many clients, or
                breaks a rule of `validate`.
        """
        self.check(clients, num_classes)
        labels = labels.view()
        labels.flags.writeable = False  # they share the memory of the training labels
        partition = self.sample(labels, num_classes, clients, rng)
        if not isinstance(partition, Partition) or partition.num_clients > clients:
            raise DataError(
                f"the partition '{self.name}' does not have {clients} clients",
                where=f"{type(self).__name__}.sample",
                expected=f"a Partition of at most {clients} clients, see Partition.from_lists",
                got=f"{partition.num_clients} clients"
                if isinstance(partition, Partition)
                else type(partition).__name__,
            )
        partition = replace(
            partition,
            info={
                "scheme": self.name,
                "pool": len(labels),
                "asked_clients": clients,
                **partition.info,
            },
        )
        validate(partition, len(labels))

        return validate(apply_small_policy(partition, self.min_size, self.on_small), len(labels))


def equal_sizes(samples: int, parts: int) -> np.ndarray:
    """Return the sizes, (parts,), of nearly equal parts, the larger ones first."""
    return samples // parts + (np.arange(parts) < samples % parts)


def from_owners(owner: np.ndarray, clients: int, order: np.ndarray | None = None) -> Partition:
    """Build the partition that assigns sample i to client ``owner[i]``.

    Args:
        owner: Client of each sample, (n,).
        clients: Number of clients.
        order: Sample numbers in the order in which samples are appended to their
            clients' lists, (n,). None means ascending order.
    """
    offsets = offsets_of(np.bincount(owner, minlength=clients))
    if order is None:
        order = np.arange(len(owner))
    return Partition(
        order[np.argsort(owner[order], kind="stable")].astype(np.int64, copy=False), offsets
    )


def validate(partition: Partition, n: int) -> Partition:
    """Return `partition` if it assigns every sample of a pool of `n` exactly once.

    Samples of dropped clients (``on_small=drop``) and the validation share of a
    `CutPartition` count as assigned. ``info["dropped_samples"]`` is the number of
    dropped samples. A scheme may assign samples more than once if it counts the
    repetitions in ``info["repeated_samples"]``.

    Raises:
        DataError: A sample is missing or not in the pool, or is repeated without being
            counted.
    """

    def check(holds: bool, what: str, got: str) -> None:
        if not holds:
            raise DataError(
                f"the result is not a partition: {what}",
                where=str(partition.info.get("scheme", "partition")),
                expected=f"each of {n} samples assigned to exactly one client",
                got=got,
                do="correct the scheme's sample(), or give a partition of this pool",
            )

    offsets, indices = partition.offsets, partition.indices
    held = partition.held if isinstance(partition, CutPartition) else np.zeros(0, np.int64)
    check(
        len(offsets) >= 2
        and offsets[0] == 0
        and offsets[-1] == len(indices)
        and not (np.diff(offsets) < 0).any(),
        "offsets do not ascend from 0 to the number of indices",
        f"{len(offsets)} offsets",
    )

    seen = np.zeros(n, dtype=bool)
    for part in (indices, held):
        if len(part):
            low, high = int(part.min()), int(part.max())
            check(low >= 0 and high < n, "an index is outside the pool", f"{low} .. {high}")
        seen[part] = True

    distinct, listed = int(seen.sum()), len(indices) + len(held)
    check(
        distinct == listed - int(partition.info.get("repeated_samples", 0)),
        f"{listed - distinct} samples are assigned twice",
        f"{listed} indices, {distinct} distinct",
    )

    missing = n - distinct - int(partition.info.get("dropped_samples", 0))
    check(missing == 0, "samples are missing", f"{distinct} samples, {missing} too few")
    return partition


def apply_small_policy(partition: Partition, min_size: int, on_small: str) -> Partition:
    """Apply the policy for clients with fewer than `min_size` samples.

    The argument `on_small` of `Partitioner` describes the policies.

    Raises:
        DataError: Policy `error` met a small client, or the pool is too small for the
            policy.
    """
    sizes = partition.sizes
    small = np.flatnonzero(sizes < min_size)
    if not len(small) or on_small == "allow":
        return partition

    if on_small == "error":
        raise DataError(
            f"{len(small)} of {len(sizes)} clients have fewer than min_size={min_size} samples",
            where=_where(partition),
            expected=f"at least {min_size} each",
            got=", ".join(f"client {c} has {sizes[c]}" for c in small[:5])
            + (" ..." if len(small) > 5 else ""),
            do="choose partition.on_small=repair|drop|allow, lower partition.min_size, "
            "or use fewer clients",
        )

    repeats = bool(partition.info.get("repeated_samples"))
    if repeats or isinstance(partition, CutPartition):
        has = "gives samples to several clients" if repeats else "contains a validation share"
        raise DataError(
            f"a partition that already {has} cannot be changed",
            where="partition.on_small",
            expected="error or allow",
            got=on_small,
            do="set partition.on_small=allow, or lower partition.min_size",
        )

    return _drop(partition, min_size) if on_small == "drop" else _repair(partition, small, min_size)


def _where(partition: Partition) -> str:
    return f"partition {partition.info.get('scheme', '')}".strip()


def _drop(partition: Partition, min_size: int) -> Partition:
    sizes = partition.sizes
    keep = sizes >= min_size
    if not keep.any():
        raise DataError(
            "every client is too small: dropping them leaves none",
            where=_where(partition),
            got=f"largest client: {int(sizes.max())} samples",
            do="lower partition.min_size or use fewer clients",
        )

    info = partition.info | {
        "dropped_clients": int((~keep).sum()) + int(partition.info.get("dropped_clients", 0)),
        "dropped_samples": int(sizes[~keep].sum()) + int(partition.info.get("dropped_samples", 0)),
    }
    return Partition(partition.indices[np.repeat(keep, sizes)], offsets_of(sizes[keep]), info)


def _repair(partition: Partition, small: np.ndarray, min_size: int) -> Partition:
    sizes = partition.sizes.copy()
    if int(sizes.sum()) < min_size * len(sizes):
        raise DataError(
            f"{int(sizes.sum())} samples are too few for {len(sizes)} clients "
            f"with min_size={min_size}",
            where=_where(partition),
            expected=f"at least {min_size * len(sizes)} samples",
            do="lower partition.min_size or use fewer clients",
        )

    owner = np.repeat(np.arange(len(sizes)), sizes)
    donors = [(-int(size), int(client)) for client, size in enumerate(sizes) if size > min_size]
    heapq.heapify(donors)

    moved = 0
    for client in small:
        for _ in range(min_size - int(sizes[client])):
            negative, donor = heapq.heappop(donors)
            left = -negative - 1
            # The last sample that the donor still has
            owner[partition.offsets[donor] + left] = client
            if left > min_size:
                heapq.heappush(donors, (-left, donor))
            moved += 1

    repaired = from_owners(owner, len(sizes))  # positions in `indices`
    return Partition(
        partition.indices[repaired.indices],
        repaired.offsets,
        partition.info | {"repaired_clients": len(small), "moved_samples": moved},
    )


def hash_pool(fingerprint: str, train_at: np.ndarray) -> str:
    """Return the sha256 of a training pool.

    Args:
        fingerprint: Fingerprint of the data set's arrays.
        train_at: Positions of the pool's samples in the training split, ascending.
    """
    digest = hashlib.sha256(f"{fingerprint}\n".encode())
    digest.update(np.ascontiguousarray(train_at, dtype="<i8").data)
    return digest.hexdigest()


def save_partition(partition: Partition, path: Path, pool_sha256: str | None = None) -> None:
    """Write `partition` to a safetensors file, completely or not at all.

    Args:
        partition: The partition.
        path: Path of the file.
        pool_sha256: Hash of the training pool (`hash_pool`), or None if it is not
            known. `partition=file` compares it with the pool of the new run.
    """
    from safetensors.numpy import save

    arrays = {"indices": partition.indices, "offsets": partition.offsets}
    if isinstance(partition, CutPartition):
        arrays |= {"held": partition.held, "held_offsets": partition.held_offsets}
    about = {"format": FORMAT, "sha256": partition.sha256, "info": partition.info}
    # The hash is not in `info`, because files of earlier versions do not have it. A
    # resumed run compares `info` with that of its file
    if pool_sha256 is not None:
        about["pool_sha256"] = pool_sha256
    write_bytes(
        path,
        save(
            {k: np.ascontiguousarray(v, dtype=np.int64) for k, v in arrays.items()},
            # safetensors writes several keys in random order. A single key makes the
            # file's bytes reproducible
            {"fedexp": json.dumps(about, sort_keys=True)},
        ),
    )


def contains_partition(path: Path, partition: Partition, pool_sha256: str | None = None) -> bool:
    """Return whether the file `path` is undamaged and contains `partition`.

    The hash of the pool is compared if both the file and the caller have one. The
    number of draws is not compared. If a time limit ended the draws, it differs between
    machines.
    """
    try:
        stored = load_partition(path)
    except DataError:
        return False
    known = read_pool_sha256(path)
    same_pool = known is None or pool_sha256 is None or known == pool_sha256
    stored_info, info = (
        {key: value for key, value in one.info.items() if key != "draws"}
        for one in (stored, partition)
    )
    return same_pool and stored.sha256 == partition.sha256 and stored_info == info


def read_pool_sha256(path: Path) -> str | None:
    """Return the hash of the pool that a partition file was made for.

    Returns:
        The hash, or None if the file does not contain it.
    """
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        found = json.loads((file.metadata() or {}).get("fedexp", "{}")).get("pool_sha256")
    return None if found is None else str(found)


def load_partition(path: Path) -> Partition:
    """Read a file that `save_partition` wrote.

    Raises:
        DataError: The file is absent, is not a partition file, or its content does not
            match the recorded sha256.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("fedexp", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise DataError(
            "the partition file does not exist",
            where="partition.path",
            expected="partition.safetensors of an earlier run",
            got=str(path),
            do="give the file's path; relative paths start at the working directory",
        ) from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise _not_a_partition(path, str(error)) from error

    if not isinstance(metadata, dict):
        raise _not_a_partition(path, f"metadata of type {type(metadata).__name__}")
    # A damaged name of an entry would otherwise read as an absent entry
    unknown = sorted(set(metadata) - {"format", "sha256", "info", "pool_sha256"})
    if metadata.get("format") == FORMAT and unknown:
        raise _not_a_partition(path, f"unknown entry {unknown[0]}: the file is damaged")
    if metadata.get("format") != FORMAT or not {"indices", "offsets"} <= set(arrays):
        raise _not_a_partition(path, f"format {metadata.get('format')}, arrays {', '.join(arrays)}")

    info = metadata.get("info")
    if not isinstance(info, dict):
        raise _not_a_partition(path, "no facts about the split: the file is damaged")
    partition = Partition(arrays["indices"], arrays["offsets"], info)
    if "held" in arrays:
        partition = CutPartition(
            partition.indices,
            partition.offsets,
            info,
            held=arrays["held"],
            held_offsets=arrays["held_offsets"],
        )

    if partition.sha256 != metadata.get("sha256"):
        raise _not_a_partition(
            path, "a sha256 that differs from the recorded one: the file is damaged"
        )
    return partition


def _not_a_partition(path: Path, got: str) -> DataError:
    return DataError(
        "the file is not a partition file",
        where=str(path),
        expected=f"safetensors in the format {FORMAT}",
        got=got,
        do="give partition.safetensors of a run folder",
    )


def impossible(what: str, where: str, expected: object, got: object, do: str) -> ConfigError:
    """Return the error for settings that a scheme's `check` refuses.

    `where` is a key of the config group `partition`, or ``clients``.
    """
    return ConfigError(
        what,
        where=f"partition.{where}" if where != "clients" else where,
        expected=expected,
        got=got,
        do=do,
    )
