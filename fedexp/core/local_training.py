"""The settings of a client's local training: its length and its optimizer.

The code of the local steps is in `fedexp.core.kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fedexp.core.build import NOT_A_KEY, require


@dataclass(frozen=True)
class LocalTraining:
    """The settings of one round's local training: the config's ``local.*``.

    The comments in ``conf/config.yaml`` describe the keys in more detail.

    Args:
        epochs: Passes over the client's data, or None. Ignored if `steps` is set.
        steps: A fixed number of optimizer steps, or None.
        batch_size: Samples per step. The last batch of an epoch may be smaller.
        optimizer: ``sgd`` (with heavy-ball `momentum`), ``adam`` or ``amsgrad`` (with
            `betas` and `eps`), or ``rmsprop`` (with the second of `betas`, and `eps`).
            Its state is reset in every round.
        lr: Step size of round 0. `at_round` returns a copy with the step size of
            another round.
        lr_decay: Factor by which the step size is multiplied after every round.
        momentum: Coefficient of heavy-ball momentum.
        weight_decay: Coefficient of coupled weight decay, ``g + weight_decay * w``. It
            is applied after clipping.
        clip: Upper bound on the gradient's norm over all parameters, or None.
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
