"""Centralised training: one model on every client's data together, the reference point from above.

A round is one job on the pooled data (``local.epochs`` passes); the optimizer's state starts empty every round, as a
client's does.
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
    """`Mean` over a cohort of one, which holds all training data."""

    communicates: ClassVar[bool] = False

    def cohort(self, env: Env) -> list[int]:
        return [POOLED]

    def population(self, env: Env) -> np.ndarray:
        return np.array([env.sizes.sum()])
