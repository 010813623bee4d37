"""Partitions that are determined by the classes of each client."""

from __future__ import annotations

import numpy as np

from fedexp.core.data import Partition
from fedexp.data.partition import equal_sizes, from_owners


def deal_equally(labels: np.ndarray, holders: np.ndarray, rng: np.random.RandomState) -> Partition:
    """Shuffle each class and split it into nearly equal parts among its holders.

    Classes are handled in ascending order, and so are the holders of a class.

    Args:
        labels: Labels of shape (n,).
        holders: (clients, classes) bool. Every class that occurs has a holder.
        rng: Source of the shuffles.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    order = []

    for k in range(holders.shape[1]):
        members = np.flatnonzero(labels == k)
        if not len(members):
            continue
        rng.shuffle(members)

        clients = np.flatnonzero(holders[:, k])
        sizes = equal_sizes(len(members), len(clients))
        owner[members] = np.repeat(clients, sizes)
        order.append(members)

    return from_owners(owner, len(holders), np.concatenate(order))
