"""A method whose model grows.

In every round, the mean of the clients' models gets more units in each hidden layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.seeds import seed_of
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec, Weights
from fedexp.matching.structure import UnitAxis, structure_of, with_widths


@dataclass(frozen=True)
class Widening(Aggregator):
    """An aggregator that computes the uniform mean and then adds units to it.

    New units have fresh incoming weights, and their outgoing weights are zero. So the
    function of the network stays equal until it is trained further.

    Args:
        more: Number of units that each group gains per round.
    """

    more: int = 1

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True)

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        with_widths(spec, input_shape, {})

    def init(self, env: Env) -> State:
        return {"weights": env.initial_weights()}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return [env.job(client, state["weights"], {}) for client in env.sample()]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        models = [result.weights for result in results]
        spec = models[0].spec
        params = {k: torch.stack([m.params[k] for m in models]).mean(0) for k in models[0].params}
        groups = structure_of(spec, env.input_shape).groups
        grown = with_widths(
            spec, env.input_shape, {group.name: group.size + self.more for group in groups}
        )
        mean = Weights(spec, params, models[0].buffers)
        return {"weights": widened(mean, grown, env.input_shape, seed_of(env.seed, "widen"))}, {}

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["weights"],), "global")


def widened(old: Weights, grown: ModelSpec, input_shape: tuple[int, ...], seed: int) -> Weights:
    """Return a wider network that contains `old` and computes the same function.

    All weights that read new units are zero. The other new entries keep their initial
    values.
    """
    before, after = structure_of(old.spec, input_shape), structure_of(grown, input_shape)
    first = next(iter(old.params.values()))
    start = Weights.init(grown, seed, first.device, first.dtype)

    def placed(name: str, value: Tensor, fresh: Tensor) -> Tensor:
        result = fresh.clone()
        indices = [torch.arange(size) for size in value.shape]
        pairs: list[tuple[UnitAxis, UnitAxis]] = list(
            zip(before.unit_axes.get(name, ()), after.unit_axes.get(name, ()), strict=True)
        )
        for a, b in pairs:
            indices[a.axis][a.positions.flatten()] = b.positions[: len(a.positions)].flatten()
        if value.dim() > 1:
            unread = torch.ones(fresh.shape[1], dtype=torch.bool)
            unread[indices[1]] = False
            result[:, unread] = 0
        if value.dim():
            result[torch.meshgrid(*indices, indexing="ij")] = value
        return result

    params = {name: placed(name, value, start.params[name]) for name, value in old.params.items()}
    buffers = {
        name: placed(name, value, start.buffers[name]) for name, value in old.buffers.items()
    }
    return Weights(grown, params, buffers)
