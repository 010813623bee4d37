"""A split with clients of equal size, n classes per client and refilled classes.

If all images of a class have been drawn, all of them become available again. Images may
therefore occur more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.errors import DataError
from fedexp.data.partitions.pathological import ClassesPerClient
from fedexp.data.partitions.refilled import RefilledPartitioner


@dataclass(frozen=True, kw_only=True)
class PathologicalRefilled(ClassesPerClient, RefilledPartitioner):
    """The split Path(n) of FedMRUR, as in FL-Simulator.

    Every client gets n distinct random classes. For each of its samples it draws one of
    these classes, each with probability 1 / n. Samples of a class that no client gets
    are not used.

    Args:
        classes_per_client: Number n of classes per client.
    """

    name: ClassVar[str] = "pathological_refilled"

    classes_per_client: int = 10

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
