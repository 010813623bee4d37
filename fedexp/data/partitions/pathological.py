"""A split with exactly n classes per client, as in NIID-Bench."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner, impossible
from fedexp.data.partitions.bounded import BoundedPartitioner
from fedexp.data.partitions.by_class import deal_equally


@dataclass(frozen=True, kw_only=True)
class ClassesPerClient(Partitioner):
    """A scheme in which every client has the same number of classes.

    Args:
        classes_per_client: Number n of classes per client.
    """

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.classes_per_client >= 1,
            f"classes_per_client must be at least 1, got {self.classes_per_client}",
        )

    def check(self, clients: int, num_classes: int) -> None:
        super().check(clients, num_classes)
        if self.classes_per_client > num_classes:
            raise impossible(
                "a client cannot hold more classes than the data set has",
                "classes_per_client",
                f"1 to {num_classes}",
                self.classes_per_client,
                f"set partition.classes_per_client={num_classes} or less",
            )


@dataclass(frozen=True, kw_only=True)
class Pathological(ClassesPerClient, BoundedPartitioner):
    """The "#Class = n" split of NIID-Bench and MA-Echo's Fig. 9.

    Client i holds class i mod C and n - 1 further random classes, where C is the number
    of classes. Each class is shuffled and split equally among the clients that hold it.
    With fewer clients than classes, a class may go to no client. The scheme then
    samples again, so no sample is lost.

    Args:
        classes_per_client: Number n of classes per client.
    """

    name: ClassVar[str] = "pathological"

    # Few clients cannot hold all classes
    scales: ClassVar[bool] = False

    def check(self, clients: int, num_classes: int) -> None:
        super().check(clients, num_classes)
        if self.classes_per_client * clients < num_classes:
            raise impossible(
                f"{clients} clients with {self.classes_per_client} classes each "
                f"cannot hold {num_classes} classes",
                "classes_per_client",
                f"at least {-(-num_classes // clients)}",
                self.classes_per_client,
                "raise partition.classes_per_client or clients",
            )

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        occurring = np.bincount(labels, minlength=num_classes) > 0

        attempt, orphans = 0, np.zeros(0, np.int64)
        for attempt in self.attempts():
            holders = self._holders(num_classes, clients, rng)
            orphans = np.flatnonzero(occurring & ~holders.any(axis=0))
            if not len(orphans):
                partition = deal_equally(labels, holders, rng)
                partition.info["draws"] = attempt
                return partition

        raise DataError(
            f"every split left a class without a client (attempts: {attempt})",
            where=f"partition pathological: {clients} clients, "
            f"{self.classes_per_client} classes each",
            expected=f"a client for each of {num_classes} classes",
            got=f"class {', '.join(map(str, orphans[:8]))} without one in the last attempt",
            do=f"use at least {num_classes} clients, raise partition.classes_per_client, "
            "or set partition=label_groups",
        )

    def _holders(self, num_classes: int, clients: int, rng: np.random.RandomState) -> np.ndarray:
        """Sample which clients hold which classes, (clients, classes) bool."""
        client = np.arange(clients)
        rank = rng.random_sample((clients, num_classes))
        # Class i mod C gets the lowest rank, so client i always holds it
        rank[client, client % num_classes] = -1
        chosen = np.argpartition(rank, self.classes_per_client - 1, axis=1)[
            :, : self.classes_per_client
        ]
        holders = np.zeros((clients, num_classes), dtype=bool)
        holders[client[:, None], chosen] = True
        return holders
