"""A tiny federation in memory, on which every method runs in milliseconds."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedexp.config.compose import compose
from fedexp.core.aggregator import Aggregator
from fedexp.core.data import FederatedData, Partition, Samples
from fedexp.core.engine import Engine
from fedexp.core.env import Env, Sampling, Specs
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.runner import Snapshot, run
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.running.experiment import Experiment
from fedexp.storage.checkpoint import Checkpoint

CPU = torch.device("cpu")


class Softmax(nn.Module):
    """Softmax regression without bias that starts at zero.

    Its training is a convex problem.
    """

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(int(np.prod(input_shape)), num_classes, bias=False)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))


SOFTMAX = {"_target_": "tests.world.Softmax"}
MLP = {"_target_": "fedexp.models.mlp.MLP", "hidden": [8]}


def make_data(
    sizes: Sequence[int] = (20, 12, 17, 9),
    num_classes: int = 3,
    seed: int = 0,
    copies: bool = False,
    images: bool = False,
) -> FederatedData:
    """Return random data of a few clients. Training and test set are the same.

    Args:
        sizes: Number of samples of each client.
        num_classes: Number of classes.
        seed: Seed of the data.
        copies: Whether all clients hold copies of the first client's data. Otherwise
            each client has a separate distribution of the classes.
        images: Whether samples are 8-bit images of shape (1, 4, 4), which are brighter
            the larger their label is. Otherwise they are float64, of shape (1, 2, 2).
    """
    rng = np.random.default_rng(seed)
    xs, ys = [], []
    for number, size in enumerate(sizes):
        rng_c = np.random.default_rng(seed) if copies else rng
        mix = np.ones(num_classes) / num_classes if copies else rng.dirichlet(np.ones(num_classes))
        y = rng_c.choice(num_classes, size, p=mix)
        side = 4 if images else 2
        xs.append(
            rng_c.normal(size=(size, 1, side, side))
            + (0 if copies else number * 0.1)
            + y.reshape(-1, 1, 1, 1)
        )
        ys.append(y)
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys)).long()
    normalisation: dict[str, Any] = {}
    if images:
        x, normalisation = (80 + 40 * x).clamp(0, 255).byte(), {"mean": (0.4,), "std": (0.25,)}
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    partition = Partition.from_lists([np.arange(a, b) for a, b in itertools.pairwise(bounds)])
    samples = Samples(x, y, **normalisation, dtype=torch.float64)
    return FederatedData(samples, partition, samples, num_classes, "synthetic", y.numpy())


@dataclass
class World:
    """One method on one tiny federation."""

    experiment: Experiment
    env: Env
    data: FederatedData

    @property
    def aggregator(self) -> Aggregator:
        return self.experiment.aggregator

    def run(
        self, snapshot: Snapshot | None = None, engine: Engine | None = None, **kwargs: Any
    ) -> Snapshot:
        """Run all remaining rounds and return the last snapshot."""
        snapshot = snapshot or Snapshot(0, self.aggregator.init(self.env))
        for step in run(
            self.aggregator, self.env, engine or Serial(), self.data, snapshot, **kwargs
        ):
            snapshot = step.after
        return snapshot

    def models(self, snapshot: Snapshot) -> list[dict[str, torch.Tensor]]:
        """Return the parameters of the global model, or of each model of the outcome.

        The latter are returned if the state contains no global model.
        """
        if "weights" in snapshot.state:
            return [snapshot.state["weights"].params]
        return [model.params for model in self.aggregator.outcome(snapshot.state).models]


def composed(*overrides: str) -> ResolvedConfig:
    """Return a copy of what `compose` returns, which is cached by its overrides.

    Many tests use the same overrides, and composing takes longer than most of their
    runs.
    """
    return copy.deepcopy(_composed(overrides))


@functools.cache
def _composed(overrides: tuple[str, ...]) -> ResolvedConfig:
    return compose(list(overrides))


def make_world(
    *overrides: str,
    data: FederatedData | None = None,
    model: dict[str, Any] = MLP,
    m: float | None = None,
) -> World:
    """Return the world of the method that `overrides` compose, in float64.

    Args:
        overrides: Overrides of the config. They replace the defaults of this function.
        data: Data, or None for `make_data`.
        model: Config node of the model.
        m: Number of clients per round, or None for the sampling of the config.
    """
    data = data or make_data()
    base = [
        "rounds=3",
        "local.batch_size=8",
        "dtype=float64",
        f"clients={data.partition.num_clients}",
        "model=mlp",
    ]
    keys = {o.partition("=")[0] for o in overrides}
    experiment = Experiment.of(
        composed(*(o for o in base if o.partition("=")[0] not in keys), *overrides)
    )
    data = _served(data, experiment.needs)
    env = experiment.env(data, CPU)
    spec = ModelSpec.of(model, tuple(data.train.x.shape[1:]), data.num_classes)
    clients = data.partition.num_clients
    env = replace(
        env,
        specs=Specs(spec),
        num_classes=data.num_classes,
        input_shape=tuple(data.train.x.shape[1:]),
    )
    if m is not None:
        env = replace(env, sampling=Sampling("fixed", min(m, clients)))
    return World(experiment, env, data)


def _served(data: FederatedData, needs: Needs) -> FederatedData:
    """Return `data` with the proxy and validation samples that a method needs."""
    first = replace(data.train, x=data.train.x[:9] + 0.1, y=data.train.y[:9])
    if needs.proxy and data.proxy is None:
        labels = first.y if needs.proxy_labels else torch.full_like(first.y, -1)
        data = replace(data, proxy=replace(first, y=labels))
    return replace(data, val=first) if needs.validation and data.val is None else data


def resumed(make: Callable[[int], World], rounds: int, folder: Path) -> Snapshot:
    """Run `rounds` rounds, each in a new world that resumes from a checkpoint.

    Args:
        make: Function that makes a world from the number of rounds.
        rounds: Number of rounds.
        folder: Folder of the checkpoints.

    Returns:
        The snapshot after the last round, as loaded from its checkpoint.
    """
    snapshot = None
    for _ in range(rounds):
        world = make(rounds)
        steps = run(world.aggregator, world.env, Serial(), world.data, snapshot)
        after = next(step.after for step in steps if step.ends_round)
        saver = Checkpoint(folder, CPU)
        saver.load()
        saver.save(after, set(after.clients), 0)
        loaded = Checkpoint(folder, CPU).load()
        assert loaded is not None
        snapshot = loaded[0]
    assert snapshot is not None
    return snapshot


def answers(
    engine: Engine, job: ClientJob, weights: Weights, data: FederatedData
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the answers to the probes of `job` on `weights`, without training."""
    (result,) = engine.map([job.asking(weights, job.probes)], data)
    return result.probes


class Backwards(Engine):
    """An engine that executes jobs in reverse order and yields results in job order.

    Each job has a new engine, as if another worker executed it.
    """

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        done = {id(job): next(Serial().map([job], data)) for job in reversed(jobs)}
        yield from (done[id(job)] for job in jobs)


def assert_same(
    a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]], tolerance: float = 0.0
) -> None:
    """Check that models are bit-identical, or equal up to `tolerance` if it is not 0.

    The tolerance is relative and absolute.
    """
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert list(left) == list(right)
        for name in left:
            if tolerance:
                torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(left[name], right[name]), name
