"""Equal sizes, each client with a class prior of its own, classes refilled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedexp.core.build import require
from fedexp.data.partitions.dirichlet_per_client import class_priors
from fedexp.data.partitions.refilled import RefilledPartitioner


@dataclass(frozen=True, kw_only=True)
class DirichletRefilled(RefilledPartitioner):
    """FedMRUR's Dir(mu), as FL-Simulator has it: every client's prior is a draw from Dir(alpha 1_C).

    Args:
        alpha: mu, concentration over classes; towards 0 each client has one class.
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
