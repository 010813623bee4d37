"""The settings of a client's local training: its length and its optimizer.

The code of the local steps is in `fedexp.core.kernel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from fedexp.core.build import NOT_A_KEY, require


@dataclass(frozen=True)
class LocalTraining:
    """The settings of one round's local training: the config's ``local.*``.

    The comments in ``conf/config.yaml`` describe the keys in more detail.

    Args:
        epochs: Passes over the client's data, or None. Ignored if `steps` is set. With
            `epochs_min`, the largest number of passes of a client.
        steps: A fixed number of optimizer steps, or None.
        batch_size: Samples per step. The last batch of an epoch may be smaller. If it
            has only one sample, networks with BatchNorm skip it.
        optimizer: ``sgd`` (with heavy-ball `momentum`), ``adam`` or ``amsgrad`` (with
            `betas` and `eps`), or ``rmsprop`` (with the second of `betas`, and `eps`).
            Its state is reset in every round.
        lr: Step size before the schedule and the warm-up. `at_round` returns a copy
            with the step size of a round.
        lr_schedule: How the step size changes from round to round (see `lr_factor`).
        lr_decay: Factor of the schedules ``exponential`` and ``step``. It is 1 for the
            other schedules.
        lr_step: For the schedule ``step``, the number of rounds after which the step
            size is multiplied by `lr_decay`. None for the other schedules.
        lr_warmup: Number of rounds before the step size reaches `lr`.
        momentum: Coefficient of heavy-ball momentum.
        weight_decay: Coefficient of coupled weight decay, ``g + weight_decay * w``. It
            is applied after clipping.
        clip: Upper bound on the gradient's norm over all parameters, or None.
        betas: Decay rates of the moment estimates.
        eps: Number that is added to the denominator.
        max_steps: Upper bound on the steps of a round, or None. It applies to `epochs`
            and to `steps`.
        epochs_min: Smallest number of passes of a client (see `Env.draw_epochs`). None
            if all clients make `epochs` passes.
        epochs_drawn: When a client's number of passes is drawn: in every ``round``, or
            ``once``.
        stragglers: Probability that a client is a straggler. Only stragglers draw their
            number of passes. All other clients make `epochs` passes.
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
    # `at_round` puts the schedule into `lr`, and `Env.job` puts the drawn number into
    # `epochs`. These fields are not part of an object's text, which is in the keys of
    # the client cache.
    lr_schedule: Literal["constant", "exponential", "cosine", "step", "linear"] = field(
        default="exponential", repr=False
    )
    lr_step: int | None = field(default=None, repr=False)
    lr_warmup: int = field(default=0, repr=False)
    epochs_min: int | None = field(default=None, repr=False)
    epochs_drawn: Literal["round", "once"] = field(default="round", repr=False)
    stragglers: float = field(default=1.0, repr=False)

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
        self._check_schedule()
        self._check_uneven_work()

    def _check_schedule(self) -> None:
        schedule = self.lr_schedule
        require(self.lr_warmup >= 0, f"local.lr_warmup must not be negative, got {self.lr_warmup}")
        require(
            schedule in ("exponential", "step") or self.lr_decay == 1,
            f"local.lr_schedule={schedule} has no factor: set local.lr_decay=1, "
            f"got {self.lr_decay}",
        )
        require(
            (schedule == "step") == (self.lr_step is not None),
            "local.lr_schedule=step needs local.lr_step, a number of rounds"
            if schedule == "step"
            else f"local.lr_step={self.lr_step} needs local.lr_schedule=step, got {schedule}",
        )
        require(
            self.lr_step is None or self.lr_step >= 1,
            f"local.lr_step must be at least 1, got {self.lr_step}",
        )
        require(
            schedule != "step" or self.lr_decay != 1,
            "local.lr_schedule=step needs a factor: set local.lr_decay, for example to 0.1",
        )

    def _check_uneven_work(self) -> None:
        least, most = self.epochs_min, self.epochs
        require(
            least is None or self.steps is None,
            "local.epochs_min has no effect with local.steps: set local.steps=null, "
            f"got local.epochs_min={least} local.steps={self.steps}",
        )
        require(
            least is None or (most is not None and 1 <= least <= most),
            f"local.epochs_min must be in [1, local.epochs], got {least} with local.epochs={most}",
        )
        require(
            0 < self.stragglers <= 1, f"local.stragglers must be in (0, 1], got {self.stragglers}"
        )
        require(
            least is not None or (self.stragglers == 1 and self.epochs_drawn == "round"),
            "local.stragglers and local.epochs_drawn need local.epochs_min, the smallest number "
            "of epochs of a client, for example local.epochs_min=1",
        )

    def at_round(self, round: int, rounds: int) -> LocalTraining:
        """Return the local training of a round, with its step size.

        Args:
            round: The round, from 0.
            rounds: Number of rounds of the run.
        """
        return replace(
            self,
            lr=self.lr * self.lr_factor(round, rounds),
            lr_schedule="exponential",
            lr_decay=1.0,
            lr_step=None,
            lr_warmup=0,
            epochs_min=None,
            epochs_drawn="round",
            stragglers=1.0,
        )

    def lr_factor(self, round: int, rounds: int) -> float:
        """Return the factor of the step size in a round.

        In round t of the W rounds of the warm-up it is (t + 1) / (W + 1). After the
        warm-up, s counts the rounds from 0, and S is the number of these rounds:

        - ``constant``: 1.
        - ``exponential``: lr_decay^s.
        - ``step``: lr_decay^floor(s / lr_step).
        - ``cosine``: (1 + cos(pi s / S)) / 2 (Loshchilov & Hutter, SGDR, ICLR 2017, Eq.
          5, without restarts).
        - ``linear``: 1 - s / S.

        ``cosine`` and ``linear`` would be 0 in the round after the last one.

        Args:
            round: The round, from 0.
            rounds: Number of rounds of the run.
        """
        if round < self.lr_warmup:
            return (round + 1) / (self.lr_warmup + 1)
        s, S = round - self.lr_warmup, rounds - self.lr_warmup
        match self.lr_schedule:
            case "constant":
                return 1.0
            case "exponential":
                return self.lr_decay**s
            case "step":
                assert self.lr_step is not None  # __post_init__ checks it
                return self.lr_decay ** (s // self.lr_step)
            case "cosine":
                return (1 + math.cos(math.pi * s / S)) / 2
            case "linear":
                return 1 - s / S
