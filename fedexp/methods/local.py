"""Local training without communication, the lower baseline.

The result is the mean accuracy of the clients' models on the whole test set. A client
that is not sampled, or has no data, keeps its model. A client that has never trained is
not part of the result.

State:
    Server: one model per client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.weights import Weights


class LocalState(TypedDict):
    """The state of local training: the latest model of each client."""

    models: dict[str, Weights]


@dataclass(frozen=True)
class Local(Aggregator):
    """The aggregator of local training. Clients continue to train their own models."""

    delivers: ClassVar[Delivers] = "local"
    communicates: ClassVar[bool] = False

    def probes(self, env: Env) -> tuple[Probe, ...]:
        """Return the probes that run on every trained model at its client."""
        return ()

    def init(self, env: Env) -> LocalState:
        return {"models": {}}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        models, probes = state["models"], self.probes(env)
        return [
            env.job(c, models.get(str(c)) or env.initial_weights(c), {}, probes=probes)
            for c in env.sample()
        ]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        trained = {str(result.client): result.weights for result in results}
        return {"models": by_client(state["models"], trained)}, {"clients": len(trained)}

    def outcome(self, state: State) -> Outcome:
        return Outcome(
            tuple(state["models"].values()), self.delivers, clients=tuple(map(int, state["models"]))
        )


def by_client(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge two dictionaries by client, in client order. Values of `new` win."""
    return dict(sorted({**old, **new}.items(), key=lambda item: int(item[0])))
