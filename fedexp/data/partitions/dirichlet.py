"""A split that divides each class among the clients in Dirichlet proportions.

Papers on model matching and model fusion use this split.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from fedexp.core.build import require
from fedexp.core.data import Partition, offsets_of
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner
from fedexp.data.partitions.bounded import BoundedPartitioner

MAX_REDRAWS = 10_000  # largest number of draws of one class's proportions


@dataclass(frozen=True, kw_only=True)
class DirichletPartitioner(Partitioner):
    """A scheme that draws proportions from a symmetric Dirichlet distribution.

    Args:
        alpha: Concentration of the distribution.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")


@dataclass(frozen=True, kw_only=True)
class Dirichlet(DirichletPartitioner, BoundedPartitioner):
    """The Dirichlet split: proportions of clients within each class.

    There are N clients and n samples, of which n_c have class c. For each class c:

    - Shuffle the ascending indices of its samples.
    - Draw the clients' proportions p ~ Dir(alpha 1_N).
    - Cut the shuffled indices at floor(cumsum(p) n_c). Client i gets the i-th part. The
      last client also gets the remainder that rounding leaves.

    At the end, every client's list is shuffled. The random numbers are drawn in the
    same order as in the published code of the gated split. The same seed therefore
    reproduces the published gated partitions.

    If `gated`, two rules apply. First, p is set to zero for a client that already holds
    n/N samples or more (a full client), and p is renormalised. Second, the whole
    partition is sampled again until the smallest client has `min_size` samples. With a
    small alpha, p can be zero for every client that is not full. The published code
    then computes with NaN. Here the proportions of that class are drawn again.

    If `gated` is False, the rules do not apply and the partition is sampled once, as in
    FedLAW. Hsu et al. 2019 draw a class prior for each client instead
    (`DirichletPerClient`). If all samples are of one class (images with masks), the
    scheme draws the clients' sizes, as NAFI does for K = 1 (Xiao & Cheng 2023).

    Sources: Yurochkin et al. 2019 (PFNM), Wang et al. 2020 (FedMA), Su et al. 2023
        (MA-Echo), Zhang et al. 2022 (DENSE).

    Args:
        alpha: Concentration. As alpha goes to 0, each class goes to one client.
        gated: Whether the two rules above apply: a client with n/N samples gets no
            samples of further classes, and the partition is sampled again until every
            client has `min_size` samples.
        min_size: Smallest number of samples that a client must have. The default 10 is
            the value in the papers that use the gated split.
    """

    name: ClassVar[str] = "dirichlet"
    one_class: ClassVar[bool] = True

    gated: bool = True
    min_size: int = 10

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        classes = [np.flatnonzero(labels == k) for k in range(num_classes)]

        if not self.gated:
            order, counts = self._deal(classes, len(labels), clients, rng)
            return _assemble(order, counts, rng, {"draws": 1})

        self.refuse_small_pool(len(labels), clients)
        possible = len(labels) >= self.min_size * clients

        first = rng.get_state()
        best, worst, attempt = -1, len(labels), 0
        for attempt in self.attempts() if possible else ():
            order, counts = self._deal(classes, len(labels), clients, rng)
            smallest = int(counts.sum(axis=1).min())
            best, worst = max(best, smallest), min(worst, smallest)
            if smallest >= self.min_size:
                return _assemble(order, counts, rng, {"draws": attempt})

        if self.on_small == "error":
            raise DataError(
                "the gated Dirichlet split left a client with fewer than "
                f"min_size={self.min_size} samples (attempts: {attempt})",
                where=f"partition dirichlet: alpha={self.alpha}, {clients} clients, "
                f"{len(labels)} samples",
                expected=f"a smallest client with at least {self.min_size} samples",
                got=f"smallest client between {worst} and {best} samples over the attempts",
                do="choose partition.on_small=repair|drop|allow, lower partition.min_size, "
                "raise partition.alpha, use fewer clients, partition.gated=false, "
                "or raise partition.max_draws and partition.max_seconds",
            )

        # The policy is applied to the first attempt, because the last attempt before
        # the time limit differs between machines
        rng.set_state(first)
        order, counts = self._deal(classes, len(labels), clients, rng)
        return _assemble(order, counts, rng, {"draws": max(attempt, 1), "gate": "not met"})

    def _deal(
        self, classes: list[np.ndarray], n: int, clients: int, rng: np.random.RandomState
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Sample one partition without a check of its smallest client.

        Returns:
            The shuffled indices of each class, and counts of shape (clients, classes).
            The clients take the shuffled indices of a class one after another, each as
            many as its count.
        """
        order: list[np.ndarray] = []
        counts = np.zeros((clients, len(classes)), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        concentration = np.repeat(self.alpha, clients)

        for k, members in enumerate(classes):
            shuffled = members.copy()
            rng.shuffle(shuffled)
            order.append(shuffled)

            proportions = self._proportions(
                concentration, held < n / clients if self.gated else None, k, rng
            )
            cuts = (np.cumsum(proportions) * len(shuffled)).astype(np.int64)[:-1]
            counts[:, k] = np.diff(cuts, prepend=0, append=len(shuffled))
            held += counts[:, k]

        return order, counts

    def _proportions(
        self,
        concentration: np.ndarray,
        is_open: np.ndarray | None,
        k: int,
        rng: np.random.RandomState,
    ) -> np.ndarray:
        for _ in range(MAX_REDRAWS):
            proportions = rng.dirichlet(concentration)
            # If no client is open, all samples are assigned and class k is empty. Its
            # proportions then have no effect
            if is_open is not None and is_open.any():
                proportions = proportions * is_open

            total = proportions.sum()
            if total > 0:  # also false for NaN
                return proportions / total if is_open is not None else proportions
        raise DataError(
            f"{MAX_REDRAWS} draws of class {k}'s proportions were all zero "
            "on the clients that are not full",
            where=f"partition dirichlet: alpha={self.alpha}, {len(concentration)} clients",
            expected="an alpha at which floating-point Dirichlet draws are not all zero",
            do="raise partition.alpha (0.01 works), "
            "or use partition=label_groups for classes without overlap",
        )


def _assemble(
    order: list[np.ndarray], counts: np.ndarray, rng: np.random.RandomState, info: dict[str, Any]
) -> Partition:
    """Join each client's samples, class after class, and shuffle each client's list."""
    clients, num_classes = counts.shape
    owner = np.repeat(np.tile(np.arange(clients), num_classes), counts.T.ravel())
    indices = np.concatenate(order)[np.argsort(owner, kind="stable")]
    offsets = offsets_of(counts.sum(axis=1))
    for start, stop in pairwise(offsets):
        rng.shuffle(indices[start:stop])
    return Partition(indices, offsets, info)
