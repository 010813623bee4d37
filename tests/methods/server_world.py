"""Helpers for rounds of methods whose server trains, one step of the run at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fedexp.core.aggregator import State
from fedexp.core.jobs import ClientResult
from fedexp.core.runner import Snapshot, run
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from fedexp.storage.checkpoint import Checkpoint
from tests.world import CPU, World


def models_near(start: Weights, count: int, distance: float = 0.3) -> list[Weights]:
    """Return `count` models around `start`."""
    made = []
    for number in range(count):
        random = torch.Generator().manual_seed(number)
        moved = {
            name: value + distance * torch.randn(value.shape, generator=random, dtype=value.dtype)
            for name, value in start.params.items()
        }
        made.append(Weights(start.spec, moved, start.buffers))
    return made


def round_of(
    world: World, models: list[Weights], sizes: list[int] | None = None
) -> tuple[State, list[Metrics]]:
    """Run the first round, in which clients returned `models`.

    Returns:
        The state after it, and the metrics of each of its steps.
    """
    aggregator = world.aggregator
    state = aggregator.init(world.env)
    sizes = sizes or [10] * len(models)
    results = [
        ClientResult(c, m, n, 1, {}, None, {})
        for c, (m, n) in enumerate(zip(models, sizes, strict=True))
    ]
    state, metrics = aggregator.update(state, results, world.env)
    logged = [metrics]
    while aggregator.position(state, 0)[0] == 0:
        state, metrics = aggregator.update(
            state, [], world.env.at(0, aggregator.position(state, 0)[1])
        )
        logged.append(metrics)
    return state, logged


def stored_after_every_step(world: World, folder: Path) -> Snapshot:
    """Run to the end, and continue every step from the stored last step."""
    snapshot = None
    while True:
        step = next(run(world.aggregator, world.env, Serial(), world.data, snapshot), None)
        if step is None:
            assert snapshot is not None
            return snapshot
        saver = Checkpoint(folder, CPU)
        saver.load()
        saver.save(step.after, set(step.after.clients), 0)
        loaded = Checkpoint(folder, CPU).load()
        assert loaded is not None
        snapshot = loaded[0]


def module_of(weights: Weights) -> nn.Module:
    """Return the network as a torch module in training mode, with gradients."""
    return weights.module().train()
