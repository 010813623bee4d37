"""A helper for schemes that choose which classes each client holds."""

from __future__ import annotations

import numpy as np

from fedexp.core.data import Partition
from fedexp.data.partition import equal_sizes, from_owners


def deal_equally(labels: np.ndarray, holders: np.ndarray, rng: np.random.RandomState) -> Partition:
    """Shuffle each class and split it nearly equally among the clients that hold it.

    Classes are handled in ascending order. A class's parts go to its clients in
    ascending order too.

    Args:
        labels: Labels of shape (n,).
        holders: Whether each client holds each class, (clients, classes), bool. Every
            class that has samples needs at least one client.
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
