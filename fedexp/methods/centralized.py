"""Centralised training: one model on the data of all clients, the upper baseline.

In each round the model is trained on the pooled data (``local.epochs`` passes). The
optimizer's state starts empty in every round, as it does at a client in federated
training.
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
    """The aggregator of centralised training.

    A single client has all training data, so the mean over clients is its model.
    """

    communicates: ClassVar[bool] = False

    def cohort(self, env: Env) -> list[int]:
        return [POOLED]

    def population(self, env: Env) -> np.ndarray:
        return np.array([env.sizes.sum()])
