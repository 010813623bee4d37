"""Equal sizes, each client with a separate class prior, classes refilled.

A class that has run out starts again, so images may occur more than once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedexp.core.build import require
from fedexp.data.partitions.dirichlet_per_client import class_priors
from fedexp.data.partitions.refilled import RefilledPartitioner


@dataclass(frozen=True, kw_only=True)
class DirichletRefilled(RefilledPartitioner):
    """The split Dir(mu) of FedMRUR, as in FL-Simulator.

    Every client's class prior is drawn from Dir(alpha 1_C).

    Args:
        alpha: Concentration mu over classes. Towards 0 each client has one class.
    """

    alpha: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")

    @property
    def name(self) -> str:
        return "dirichlet_refilled"

    def priors(self, classes: int, clients: int, rng: np.random.RandomState) -> np.ndarray:
        return class_priors(self.alpha, clients, classes, rng)
