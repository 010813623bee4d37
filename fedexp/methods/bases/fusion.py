"""The base of methods that merge a cohort's trained models in one operation.

A cohort is the set of clients that take part in a round. The operation runs once (one
shot) or after every round.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.probe import Probe
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


class FusionState(TypedDict):
    """The state of a fusion: the fused model."""

    weights: Weights


@dataclass(frozen=True)
class OneModel(Aggregator):
    """The base of aggregators that merge models of one architecture into one model.

    The state has the merged model under the key ``weights``.
    """

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True)

    def init(self, env: Env) -> FusionState:
        return {"weights": env.initial_weights()}

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["weights"],), self.delivers)


@dataclass(frozen=True)
class FusionAggregator(OneModel):
    """The base of aggregators that fuse the cohort's models after every round.

    The fused model is a pure function of these models and the probes' results. In the
    first round all clients start from the global model. With ``init=different`` each
    client has its own initialisation instead. In later rounds clients start from the
    fused model.
    """

    def probes(self, env: Env) -> tuple[Probe, ...]:
        """Return the probes that run on every trained model."""
        return ()

    @abstractmethod
    def fuse(self, results: Sequence[ClientResult], env: Env) -> tuple[Weights, Metrics]:
        """Merge the models of the cohort (at least one) into one model.

        Returns:
            The fused model, and the values to log.
        """

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        own_start = env.first and env.init == "different"
        probes = self.probes(env)
        return [
            env.job(
                c,
                env.initial_weights(c) if own_start else self.start_of(c, state, env),
                {},
                probes=probes,
            )
            for c in env.sample()
        ]

    def start_of(self, client: int, state: FusionState, env: Env) -> Weights:
        """Return the model from which a client starts local training.

        It is not used if clients have their own initialisations (first round with
        ``init=different``).
        """
        return state["weights"]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        cohort = list(results)
        # If every sampled client was skipped, the round changes nothing
        if not cohort:
            return state, {"clients": 0}
        weights, metrics = self.fuse(cohort, env)
        return {"weights": weights}, {"clients": len(cohort), **metrics}


def averaged(models: Sequence[Weights]) -> Weights:
    """Average the parameters and floating-point buffers of several models.

    An integer buffer is set to its maximum over the models. Frozen tensors are copied
    from the first model.

    Args:
        models: At least one model. All have the same architecture.
    """
    frozen = models[0].frozen

    def mean(values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        return stacked.mean(0) if stacked.is_floating_point() else stacked.amax(0)

    def over(trees: list[Tree]) -> Tree:
        return {
            k: v if k in frozen else mean([tree[k] for tree in trees]) for k, v in trees[0].items()
        }

    return Weights(
        models[0].spec, over([m.params for m in models]), over([m.buffers for m in models])
    )
