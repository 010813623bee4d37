"""A split with clients of equal size, each with its own class prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.data import Partition
from fedexp.data.partition import equal_sizes, from_owners
from fedexp.data.partitions.dirichlet import DirichletPartitioner

# Number of clients whose random numbers are drawn at a time. It limits the memory of
# arrays of shape (clients, classes)
_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class DirichletPerClient(DirichletPartitioner):
    """A split in which each client draws a class prior q ~ Dir(alpha 1_C).

    C is the number of classes. The client draws the classes of its samples from q.
    Clients' sizes differ by at most one (the first clients get the extra sample). No
    sample is used twice, as in Co-Boosting. In FL-Simulator's variant
    (`DirichletRefilled`), all images of an exhausted class become available again, so
    images may repeat.

    The assignment works in passes. In a pass, every client requests a class for each
    sample that it still lacks. If a class is requested more often than it has samples,
    randomly chosen requests are granted and the class is exhausted. In the next pass,
    priors are renormalised over the remaining classes. If a client's prior is zero on
    all of them, the client draws classes in proportion to their remaining samples. Each
    pass exhausts a class or is the last one, so there are at most C + 1 passes. A
    million clients take seconds.

    Args:
        alpha: Concentration over classes. As alpha goes to 0, each client has one
            class.
    """

    name: ClassVar[str] = "dirichlet_per_client"

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        n = len(labels)
        pools = [rng.permutation(np.flatnonzero(labels == k)) for k in range(num_classes)]
        left = np.array([len(pool) for pool in pools])
        lacks = equal_sizes(n, clients)

        priors = class_priors(self.alpha, clients, num_classes, rng)

        owner = np.empty(n, dtype=np.int32)
        passes = 0

        while lacks.any():
            passes += 1
            who, what = _ask(priors, lacks, left, rng)
            for k in np.flatnonzero(left):
                asking = who[what == k]
                if len(asking) > left[k]:
                    asking = rng.permutation(asking)[: left[k]]
                pool = pools[k][len(pools[k]) - left[k] :]
                owner[pool[: len(asking)]] = asking
                left[k] -= len(asking)
                lacks -= np.bincount(asking, minlength=clients)

        partition = from_owners(owner, clients, rng.permutation(n))
        partition.info["passes"] = passes
        return partition


def class_priors(
    alpha: float, clients: int, num_classes: int, rng: np.random.RandomState
) -> np.ndarray:
    """Draw one class prior from Dir(alpha 1_C) per client, where C is `num_classes`.

    Returns:
        One prior per row, (clients, classes). The dtype is float32, so that a million
        clients fit in memory.
    """
    priors = np.empty((clients, num_classes), dtype=np.float32)
    for start in range(0, clients, _ROWS):
        rows = rng.standard_gamma(alpha, size=(min(_ROWS, clients - start), num_classes))
        total = rows.sum(axis=1, keepdims=True)
        # Gamma variates that are divided by their sum follow a Dirichlet distribution.
        # If all of a client's variates are 0 by underflow, the client gets a single
        # class. This is the limit of Dir(alpha) for alpha -> 0
        empty = np.flatnonzero(total[:, 0] == 0)
        rows[empty, rng.randint(num_classes, size=len(empty))] = 1
        priors[start : start + len(rows)] = rows / np.where(total > 0, total, 1)
    return priors


def _ask(
    priors: np.ndarray, lacks: np.ndarray, left: np.ndarray, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a class for every sample that a client still lacks, from the client's prior.

    Returns:
        The client and the class of each of these samples, both int32.
    """
    needy = np.flatnonzero(lacks)
    who = np.repeat(needy.astype(np.int32), lacks[needy])
    what = np.empty(len(who), dtype=np.int32)

    remaining = np.where(left > 0, 1.0, 0.0)
    last = int(np.flatnonzero(left)[-1])
    stop = 0

    for start in range(0, len(needy), _ROWS):
        rows = needy[start : start + _ROWS]

        weights = priors[rows] * remaining
        weights[weights.sum(axis=1) == 0] = left
        edges = np.cumsum(weights, axis=1)

        row = np.repeat(np.arange(len(rows)), lacks[rows])
        point = rng.random_sample(len(row)) * edges[row, -1]
        classes = np.zeros(len(row), dtype=np.int32)
        # One class at a time, because an array of shape (samples, classes) would be
        # large
        for k in range(last):
            classes += point >= edges[row, k]

        what[stop : stop + len(row)] = classes
        stop += len(row)

    return who, what
