"""Equal sizes, n classes of equal probability per client, classes refilled.

A class that has run out starts again, so images may occur more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedexp.core.build import require
from fedexp.core.errors import DataError
from fedexp.data.partitions.pathological import refuse_more_classes
from fedexp.data.partitions.refilled import RefilledPartitioner


@dataclass(frozen=True, kw_only=True)
class PathologicalRefilled(RefilledPartitioner):
    """The split Path(n) of FedMRUR, as in FL-Simulator.

    Every client has n distinct classes, uniformly drawn, each with probability 1 / n. A
    class without a client is left out, with its samples.

    Args:
        classes_per_client: Number n of classes per client.
    """

    classes_per_client: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.classes_per_client >= 1,
            f"classes_per_client must be at least 1, got {self.classes_per_client}",
        )

    @property
    def name(self) -> str:
        return "pathological_refilled"

    def check(self, clients: int, num_classes: int) -> None:
        super().check(clients, num_classes)
        refuse_more_classes(self.classes_per_client, num_classes)

    def priors(self, classes: int, clients: int, rng: np.random.RandomState) -> np.ndarray:
        n = self.classes_per_client
        if n > classes:
            raise DataError(
                f"the pool has samples of {classes} classes, but every client needs {n}",
                where="partition.classes_per_client",
                expected=f"at most {classes}",
                got=n,
                do="lower partition.classes_per_client, or raise limit.train",
            )

        chosen = rng.random_sample((clients, classes)).argsort(axis=1)[:, :n]
        priors = np.zeros((clients, classes))
        np.put_along_axis(priors, chosen, 1 / n, axis=1)
        return priors
