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
        lr: Step size of round 0, or of one round in a result of `at_round`.
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
        for name in ("epochs", "steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"local.{name} must be at least 1, got {value}")
        require(self.batch_size >= 1, f"local.batch_size must be at least 1, got {self.batch_size}")
        require(self.lr > 0, f"local.lr must be positive, got {self.lr}")
        require(self.lr_decay > 0, f"local.lr_decay must be positive, got {self.lr_decay}")
        require(0 <= self.momentum < 1, f"local.momentum must be in [0, 1), got {self.momentum}")
        require(
            self.weight_decay >= 0,
            f"local.weight_decay must not be negative, got {self.weight_decay}",
        )
        require(
            self.clip is None or self.clip > 0,
            f"local.clip must be positive or null, got {self.clip}",
        )
        require(self.eps > 0, f"local.eps must be positive, got {self.eps}")
        require(
            all(0 <= b < 1 for b in self.betas),
            f"local.betas must be in [0, 1), got {list(self.betas)}",
        )

    def at_round(self, round: int) -> LocalTraining:
        """Return the local training of `round` (from 0), with its step size."""
        return replace(self, lr=self.lr * self.lr_decay**round, lr_decay=1.0)
