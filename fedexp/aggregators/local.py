"""Local training without communication: the reference point from below, and the ensemble of the same models.

`Local` reports the mean of the clients' accuracies on the whole test set; `Ensemble` combines their outputs (mean of
logits, or of softmax probabilities as in NAFI and PFNM). A client that is not sampled, or has no data, keeps its model;
one that never trained is not part of the outcome.
Server state: one model a client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedexp.core.aggregator import Aggregator, Delivers, Outcome, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.task import Metrics


@dataclass(frozen=True)
class Local(Aggregator):
    """Every client trains its own model on, round after round."""

    delivers: ClassVar[Delivers] = "per_client"
    communicates: ClassVar[bool] = False

    def init(self, env: Env) -> State:
        return {"models": {}}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        models = state["models"]
        return [env.job(c, models.get(str(c)) or env.initial_weights(c), {}) for c in env.sample()]

    def update(self, state: State, results: Iterable[ClientResult], env: Env) -> tuple[State, Metrics]:
        trained = {str(result.client): result.weights for result in results}
        models = {**state["models"], **trained}
        return {"models": dict(sorted(models.items(), key=lambda item: int(item[0])))}, {"clients": len(trained)}

    def outcome(self, state: State) -> Outcome:
        return Outcome(tuple(state["models"].values()), self.delivers, clients=tuple(map(int, state["models"])))


@dataclass(frozen=True)
class Ensemble(Local):
    """The same local models, asked together.

    Args:
        combine: ``logits`` (argmax of the summed logits) or ``probs`` (of the mean softmax probabilities).
    """

    combine: Literal["logits", "probs"] = "logits"

    delivers: ClassVar[Delivers] = "ensemble"
    communicates: ClassVar[bool] = True  # as if members were sent out and collected every round

    def outcome(self, state: State) -> Outcome:
        members = super().outcome(state)
        return Outcome(members.models, self.delivers, combine=self.combine, clients=members.clients)
