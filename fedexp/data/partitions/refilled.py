"""A split with clients of equal size, class priors and refilled classes.

If all images of a class have been drawn, all of them become available again. Some
images may therefore occur several times, and other images may never occur.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition, offsets_of
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner


@dataclass(frozen=True, kw_only=True)
class RefilledPartitioner(Partitioner):
    """FL-Simulator's assignment, which FedMRUR uses too.

    The assignment gives out n samples to N clients, one after another. A random client
    that is not full draws a class from its prior, and gets the next image of that
    class. If the class has run out, all its images become available again, and the
    client draws a class again (possibly the same). Clients have floor(n / N) samples
    each. The first client also gets the remainder. ``info`` counts the samples that are
    assigned more than once (``repeated_samples``) or to no client
    (``dropped_samples``). Partitions have the same distribution as in the published
    code, but the same seed gives a different partition.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.on_small in ("error", "allow"),
            f"sizes are equal: on_small={self.on_small} has nothing to move",
        )

    @abstractmethod
    def priors(self, classes: int, clients: int, rng: np.random.RandomState) -> np.ndarray:
        """Return each client's class probabilities.

        Args:
            classes: Number of classes that have at least one sample in the pool.
            clients: Number of clients.
            rng: Source of randomness.

        Returns:
            Probabilities of shape (clients, classes), with rows that sum to 1.
        """

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        if clients > len(labels):
            raise DataError(
                "clients of equal size need at least one sample each",
                where="clients",
                expected=f"at most {len(labels)}",
                got=clients,
                do="lower clients",
            )

        occurring = np.flatnonzero(np.bincount(labels, minlength=num_classes))
        pools = [rng.permutation(np.flatnonzero(labels == k)).tolist() for k in occurring]
        sizes = np.full(clients, len(labels) // clients, dtype=np.int64)
        sizes[0] += len(labels) % clients

        edges = np.cumsum(self.priors(len(pools), clients, rng), axis=1)
        who = _turns(sizes, rng)

        point = rng.random_sample(len(who)) * edges[who, -1]
        what = np.zeros(len(who), dtype=np.int64)
        # One class at a time, because an array of shape (samples, classes) would be
        # large
        for k in range(len(pools) - 1):
            what += point >= edges[who, k]

        given = np.empty(len(who), dtype=np.int64)
        left = [len(pool) for pool in pools]
        for turn, sampled in enumerate(what.tolist()):
            k = sampled
            while not left[k]:
                left[k] = len(pools[k])
                own = edges[who[turn]]
                k = int(np.searchsorted(own[:-1], rng.random_sample() * own[-1], side="right"))
            left[k] -= 1
            given[turn] = pools[k][left[k]]

        used = len(np.unique(given))
        return Partition(
            given[np.argsort(who, kind="stable")],
            offsets_of(sizes),
            {"repeated_samples": len(given) - used, "dropped_samples": len(labels) - used},
        )


def _turns(sizes: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """Draw the order in which the clients receive samples, one sample per turn.

    Each turn goes to a random client that does not yet have its number of samples.

    Args:
        sizes: Number of samples that each client gets, (clients,).
        rng: Source of randomness.

    Returns:
        The client of each turn, (sum of sizes,).
    """
    clients, lacks = len(sizes), sizes.copy()
    turns = [np.zeros(0, np.int64)]
    while lacks.any():
        asked = rng.randint(clients, size=int(lacks.sum()) + clients)
        order = np.argsort(asked, kind="stable")
        counts = np.bincount(asked, minlength=clients)
        # For each draw: the number of earlier draws of the same client
        nth = np.empty(len(asked), dtype=np.int64)
        nth[order] = np.arange(len(asked)) - np.repeat(np.cumsum(counts) - counts, counts)
        turns.append(asked[nth < lacks[asked]])
        lacks -= np.minimum(counts, lacks)
    return np.concatenate(turns)
