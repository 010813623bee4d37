"""A split that sorts the pool by label, cuts it into shards and deals the shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner, equal_sizes, from_owners


@dataclass(frozen=True, kw_only=True)
class Shards(Partitioner):
    """The shards of McMahan et al. 2017, and "Shards(S)" of FedCDA.

    For N clients, the pool is sorted by label and cut into N * S nearly equal shards.
    The shards are shuffled, and each client gets S of them. A shard may contain samples
    of several classes, so a client with S shards may have more than S classes.

    Args:
        shards: Number S of shards per client.
    """

    name: ClassVar[str] = "shards"

    shards: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.shards >= 1, f"shards must be at least 1, got {self.shards}")

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        n, total = len(labels), clients * self.shards
        if total > n:
            raise DataError(
                f"{n} samples cannot be cut into {total} shards",
                where="partition.shards",
                expected=f"at most {max(1, n // clients)}"
                if clients <= n
                else f"at most {n} clients",
                got=f"{self.shards} shards for each of {clients} clients",
                do="lower partition.shards or clients",
            )

        by_label = np.argsort(labels, kind="stable")
        shard_owner = np.empty(total, dtype=np.int64)
        shard_owner[rng.permutation(total)] = np.repeat(np.arange(clients), self.shards)

        owner = np.empty(n, dtype=np.int64)
        owner[by_label] = np.repeat(shard_owner, equal_sizes(n, total))
        return from_owners(owner, clients, by_label)
