"""Tests of numbers of local epochs that differ from client to client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.data import POOLED
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob
from fedexp.core.local_training import LocalTraining
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.task import Batch
from fedexp.core.trainer import Adjustment, Ctx, Trainer, elementwise
from fedexp.core.trees import Tree
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from tests.world import World, assert_same, make_data, make_world


def local_training(**changes: Any) -> LocalTraining:
    return replace(
        make_world("method=fedavg").env.local_training, **{"epochs": 1, "steps": None} | changes
    )


def drawn(rounds: int = 100, clients: int = 20, seed: int = 3, **changes: Any) -> list[list[int]]:
    """Return the drawn numbers of epochs, by round and client."""
    own = local_training(**{"epochs": 5, "epochs_min": 2} | changes)
    env = replace(make_world("method=fedavg").env, local_training=own, seed=seed)
    return [
        [env.at(round).draw_epochs(client) for client in range(clients)] for round in range(rounds)
    ]


def test_epochs_are_uniform() -> None:
    counts = Counter(epochs for row in drawn() for epochs in row)
    assert sorted(counts) == [2, 3, 4, 5]
    # The bound is 4 standard deviations of a binomial distribution.
    bound = 4 * (2000 * 0.25 * 0.75) ** 0.5
    assert all(abs(count - 500) < bound for count in counts.values())


def test_epochs_depend_only_on_seed_round_and_client() -> None:
    assert drawn() == drawn() != drawn(seed=4)
    rows = drawn()
    assert rows[0] != rows[1] and len(set(rows[0])) > 1
    once = drawn(epochs_drawn="once")
    assert all(row == once[0] for row in once) and len(set(once[0])) > 1
    assert once != drawn(epochs_drawn="once", seed=4)


def test_only_stragglers_train_less() -> None:
    less = sum(epochs < 5 for row in drawn(stragglers=0.4) for epochs in row)
    share = 0.4 * 3 / 4  # a straggler draws the largest number with probability 1/4
    assert abs(less - 2000 * share) < 4 * (2000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("given", [6, 2, 1])
def test_method_with_longer_training_has_the_same_share(given: int) -> None:
    world = make_world("method=fedavg", "local.epochs=4", "local.epochs_min=1")
    start = world.env.initial_weights()
    for client in range(4):
        usual = world.env.draw_epochs(client)
        assert world.env.job(client, start, {}).local_training.epochs == usual
        longer = replace(world.env.local_training_this_round, epochs=given)
        found = world.env.job(client, start, {}, local_training=longer).local_training.epochs
        assert found == max(1, round(given * usual / 4))


def test_pooled_data_and_fixed_steps_are_not_drawn() -> None:
    world = make_world("method=fedavg", "local.epochs=4", "local.epochs_min=1")
    start = world.env.initial_weights()
    assert {world.env.at(r).job(POOLED, start, {}).local_training.epochs for r in range(20)} == {4}
    steps = replace(world.env.local_training_this_round, epochs=None, steps=7)
    jobs = [world.env.at(r).job(0, start, {}, local_training=steps) for r in range(20)]
    assert all(job.local_training == steps for job in jobs)


def test_range_of_one_number_changes_nothing() -> None:
    common = ("method=scaffold", "rounds=3", "local.epochs=2")
    one, other = make_world(*common), make_world(*common, "local.epochs_min=2")
    assert_same(one.models(one.run()), other.models(other.run()))


def test_clients_with_different_epochs_are_trained_in_one_stack() -> None:
    """The clients have equally many samples, and the stack has their serial results."""
    overrides = ("method=fednova", "local.epochs=5", "local.epochs_min=2")
    world = make_world(*overrides, data=make_data((24, 24, 24, 24)))
    engine = Vectorized(kernel="linear")
    start = world.env.initial_weights()
    jobs = [world.env.job(client, start, {}) for client in range(4)]
    epochs = [job.local_training.epochs for job in jobs]
    assert len(set(epochs)) > 1

    assert engine.split(jobs, world.data) == [[0, 1, 2, 3]]
    stacked, serial = (list(each.map(jobs, world.data)) for each in (engine, Serial()))
    for one, other, wanted in zip(stacked, serial, epochs, strict=True):
        assert one.num_steps == other.num_steps == 3 * (wanted or 0)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9)
        for name, value in one.weights.params.items():
            torch.testing.assert_close(value, other.weights.params[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs_min": 1, "steps": 5}, "local.epochs_min has no effect with local.steps"),
        ({"epochs_min": 0}, r"local.epochs_min must be in \[1, local.epochs\], got 0"),
        ({"epochs_min": 3}, r"must be in \[1, local.epochs\], got 3 with local.epochs=1"),
        ({"epochs_min": 1, "stragglers": 0.0}, r"local.stragglers must be in \(0, 1\], got 0.0"),
        ({"stragglers": 0.5}, "local.epochs_min, the smallest number"),
        ({"epochs_drawn": "once"}, "local.epochs_min, the smallest number"),
    ],
)
def test_keys_that_do_not_fit_uneven_work_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        local_training(**changes)


def test_cache_key_has_the_epochs_of_the_clients_in_the_stack(tmp_path: Path) -> None:
    """The last bits of a result depend on the steps that the other clients take."""
    world = make_world("method=fedavg", "local.epochs=4", data=make_data((24, 24, 24)))
    start = world.env.initial_weights()
    same = [world.env.job(client, start, {}) for client in range(3)]

    def key_of_client_0(epochs: int | None) -> str:
        less = replace(same[2].local_training, epochs=epochs)
        jobs = [*same[:2], replace(same[2], local_training=less)]
        cache = ClientCache(
            Vectorized(kernel="linear"), tmp_path, 1.0, Numerics({}, 1, "cpu", "float64"), "code"
        )
        return cache._keys(jobs, [[0, 1, 2]], world.data)[0]

    assert key_of_client_0(4) != key_of_client_0(3) != key_of_client_0(2)


@dataclass(frozen=True)
class ReadsEpochs(Trainer):
    """A trainer whose loss depends on the number of epochs."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return ctx.task.loss(net, params, buffers, batch, ctx) / (ctx.local_training.epochs or 1)


