"""A split whose clients have different numbers of samples, but the same distribution.

The literature calls it quantity skew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.data import Partition, offsets_of
from fedexp.core.errors import DataError
from fedexp.data.partitions.bounded import BoundedPartitioner
from fedexp.data.partitions.dirichlet import DirichletPartitioner


@dataclass(frozen=True, kw_only=True)
class Quantity(DirichletPartitioner, BoundedPartitioner):
    """Random samples, with client sizes from a Dirichlet distribution.

    There are N clients and n samples:

    - Shuffle the samples.
    - Draw the clients' shares p ~ Dir(alpha 1_N), until the smallest client has
      `min_size` samples.
    - Cut the shuffled samples at floor(cumsum(p) n). Client i gets the i-th part. The
      last client also gets the remainder that rounding leaves.

    Source: Li, Diao, Chen & He, Federated Learning on Non-IID Data Silos: An
        Experimental Study, ICDE 2022, quantity skew.

    Args:
        alpha: Concentration. As alpha goes to 0, one client gets all samples. As alpha
            goes to infinity, all clients get equally many.
        min_size: Smallest number of samples that a client must have. The default 10 is
            the value in the authors' code.
    """

    name: ClassVar[str] = "quantity"
    one_class: ClassVar[bool] = True

    min_size: int = 10

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        n = len(labels)
        self.refuse_small_pool(n, clients)
        order = rng.permutation(n)
        first: np.ndarray | None = None
        largest = attempt = 0

        for attempt in self.attempts():
            sizes = self._draw_sizes(n, clients, rng)
            if sizes is None:
                continue
            if first is None:
                first, after_first = sizes, rng.get_state()
            largest = max(largest, int(sizes.min()))
            if largest >= self.min_size:
                return Partition(order, offsets_of(sizes), {"draws": attempt})
            if n < self.min_size * clients:  # no draw can succeed
                break

        if first is None or self.on_small == "error":
            raise DataError(
                f"no draw of the clients' sizes gave every client min_size={self.min_size} "
                f"samples (attempts: {attempt})",
                where=f"partition quantity: alpha={self.alpha}, {clients} clients, {n} samples",
                expected=f"a smallest client with at least {self.min_size} samples",
                got=f"at most {largest} samples",
                do="raise partition.alpha, lower partition.min_size, use fewer clients, choose "
                "partition.on_small=repair|drop|allow, or raise partition.max_draws and "
                "partition.max_seconds",
            )

        # The policy is applied to the first draw, because the last draw before the time
        # limit differs between machines.
        rng.set_state(after_first)
        return Partition(order, offsets_of(first), {"draws": attempt, "gate": "not met"})

    def _draw_sizes(self, n: int, clients: int, rng: np.random.RandomState) -> np.ndarray | None:
        """Draw the clients' sizes, or return None if all gamma variates underflow."""
        shares = rng.dirichlet(np.repeat(self.alpha, clients))
        if not shares.sum() > 0:  # also true for NaN
            return None
        cuts = (np.cumsum(shares / shares.sum()) * n).astype(np.int64)[:-1]
        return np.diff(cuts, prepend=0, append=n)
