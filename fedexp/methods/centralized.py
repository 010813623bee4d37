"""Centralised training: one model on the data of all clients, the upper baseline.

A round is one job on the pooled data (``local.epochs`` passes). The optimizer's state
starts empty every round, as a client's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedexp.core.data import POOLED
from fedexp.core.env import Env
from fedexp.methods.fedavg import Mean


@dataclass(frozen=True)
class Centralized(Mean):
    """The mean over a cohort of a single client that holds all training data."""

    communicates: ClassVar[bool] = False

    def cohort(self, env: Env) -> list[int]:
        return [POOLED]

    def population(self, env: Env) -> np.ndarray:
        return np.array([env.sizes.sum()])
