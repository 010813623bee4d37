"""The ensemble of the clients' local models: the baseline that combines outputs.

Update:
    The ensemble's output is a mean of the members' logits or softmax probabilities. The
    mean of logits is plain (FedSyn, Eq. 3), weighted by samples, or taken for each
    class over the members that have the class (MA-Echo). The mean of softmax
    probabilities is that of NAFI and PFNM. A client that is not sampled, or has no
    data, keeps its model. A client that has never trained is not a member.

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
    """The state of an ensemble: the members, and their weights (if any) by client."""

    member_weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Ensemble(Local):
    """The local models as one ensemble.

    Args:
        combine: ``logits`` (argmax of the summed logits), ``samples`` (argmax of the
            logits' mean with weights n_i / n), ``probs`` (argmax of the mean softmax
            probabilities) or ``masked``. With ``masked`` a class's logit is the mean
            over the members with more than one sample of this class, and 0 if there is
            no such member.
    """

    combine: Literal["logits", "samples", "probs", "masked"] = "logits"

    delivers: ClassVar[Delivers] = "ensemble"
    # Bytes are counted as if members were sent out and collected in every round
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
