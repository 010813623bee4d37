"""Local training without communication: the reference point from below, and the ensemble of the same models.

`Local` reports the mean of the clients' accuracies on the whole test set; `Ensemble` combines their outputs (mean of
logits, plain as in FedSyn (Eq. 3), by samples or over the members that know a class as in MA-Echo, or of softmax
probabilities as in NAFI and PFNM). A client that is not sampled, or has no data, keeps its model; one that never trained is
not part of the outcome. Server state: one model a client and, for an ensemble with weights, the member's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fedexp.aggregators.average import check_mask, presence, presence_probes
from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec


@dataclass(frozen=True)
class Local(Aggregator):
    """Every client trains its own model on, round after round."""

    delivers: ClassVar[Delivers] = "per_client"
    communicates: ClassVar[bool] = False

    def probes(self, env: Env) -> tuple[Probe, ...]:
        """What is asked about every trained model."""
        return ()

    def init(self, env: Env) -> State:
        return {"models": {}}

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        models = state["models"]
        starts = {c: models.get(str(c)) or env.initial_weights(c) for c in env.sample()}
        return [env.job(c, start, {}, probes=self.probes(env)) for c, start in starts.items()]

    def update(self, state: State, results: Iterable[ClientResult], env: Env) -> tuple[State, Metrics]:
        trained = {str(result.client): result.weights for result in results}
        return {"models": _with(state["models"], trained)}, {"clients": len(trained)}

    def outcome(self, state: State) -> Outcome:
        return Outcome(tuple(state["models"].values()), self.delivers, clients=tuple(map(int, state["models"])))


@dataclass(frozen=True)
class Ensemble(Local):
    """The same local models, asked together.

    Args:
        combine: ``logits`` (argmax of the summed logits), ``samples`` (of their mean with weights n_i / n), ``probs`` (of
            the mean softmax probabilities) or ``masked``: a class's logit is the mean over the members with more than one
            sample of it, 0 where there is none.
    """

    combine: Literal["logits", "samples", "probs", "masked"] = "logits"

    delivers: ClassVar[Delivers] = "ensemble"
    communicates: ClassVar[bool] = True  # as if members were sent out and collected every round

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        check_mask(self.combine, spec, input_shape, "combine", "logits")

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return presence_probes(self.combine, env)

    def init(self, env: Env) -> State:
        return {**super().init(env), "member_weights": {}}

    def update(self, state: State, results: Iterable[ClientResult], env: Env) -> tuple[State, Metrics]:
        cohort = list(results)
        new, metrics = super().update(state, cohort, env)
        weights = {}
        if self.combine == "masked" and cohort:
            weights = {str(r.client): row for r, row in zip(cohort, presence(cohort), strict=True)}
        elif self.combine == "samples":
            weights = {str(r.client): torch.tensor(r.num_examples) for r in cohort}
        return {**new, "member_weights": _with(state["member_weights"], weights)}, metrics

    def outcome(self, state: State) -> Outcome:
        given = state["member_weights"]
        weights = torch.stack([given[client] for client in state["models"]]).float() if given else None
        members = super().outcome(state)
        combine: Literal["logits", "probs"] = "probs" if self.combine == "probs" else "logits"
        return Outcome(members.models, self.delivers, combine, weights, members.clients)


def _with(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Values by client, with those of `new` taking over; in client order."""
    return dict(sorted({**old, **new}.items(), key=lambda item: int(item[0])))