@dataclass(frozen=True)
class ReadsBatchSize(Trainer):
    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return ctx.task.loss(net, params, buffers, batch, ctx) / ctx.local_training.batch_size


# Trainers whose hook is marked as elementwise, but depends on the client.
@dataclass(frozen=True)
class CorrectsByEpochs(Trainer):
    @elementwise
    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return trees.scale(grad, 1 / (ctx.local_training.epochs or 1))


@dataclass(frozen=True)
class AdjustsByEpochs(Trainer):
    @elementwise
    def adjustment(self, ctx: Ctx) -> Adjustment:
        return Adjustment(gradient=1 / (ctx.local_training.epochs or 1))


def uneven_jobs(trainer: Trainer) -> tuple[World, list[ClientJob]]:
    world = make_world(
        "method=fedavg", "local.epochs=4", "local.epochs_min=1", data=make_data((24, 24, 24, 24))
    )
    start = world.env.initial_weights()
    jobs = [replace(world.env.job(c, start, {}), trainer=trainer) for c in range(4)]
    assert len({job.local_training.epochs for job in jobs}) > 1
    return world, jobs


def test_loss_reads_the_epochs_of_its_own_client() -> None:
    world, jobs = uneven_jobs(ReadsEpochs())
    engine = Vectorized(kernel="vmap", stack=4)
    stacked = list(engine.map(jobs, world.data))
    counts = Counter(job.local_training.epochs for job in jobs)
    together = sum(3 * (epochs or 0) * n for epochs, n in counts.items() if n > 1)
    assert engine.stacked_steps == together
    for one, other in zip(stacked, Serial().map(jobs, world.data), strict=True):
        for name, value in one.weights.params.items():
            torch.testing.assert_close(value, other.weights.params[name], rtol=1e-9, atol=1e-12)


def test_loss_that_reads_other_keys_is_still_stacked() -> None:
    world, jobs = uneven_jobs(ReadsBatchSize())
    engine = Vectorized(kernel="vmap", stack=4)
    list(engine.map(jobs, world.data))
    least = min(job.local_training.epochs or 0 for job in jobs)
    assert engine.stacked_steps >= 4 * 3 * least


@pytest.mark.parametrize("trainer", [CorrectsByEpochs(), AdjustsByEpochs()])
def test_elementwise_hook_that_reads_the_epochs_does_not_pass_unnoticed(trainer: Trainer) -> None:
    world, jobs = uneven_jobs(trainer)
    (result, *_) = Vectorized(stack=4).map(jobs, world.data)
    assert trees.nonfinite(result.weights.params)
