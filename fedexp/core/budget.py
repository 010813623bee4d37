"""How much a client trains in a round, and with which optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Budget:
    """Local work of one round.

    Args:
        epochs, steps: passes over the client's data, or a fixed number of steps (exactly one is set).
        batch_size: the last batch of an epoch may be smaller.
        optimizer: ``sgd`` (heavy ball with `momentum`), ``adam`` or ``amsgrad`` (`betas`, `eps`) or ``rmsprop`` (the
            second of `betas`, `eps`); its state starts empty every round.
        lr: this round's step size; lr_0: the first round's.
        weight_decay: coupled, ``g + weight_decay * w``, after clipping.
        clip: bound of the gradient's norm over all parameters, or None.
        max_steps: a cap on either form of work, or None.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    optimizer: Literal["sgd", "adam", "amsgrad", "rmsprop"]
    lr: float
    lr_0: float
    momentum: float
    weight_decay: float
    clip: float | None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_steps: int | None = None
