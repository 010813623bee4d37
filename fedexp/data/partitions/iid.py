"""Every client gets a random sample of the same size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.data import Partition
from fedexp.data.partition import Partitioner


@dataclass(frozen=True, kw_only=True)
class Iid(Partitioner):
    """The IID split, called "homo" in the matching papers.

    A random permutation of the samples is cut into N nearly equal parts, the larger
    ones first.
    """

    one_class: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "iid"

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        size, larger = divmod(len(labels), clients)
        offsets = np.arange(clients + 1, dtype=np.int64) * size
        offsets += np.minimum(np.arange(clients + 1), larger)
        return Partition(rng.permutation(len(labels)).astype(np.int64, copy=False), offsets)
