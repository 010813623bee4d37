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

    name: ClassVar[str] = "iid"
    one_class: ClassVar[bool] = True

    def sample(
        self, labels: np.ndarray, num_classes: int, clients: int, rng: np.random.RandomState
    ) -> Partition:
        return Partition.from_lists(np.array_split(rng.permutation(len(labels)), clients))
