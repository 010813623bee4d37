"""An aggregator that stores the last K models of every client and delivers their mean.

Communication: A client sends y_i. The server sends the mean.

State: The server keeps the mean and references to K models per client. These models
need not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedexp.core import trees
from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.stored_weights import StoredWeights
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class KeepLast(Aggregator):
    """An aggregator that delivers the mean of the last K models of every client.

    A step adds new models to the sum and subtracts dropped ones. So it reads only the
    models that it drops.

    Args:
        K: Number of stored models per client.
    """

    K: int = 2

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True)

    def init(self, env: Env) -> State:
        return {"weights": env.initial_weights(), "kept": {}}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return [env.job(client, state["weights"], {}) for client in env.sample()]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        old: Weights = state["weights"]
        kept: dict[str, list[StoredWeights]] = dict(state["kept"])
        total = trees.scale(old.params, sum(map(len, kept.values())))
        for result in results:
            models = [*kept.get(str(result.client), []), env.store(result.weights)]
            total = trees.add(total, result.weights.params)
            if len(models) > self.K:
                total = trees.sub(total, models.pop(0).load().params)
            kept[str(result.client)] = models
        count = sum(map(len, kept.values()))
        mean = Weights(old.spec, trees.scale(total, 1 / count), old.buffers)
        return {"weights": mean, "kept": kept}, {"kept": count}

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["weights"],), self.delivers)
