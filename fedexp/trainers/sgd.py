"""Plain local training: the task's loss, the configured local optimizer, nothing sent but the model."""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.trainer import Trainer


@dataclass(frozen=True)
class Sgd(Trainer):
    """Every hook as `Trainer` has it."""
