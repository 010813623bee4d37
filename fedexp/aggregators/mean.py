"""FedAvg and everything that averages.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1. In update form, ``w + sum_i p_i (y_i - w)``, so that every averaging method shares its rounding.
Up: y_i (and the trainer's payload). Down: w (and the trainer's shared trees). Server state: those trees and the server
optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedexp.core import trees
from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class Mean(Aggregator):
    """Sample, train, average the updates in a stream, apply the trainer's half and the server optimizer.

    With weights p_i and normalisers a_i the direction is ``(sum_i p_i a_i) * sum_i p_i u_i / a_i``; a_i = 1 here
    (McMahan et al. 2017), so it is the weighted mean of the updates u_i = y_i - w. Floating buffers are averaged with
    the same weights, counters take their maximum.

    Args:
        weights: ``samples`` (p_i proportional to n_i) or ``uniform`` (1 / m).
    """

    weights: Literal["samples", "uniform"] = "samples"

    averages_updates: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True)

    def cohort(self, env: Env) -> list[int]:
        """Who trains in this round."""
        return env.sample()

    def population(self, env: Env) -> int:
        """N, of whom the cohort is drawn."""
        return env.num_clients

    def weight(self, result: ClientResult) -> float:
        """p_i before normalisation."""
        return float(result.num_examples) if self.weights == "samples" else 1.0

    def normalizer(self, result: ClientResult, env: Env) -> float:
        """a_i of a result."""
        return 1.0

    def init(self, env: Env) -> State:
        start = env.initial_weights()
        return {
            "weights": start,
            "shared": env.trainer.init_shared(start.trainable),
            "server": env.server_optimizer.init(start),
            "evaluated": start,
        }

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        own_start = env.init == "different" and env.first
        return [
            env.job(client, env.initial_weights(client) if own_start else state["weights"], state["shared"])
            for client in self.cohort(env)
        ]

    def update(self, state: State, results: Iterable[ClientResult], env: Env) -> tuple[State, Metrics]:
        old: Weights = state["weights"]
        running = _Running(old)
        norms = (env.trainer.needs | env.server_optimizer.needs | self.needs).update_norms
        for result in results:
            running.add(result, self.weight(result), self.normalizer(result, env), norms)
        if not running.p:  # every sampled client was empty or skipped: the round changes nothing
            return state, {"clients": 0}
        direction, buffers = running.mean()
        stats = running.stats(env, self.population(env))
        server, params, metrics = env.server_optimizer.step(state["server"], old.params, direction, stats)
        weights = Weights(old.spec, params, buffers)
        evaluated = env.server_optimizer.evaluated(server, params)
        payload = {name: trees.scale(tree, 1 / stats.m) for name, tree in running.payload.items()}
        new = {
            "weights": weights,
            "shared": env.trainer.update_shared(state["shared"], payload, stats),
            "server": server,
            "evaluated": weights if evaluated is params else Weights(old.spec, evaluated, buffers),
        }
        return new, {"clients": stats.m, **metrics}

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["evaluated"],), self.delivers)


class _Running:
    """Sums over a round's results, one client at a time: memory does not grow with the number of clients."""

    def __init__(self, old: Weights) -> None:
        self.old = old
        self.p: list[float] = []
        self.a: list[float] = []
        self.tau: list[int] = []
        self.squared_norms: list[float] = []
        self.total: Tree = {}
        self.buffers: Tree = {}
        self.payload: dict[str, Tree] = {}

    def add(self, result: ClientResult, p: float, a: float, norms: bool) -> None:
        update = trees.sub(result.weights.params, self.old.params)
        if not self.p:
            self.total = trees.zeros_like(self.old.params)
            self.buffers = {
                k: torch.zeros_like(v) if v.is_floating_point() else v.clone() for k, v in self.old.buffers.items()
            }
            self.payload = {name: trees.zeros_like(tree) for name, tree in result.payload.items()}
        torch._foreach_add_(list(self.total.values()), list(update.values()), alpha=p / a)
        for name, value in result.weights.buffers.items():
            if value.is_floating_point():
                self.buffers[name].add_(value, alpha=p)
            else:
                torch.maximum(self.buffers[name], value, out=self.buffers[name])
        for name, tree in result.payload.items():
            torch._foreach_add_(list(self.payload[name].values()), list(tree.values()))
        self.p.append(p)
        self.a.append(a)
        self.tau.append(result.num_steps)
        if norms:
            self.squared_norms.append(trees.squared_norm(update) / a**2)

    def mean(self) -> tuple[Tree, Tree]:
        total_p = sum(self.p)
        factor = self.effective / total_p
        frozen = self.old.frozen  # the mean of equal numbers may differ from them in the last bit
        kept = {k: v for k, v in self.old.buffers.items() if k in frozen}
        buffers = {k: v / total_p if v.is_floating_point() else v for k, v in self.buffers.items()} | kept
        return trees.scale(self.total, factor), buffers

    @property
    def effective(self) -> float:
        """``sum_i p_i a_i``: FedNova's effective number of steps; exactly 1 where every a_i is."""
        if all(a == 1.0 for a in self.a):
            return 1.0
        return sum(p * a for p, a in zip(self.p, self.a, strict=True)) / sum(self.p)

    def stats(self, env: Env, N: int) -> RoundStats:
        total_p = sum(self.p)
        return RoundStats(
            round=env.round,
            N=N,
            m=len(self.p),
            lr=env.lr,
            lr_0=env.budget.lr_0,
            p=tuple(p / total_p for p in self.p),
            tau=tuple(self.tau),
            squared_norms=tuple(self.effective**2 * s for s in self.squared_norms),
        )
