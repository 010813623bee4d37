"""Local training without communication: the baseline from below.

`Local` reports the mean of the clients' accuracies on the whole test set. A client that is not sampled, or has no data, keeps
its model; one that never trained is not part of the outcome. Server state: one model a client.
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
    """The state of local training: by client, the latest model."""

    models: dict[str, Weights]


@dataclass(frozen=True)
class Local(Aggregator):
    """Every client trains its own model on, round after round."""

    delivers: ClassVar[Delivers] = "local"
    communicates: ClassVar[bool] = False

    def probes(self, env: Env) -> tuple[Probe, ...]:
        """What is asked about every trained model."""
        return ()

    def init(self, env: Env) -> LocalState:
        return {"models": {}}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        models = state["models"]
        starts = {c: models.get(str(c)) or env.initial_weights(c) for c in env.sample()}
        return [env.job(c, start, {}, probes=self.probes(env)) for c, start in starts.items()]

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
    """Values by client, with those of `new` taking over; in client order."""
    return dict(sorted({**old, **new}.items(), key=lambda item: int(item[0])))
