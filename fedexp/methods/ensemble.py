"""The ensemble of the clients' local models: the baseline that combines outputs.

Update:
    The ensemble's output is a mean of the members' logits or softmax probabilities. A
    mean of logits is one of three: a plain mean (FedSyn, Eq. 3), a mean weighted by
    numbers of samples, or for each class the mean over the members that have the class
    (MA-Echo). NAFI and PFNM use the plain mean of softmax probabilities.

    The members are the latest models of all clients that have trained so far. A client
    that is not sampled in a round, or has no data, keeps its model.

State:
    Server: one model per client. With ``combine=samples`` also one weight per client.
    With ``combine=masked`` also one weight per client and class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from fedexp.core.aggregator import State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.weights import ModelSpec
from fedexp.methods.bases.output_layer import check_mask, presence, presence_probes
from fedexp.methods.local import Local, LocalState, by_client


class EnsembleState(LocalState):
    """The state of an ensemble: the members' models and weights, by client.

    `member_weights` is empty if members are not weighted.
    """

    member_weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ensemble(Local):
    """The aggregator whose result is the ensemble of the clients' local models.

    Args:
        combine: The output whose argmax is the prediction. ``logits``: the mean of the
            logits. ``samples``: the mean of the logits with weights n_i / n, where
            client i has n_i of the members' n samples. ``probs``: the mean of the
            softmax probabilities. ``masked``: for each class the mean of the logits
            over the members with more than one sample of the class, or 0 if there is no
            such member.
    """

    combine: Literal["logits", "samples", "probs", "masked"] = "logits"

    delivers: ClassVar[Delivers] = "ensemble"
    # Traffic is counted as if the server sent and received models in every round
    communicates: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(sample_counts=self.combine == "samples", class_counts=self.combine == "masked")

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        check_mask(self.combine, spec, input_shape, "combine", "logits")

    def probes(self, env: Env) -> tuple[Probe, ...]:
        return presence_probes(self.combine, env)

    def init(self, env: Env) -> EnsembleState:
        return {**super().init(env), "member_weights": {}}

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        cohort = list(results)
        new, metrics = super().update(state, cohort, env)
        weights = {}
        if self.combine == "masked" and cohort:
            weights = {str(r.client): row for r, row in zip(cohort, presence(cohort), strict=True)}
        elif self.combine == "samples":
            weights = {str(r.client): torch.tensor(r.num_examples) for r in cohort}
        return {**new, "member_weights": by_client(state["member_weights"], weights)}, metrics

    def outcome(self, state: State) -> Outcome:
        given = state["member_weights"]
        weights = (
            torch.stack([given[client] for client in state["models"]]).float() if given else None
        )
        return replace(
            super().outcome(state),
            combine="probs" if self.combine == "probs" else "logits",
            weights=weights,
        )
