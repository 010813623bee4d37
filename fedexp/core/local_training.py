"""The amount of a client's local training in a round, and its optimizer.

The local steps themselves are in `fedexp.core.kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fedexp.core.build import NOT_A_KEY, require


@dataclass(frozen=True)
class LocalTraining:
    """Local training of one round: the config's ``local.*``.

    The comments in ``conf/config.yaml`` are the reference.

    Args:
        epochs: Passes over the client's data, or None. Ignored if `steps` is set.
        steps: A fixed number of optimizer steps, or None.
        batch_size: Samples per step. The last batch of an epoch may be smaller.
        optimizer: ``sgd`` (heavy ball with `momentum`), ``adam`` or ``amsgrad``
            (`betas`, `eps`), or ``rmsprop`` (the second of `betas`, `eps`). Its state
            starts empty in every round.
        lr: Step size of round 0. In a result of `at_round`, the step size of that
            round.
        lr_decay: Factor of the step size per round.
        momentum: Coefficient of the heavy ball.
        weight_decay: Coefficient of coupled weight decay, ``g + weight_decay * w``. It
            is applied after clipping.
        clip: Bound of the gradient's norm over all parameters, or None.
        betas: Decay rates of the moment estimates.
        eps: Number that is added to the denominator.
        max_steps: Upper bound on the steps of a round, or None. It applies to `epochs`
            and to `steps`.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    optimizer: Literal["sgd", "adam", "amsgrad", "rmsprop"]
    lr: float
    lr_decay: float
    momentum: float
    weight_decay: float
    clip: float | None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_steps: int | None = field(default=None, metadata=NOT_A_KEY)

    def __post_init__(self) -> None:
        require(
            self.steps is not None or self.epochs is not None,
            "set local.epochs or local.steps",
        )
        rules = {
            "epochs": (self.epochs is None or self.epochs >= 1, "be at least 1"),
            "steps": (self.steps is None or self.steps >= 1, "be at least 1"),
            "batch_size": (self.batch_size >= 1, "be at least 1"),
            "lr": (self.lr > 0, "be positive"),
            "lr_decay": (self.lr_decay > 0, "be positive"),
            "momentum": (0 <= self.momentum < 1, "be in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "not be negative"),
            "clip": (self.clip is None or self.clip > 0, "be positive or null"),
            "eps": (self.eps > 0, "be positive"),
            "betas": (all(0 <= b < 1 for b in self.betas), "be in [0, 1)"),
        }
        for name, (holds, rule) in rules.items():
            value = list(self.betas) if name == "betas" else getattr(self, name)
            require(holds, f"local.{name} must {rule}, got {value}")

    def at_round(self, round: int) -> LocalTraining:
        """Return the local training of `round` (from 0), with its step size."""
        return replace(self, lr=self.lr * self.lr_decay**round, lr_decay=1.0)
