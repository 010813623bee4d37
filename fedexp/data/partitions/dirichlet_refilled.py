"""A split with clients of equal size, Dirichlet class priors and refilled classes.

If all images of a class have been drawn, all of them become available again. Images may
therefore occur more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.data.partitions.dirichlet import DirichletPartitioner
from fedexp.data.partitions.dirichlet_per_client import class_priors
from fedexp.data.partitions.refilled import RefilledPartitioner


@dataclass(frozen=True, kw_only=True)
class DirichletRefilled(DirichletPartitioner, RefilledPartitioner):
    """The split Dir(mu) of FedMRUR, as in FL-Simulator.

    Every client's class prior is drawn from Dir(alpha 1_C), where C is the number of
    classes.

    Args:
        alpha: Concentration over classes, called mu in FedMRUR. As alpha goes to 0,
            each client has one class.
    """

    name: ClassVar[str] = "dirichlet_refilled"

    alpha: float = 0.6

    def priors(self, classes: int, clients: int, rng: np.random.RandomState) -> np.ndarray:
        return class_priors(self.alpha, clients, classes, rng)
