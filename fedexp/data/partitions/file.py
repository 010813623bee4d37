"""A partition that is read from a file of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.core.paths import user_path
from fedexp.data.partition import (
    CutPartition,
    Partitioner,
    impossible,
    load_partition,
    read_pool_sha256,
)

_DO = "set dataset.*, proxy.*, eval.held_out, limit.train and seed_data as in the run that wrote it"


@dataclass(frozen=True, kw_only=True)
class File(Partitioner):
    """The partition in ``partition.safetensors`` of an earlier run.

    The clients' training pool must be that of the earlier run. The data set, the server
    data (``proxy``), ``eval.held_out`` and ``limit.train`` must therefore be equal. If
    samples are held out or taken by the server, ``seed_data`` must be equal as well. A
    file of fedexp contains a hash of the pool, and another pool is refused.

    ``limit.train`` applies only if the run that wrote the file had the same limit.
    Otherwise it is ignored.

    If the earlier run cut a validation share from the clients' samples, the file
    contains this share and it is used again.

    Args:
        path: Path of the file. Relative paths start at the working directory.
        sha256: Expected hash of the assignment (as in result.json), or None.
    """

    name: ClassVar[str] = "file"
    one_class: ClassVar[bool] = True
    scales: ClassVar[bool] = False
    content_keys: ClassVar[Mapping[str, Callable[[Path], str]]] = {
        "path": lambda file: load_partition(file).sha256
    }

    path: str = ""
    sha256: str | None = None

    def check(self, clients: int, num_classes: int) -> None:
        super().check(clients, num_classes)
        if not user_path(self.path, "partition.path").is_file():
            raise impossible(
                "the partition file does not exist" if self.path else "no partition file is given",
                "path",
                "partition.safetensors of an earlier run",
                self.path or "nothing",
                "set partition.path=FILE; relative paths start at the working directory",
            )

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        partition = load_partition(user_path(self.path, "partition.path"))
        info = partition.info
        self._require(
            self.sha256 in (None, partition.sha256),
            "contains another partition",
            f"sha256 {self.sha256}",
            f"sha256 {partition.sha256}",
        )

        pool = info.get("pool", len(labels))
        self._require(
            pool == len(labels),
            "was sampled for another pool of training samples",
            f"{len(labels)} samples",
            f"{pool} samples",
            _DO,
        )

        asked = int(info.get("asked_clients", partition.num_clients))
        self._require(
            clients in (asked, partition.num_clients),
            "is for another number of clients",
            f"{clients} clients",
            f"{asked} clients",
            f"set clients={asked}",
        )

        cut = float(info.get("val_fraction", 0.0))
        self._require(
            not isinstance(partition, CutPartition) or self.val_fraction in (0.0, cut),
            "already contains a validation share of another size",
            f"partition.val_fraction={self.val_fraction}",
            f"val_fraction={cut}",
            f"set partition.val_fraction={cut}",
        )

        return partition

    def pool_size(self) -> int | None:
        """Return the size of the pool that was split, or None if it is unknown."""
        try:
            return int(load_partition(user_path(self.path, "partition.path")).info["pool"])
        except (DataError, KeyError, TypeError, ValueError):
            return None  # `sample` reports what is wrong with the file

    def check_pool(self, sha256: str) -> None:
        """Refuse a file that was made for another pool of the same size.

        Args:
            sha256: Hash of the pool of the run (`hash_pool`).

        Raises:
            DataError: The file has the hash of another pool.
        """
        known = read_pool_sha256(user_path(self.path, "partition.path"))
        self._require(
            known in (None, sha256),
            "was sampled for other training samples",
            f"the pool with sha256 {sha256}",
            f"the pool with sha256 {known}",
            _DO,
        )

    def _require(
        self, fits: bool, what: str, expected: str, got: str, do: str = "give another file"
    ) -> None:
        if not fits:
            raise DataError(
                f"the partition file {what}", where=self.path, expected=expected, got=got, do=do
            )
