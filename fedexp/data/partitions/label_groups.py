"""A split for which the config lists the classes of every client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner, impossible
from fedexp.data.partitions.by_class import deal_equally


@dataclass(frozen=True, kw_only=True)
class LabelGroups(Partitioner):
    """A split in which client i holds the classes ``groups[i]``.

    A class with several holders is shuffled and split equally among them.

    Args:
        groups: One list of classes per client.
    """

    name: ClassVar[str] = "label_groups"
    scales: ClassVar[bool] = False

    groups: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for client, group in enumerate(self.groups):
            require(
                len(set(group)) == len(group),
                f"groups[{client}] names a class twice: {list(group)}",
            )
            require(
                min(group, default=0) >= 0,
                f"groups[{client}] contains a negative class: {list(group)}",
            )

    def check(self, clients: int, num_classes: int) -> None:
        super().check(clients, num_classes)

        if len(self.groups) != clients:
            raise impossible(
                "one group of classes per client is needed",
                "groups",
                f"{clients} lists, e.g. [[0,1],[2,3],...]",
                f"{len(self.groups)} lists",
                f"set clients={len(self.groups)}"
                if self.groups
                else "set partition.groups='[[0,1],[2,3],...]'",
            )

        named = {k for group in self.groups for k in group}
        if max(named, default=0) >= num_classes:
            raise impossible(
                f"class {max(named)} does not exist",
                "groups",
                f"classes 0 to {num_classes - 1}",
                max(named),
                "correct partition.groups",
            )

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        holders = np.zeros((clients, num_classes), dtype=bool)
        for client, group in enumerate(self.groups):
            holders[client, list(group)] = True

        orphans = np.flatnonzero(
            (np.bincount(labels, minlength=num_classes) > 0) & ~holders.any(axis=0)
        )
        if len(orphans):
            raise DataError(
                "classes without a client: their samples would be lost",
                where="partition.groups",
                expected="each class that occurs in at least one group",
                got=f"class {', '.join(map(str, orphans[:20]))} in no group",
                do="add them to a group",
            )

        return deal_equally(labels, holders, rng)
