"""A method whose round has several steps.

In step 0, clients train the model, and the server averages. In step 1, which has no
clients, hidden layer 0 gets `grow` more units. Their outgoing weights are zero, so the
function does not change. In step 2, clients train all layers above hidden layer 0 for
one epoch, while this layer is frozen. The server averages again.

The method needs `Aggregator.position`, local training that a job sets, parameters that
a job freezes, and widths as data (`with_widths`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights
from fedexp.matching.structure import with_widths

STEPS = 3
FROZEN = frozenset({"hidden.0.weight", "hidden.0.bias"})


@dataclass(frozen=True)
class Layerwise(Aggregator):
    """An aggregator with three steps per round.

    Args:
        grow: Number of units that hidden layer 0 of an MLP gains in a round.
    """

    grow: int = 2

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True)

    def position(self, state: State, step: int) -> tuple[int, int]:
        return divmod(step, STEPS)

    def init(self, env: Env) -> State:
        return {"weights": env.initial_weights()}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        if env.step == 1:
            return []
        clients, start = env.sample(), state["weights"]
        if env.step == 0:
            return [env.job(c, start, {}) for c in clients]
        return [
            env.job(
                c,
                start,
                {},
                frozen=FROZEN,
                local_training=replace(env.local_training_this_round, epochs=1),
            )
            for c in clients
        ]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        if env.step == 1:
            grown = widened(state["weights"], self.grow, env)
            return {"weights": grown}, {"layerwise/width": len(grown.params["hidden.0.bias"])}
        models = [result.weights for result in results]
        mean = {
            name: torch.stack([m.params[name] for m in models]).mean(0) for name in models[0].params
        }
        return {"weights": Weights(models[0].spec, mean, models[0].buffers)}, {
            "clients": len(models)
        }

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["weights"],), self.delivers)


def widened(old: Weights, grow: int, env: Env) -> Weights:
    """Return `old` with `grow` more units in hidden layer 0.

    The incoming weights of the new units are those of a new network.
    """
    width = len(old.params["hidden.0.bias"]) + grow
    spec = with_widths(old.spec, env.input_shape, {"hidden.0.weight": width})
    fresh = Weights.init(spec, env.seed + env.round, env.device, env.dtype)
    params = {}
    for name, drawn in fresh.params.items():
        before = old.params[name]
        # The outgoing weights of the new units are zero.
        value = torch.zeros_like(drawn) if name == "hidden.1.weight" else drawn
        value[tuple(slice(0, size) for size in before.shape)] = before
        params[name] = value
    return Weights(spec, params, fresh.buffers)
