"""Tests of the schedule of the step size over rounds."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from fedexp.core.errors import ConfigError
from fedexp.core.local_training import LocalTraining
from tests.world import assert_same, make_world

ROUNDS, LR, DECAY = 12, 0.3, 0.7
# The schedule of torch that is equal to each of ours.
TORCH: dict[str, Any] = {
    "constant": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda _: 1.0),
    "exponential": lambda sgd: lr_scheduler.ExponentialLR(sgd, DECAY),
    "step": lambda sgd: lr_scheduler.StepLR(sgd, 5, DECAY),
    "cosine": lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, ROUNDS),
    "linear": lambda sgd: lr_scheduler.LinearLR(sgd, 1.0, 0.0, ROUNDS),
}


def local_training(schedule: str = "exponential", **changes: Any) -> LocalTraining:
    has_factor = schedule in ("exponential", "step")
    return LocalTraining(
        **{
            "epochs": 1,
            "steps": None,
            "batch_size": 8,
            "optimizer": "sgd",
            "lr": LR,
            "lr_decay": DECAY if has_factor else 1.0,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "clip": None,
            "lr_schedule": schedule,
            "lr_step": 5 if schedule == "step" else None,
        }
        | changes
    )


@pytest.mark.parametrize("schedule", TORCH)
def test_schedule_equals_that_of_torch(schedule: str) -> None:
    sgd = SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    theirs = TORCH[schedule](sgd)
    for round in range(ROUNDS):
        ours = local_training(schedule).at_round(round, ROUNDS).lr
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        assert ours > 0
        sgd.step()
        theirs.step()


@pytest.mark.parametrize("schedule", TORCH)
def test_schedule_starts_after_the_warm_up(schedule: str) -> None:
    own, plain = local_training(schedule, lr_warmup=3), local_training(schedule)
    factors = [own.lr_factor(round, ROUNDS) for round in range(ROUNDS)]
    assert factors[:4] == [1 / 4, 2 / 4, 3 / 4, 1.0]
    assert factors[3:] == [plain.lr_factor(round, ROUNDS - 3) for round in range(ROUNDS - 3)]


def test_warm_up_may_last_longer_than_the_run() -> None:
    own = local_training("cosine", lr_warmup=9)
    assert [own.lr_factor(round, 2) for round in range(2)] == [1 / 10, 2 / 10]


def test_local_training_of_a_round_has_no_schedule_left() -> None:
    """The step size of a round is not changed twice."""
    own = local_training("step", lr_warmup=2).at_round(8, ROUNDS)
    assert own.lr == LR * DECAY
    assert own.at_round(8, ROUNDS) == own
    rising = local_training(lr_warmup=2).at_round(1, ROUNDS)
    assert rising.lr == LR * 2 / 3
    assert rising.at_round(1, ROUNDS) == rising


def test_text_is_that_of_earlier_versions() -> None:
    """The text is part of the keys of the client cache."""
    later = {"lr_schedule", "lr_step", "lr_warmup", "epochs_min", "epochs_drawn", "stragglers"}
    names = [field.name for field in fields(LocalTraining) if field.name not in later]
    own = local_training("cosine", lr_warmup=2)
    assert repr(own) == f"LocalTraining({', '.join(f'{n}={getattr(own, n)!r}' for n in names)})"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "cosine", "lr_decay": 0.5}, "cosine has no factor: set local.lr_decay=1"),
        ({"schedule": "linear", "lr_step": 4}, "local.lr_step=4 needs local.lr_schedule=step"),
        ({"schedule": "step", "lr_step": None}, "needs local.lr_step, a number of rounds"),
        ({"schedule": "step", "lr_decay": 1.0}, "step needs a factor: set local.lr_decay"),
        ({"schedule": "step", "lr_step": 0}, "lr_step must be at least 1, got 0"),
        ({"lr_warmup": -1}, "lr_warmup must not be negative, got -1"),
    ],
)
def test_keys_that_do_not_fit_the_schedule_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        local_training(**changes)


@pytest.mark.parametrize(
    ("schedule", "equal"),
    [
        (
            ["local.lr_decay=0.5"],
            ["local.lr_schedule=step", "local.lr_decay=0.5", "local.lr_step=1"],
        ),
        ([], ["local.lr_schedule=constant"]),
    ],
)
def test_runs_with_equal_step_sizes_are_bit_identical(
    schedule: list[str], equal: list[str]
) -> None:
    common = ("method=fedcm", "rounds=3", "local.lr=0.2")
    one, other = make_world(*common, *schedule), make_world(*common, *equal)
    assert_same(one.models(one.run()), other.models(other.run()))


def test_run_uses_the_number_of_rounds() -> None:
    """In the last of T rounds, the cosine is that of pi (T - 1) / T."""
    world = make_world("method=fedavg", "rounds=4", "local.lr_schedule=cosine", "local.lr=0.2")
    lr = world.env.at(3).lr
    assert lr == pytest.approx(0.2 * (1 + math.cos(math.pi * 3 / 4)) / 2)
