"""Traffic and state of a method, counted in the first step of its first client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedexp.core.data import FederatedData
from fedexp.core.runner import Snapshot, env_of, next_jobs, run
from fedexp.core.trees import Tree, num_bytes
from fedexp.core.weights import Weights
from fedexp.data.dataset import Dataset
from fedexp.data.federated import Division, federate
from fedexp.engines.serial import Serial
from fedexp.running.experiment import Experiment

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Counted:
    """The sizes of a method's traffic and state, in bytes.

    Args:
        model: Size of the model that the client receives.
        down: Sizes of the trees (tensors by name) that the server sends to the client
            besides the model, by the tree's name. In a run, the metric ``bytes/down``
            counts these trees and the model.
        up: Sizes of the trees that the client sends to the server besides the model, by
            the tree's name. In a run, the metric ``bytes/up`` counts these trees and
            the model.
        client: Sizes of the client's state after the step.
        server: Sizes of the server's state before the step.
    """

    model: int
    down: Mapping[str, int]
    up: Mapping[str, int]
    client: Mapping[str, int]
    server: Mapping[str, int]


def first_step(experiment: Experiment) -> Counted:
    """Train the first client of `experiment` in its first job, and return the sizes.

    No file is written.
    """
    data = _data(experiment.dataset, experiment.division)
    env = experiment.env(data, _CPU)
    now = Snapshot(0, experiment.aggregator.init(env))
    job = next_jobs(experiment.aggregator, env_of(experiment.aggregator, env, now), now)[0]
    (result,) = Serial().map([job], data)
    return Counted(
        model=num_bytes(job.start.params) + num_bytes(job.start.buffers),
        down=_of(job.shared),
        up=_of({**result.payload, **result.probes}),
        client=_of(result.state or {}),
        server=_of(_trees(now.state, "", set())),
    )


def logged(experiment: Experiment) -> list[str]:
    """Run the first round of `experiment`, and return the names of its metrics.

    No file is written.
    """
    data = _data(experiment.dataset, experiment.division)
    names: dict[str, None] = {}
    for step in run(experiment.aggregator, experiment.env(data, _CPU), Serial(), data):
        names |= dict.fromkeys(step.metrics)
        if step.ends_round:
            break
    return list(names)


@lru_cache(maxsize=8)
def _data(dataset: Dataset, division: Division) -> FederatedData:
    """Return the data after the split.

    The result is cached, and methods with the same split and server data share it. It
    must be possible to load `dataset` without files.
    """
    return federate(
        dataset, division, root=Path(), download=False, device=_CPU, dtype=torch.float32
    )


def _of(trees: Mapping[str, Tree]) -> dict[str, int]:
    return {name: size for name, tree in trees.items() if (size := num_bytes(tree))}


def _trees(state: Any, name: str, seen: set[int]) -> dict[str, Tree]:
    """Return the trees (mappings of tensors by name) of a nested state, by dotted key.

    Args:
        state: State of an aggregator.
        name: Dotted key of `state`, "" at the top.
        seen: Python IDs of the tensors that are already in a tree. The call adds the
            IDs of the tensors that it returns, so each tensor is counted once.
    """
    if isinstance(state, Weights):
        state = {**state.params, **state.buffers}
    elif isinstance(state, Tensor):
        state = {name: state}
    if not isinstance(state, dict):
        return {}
    if all(isinstance(value, Tensor) for value in state.values()):
        own = {key: value for key, value in state.items() if id(value) not in seen}
        seen |= {id(value) for value in own.values()}
        return {name: own}
    found: dict[str, Tree] = {}
    for key, value in state.items():
        found |= _trees(value, f"{name}.{key}" if name else key, seen)
    return found
