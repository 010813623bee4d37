"""The base of aggregators that average updates.

It samples clients, merges their updates and applies the server optimizer. Then it
applies the trainer's server half (`Trainer.update_shared`). The server half updates the
shared trees, which are tensors that the server broadcasts with the model.

Communication:
    Up: the trained model y_i and the trainer's payload (what it sends besides the
    model). Down: the global model w and the trainer's shared trees.

State:
    Server: w, the trainer's shared trees and the server optimizer's state.

Logged:
    ``server/NAME``, the norm of the shared tree NAME, for each shared tree that the
    trainer changes. ``server/factor`` if the method overrides `Averaging.factor`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from fedexp.core import trees
from fedexp.core.aggregator import Aggregator, State
from fedexp.core.env import Env
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.needs import Needs
from fedexp.core.outcome import Outcome
from fedexp.core.result_check import check_payload, check_shares, check_tree, is_users
from fedexp.core.task import Metrics
from fedexp.core.trainer import RoundStats, ServerUpdate, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import Weights


class AveragingState(TypedDict):
    """The state of a method that averages.

    Args:
        weights: The global model.
        shared: The trainer's shared trees, which the server broadcasts.
        server: The state of the server optimizer.
        evaluated: The model that is evaluated. It differs from `weights` if the server
            optimizer averages its iterates.
    """

    weights: Weights
    shared: Trees
    server: State
    evaluated: Weights


@dataclass(frozen=True)
class Averaging(Aggregator):
    """An aggregator that merges the clients' updates into one.

    It samples clients, sends them the global model w and receives their trained models
    y_i. The updates are u_i = y_i - w. A derived class merges the quotients u_i / a_i,
    where a_i is the client's `normalizer`. The merged update times `factor` is the
    direction that the server optimizer gets. Finally the trainer's server half runs.

    `fedexp.methods.fedavg.Mean` merges each update as it arrives. `Collecting` merges
    all updates of the cohort at once. Floating-point buffers are averaged with the
    weights p_i. An integer buffer is set to its maximum over the clients.

    Args:
        weights: Weights p_i of the m clients: ``samples`` (p_i proportional to the
            number of samples n_i) or ``uniform`` (1 / m).
    """

    weights: Literal["samples", "uniform"] = "samples"

    @property
    def needs(self) -> Needs:
        return Needs(same_architecture=True, sample_counts=self.weights == "samples")

    @property
    def averages_updates(self) -> bool:
        return True

    def cohort(self, env: Env) -> list[int]:
        """Return the clients that train in this round."""
        return env.sample()

    def population(self, env: Env) -> np.ndarray:
        """Return the sizes by which clients are sampled.

        Returns:
            Number of training samples of every client, shape (clients,), int64. A
            client of size 0 is never sampled.
        """
        return env.sizes

    def weight(self, num_examples: int) -> float:
        """Return a client's weight p_i before normalisation."""
        return float(num_examples) if self.weights == "samples" else 1.0

    def normalizer(self, result: ClientResult, env: Env) -> float:
        """Return the normaliser a_i of a client's result."""
        return 1.0

    @abstractmethod
    def add(self, merging: Any, update: Tree, p: float, a: float) -> Any:
        """Add the update u_i of one more client to `merging`, in job order.

        Args:
            merging: The last result of `add`, None before the first client.
            update: The update u_i.
            p: Weight p_i before normalisation.
            a: Normaliser a_i.

        Returns:
            `merging` with the update. `merged` turns the last result into one update.
        """

    def shares(self, merging: Any, p: Sequence[float]) -> Sequence[float]:
        """Return the weights with which the updates enter the merged update.

        Divided by their sum, they are ``RoundStats.p``. A rule that does not weigh by
        p_i overrides this method. Otherwise trainers and server optimizers compute with
        clients that the rule has rejected.

        Args:
            merging: The last result of `add`, which ran for at least one client.
            p: Weights p_i as `add` received them.
        """
        return p

    @abstractmethod
    def merged(self, merging: Any, p: Sequence[float]) -> Tree:
        """Return the merged update of the cohort.

        It merges the quotients u_i / a_i of updates and normalisers.

        Args:
            merging: The last result of `add`, which ran for at least one client.
            p: Weights that `shares` returned.
        """

    def factor(self, merged: Tree, stats: RoundStats, env: Env) -> float:
        """Return the factor of the merged update.

        The merged update times this factor is the direction that the server optimizer
        gets. ``stats.squared_norms`` are the squared norms of the quotients u_i / a_i.
        """
        return 1.0

    def init(self, env: Env) -> AveragingState:
        start = env.initial_weights()
        return {
            "weights": start,
            "shared": env.trainer.init_shared(start.trainable),
            "server": env.server_optimizer.init(start),
            "evaluated": start,
        }

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        own_start = env.first and (env.init == "different" or len(env.specs.distinct) > 1)
        return [
            env.job(
                client,
                env.initial_weights(client) if own_start else state["weights"],
                state["shared"],
            )
            for client in self.cohort(env)
        ]

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        old: Weights = state["weights"]
        averages_payloads = type(env.trainer).update_shared is not Trainer.update_shared
        seen, merging = _Seen(old, env.trainer if averages_payloads else None), None
        norms = (env.trainer.needs | env.server_optimizer.needs | self.needs).update_norms

        for result in results:
            p, a = self.weight(result.num_examples), self.normalizer(result, env)
            update = trees.sub(result.weights.params, old.params)
            merging = self.add(merging, update, p, a)
            seen.add(result, p, 1.0 if env.trainer.payload_weights == "uniform" else p)
            if norms:
                seen.squared_norms.append(trees.squared_norm(update) / a**2)
            # Free the update while the next client trains
            del update

        # If every sampled client had no data or was skipped, the round changes nothing
        if not seen.p:
            return state, {"clients": 0}

        shares = self.shares(merging, seen.p)
        if is_users(self):
            check_shares(shares, len(seen.p), self, ("shares", "weight"))
        direction = self.merged(merging, shares)
        stats = seen.stats(env, *self._whole(env), shares)
        if is_users(self):
            check_tree(direction, old.params, "the merged update", self, ("merge", "merged", "add"))
        factor = self.factor(direction, stats, env)
        if factor != 1.0:
            direction = trees.scale(direction, factor)
            stats = replace(stats, squared_norms=tuple(factor**2 * s for s in stats.squared_norms))

        server, params, logged = env.server_optimizer.step(
            state["server"], old.params, direction, stats
        )
        if is_users(env.server_optimizer):
            check_tree(params, old.params, "the new model", env.server_optimizer, ("step",))
        metrics: Metrics = {"clients": stats.m, **logged}
        weights = Weights(old.spec, params, seen.buffers())
        evaluated = env.server_optimizer.evaluated(server, params)

        if type(self).factor is not Averaging.factor:
            metrics["server/factor"] = factor

        shared = state["shared"]
        if averages_payloads:
            live, applied = old.trainable, trees.sub(params, old.params)
            step = ServerUpdate({k: direction[k] for k in live}, {k: applied[k] for k in live})
            shared = env.trainer.update_shared(shared, seen.payload(), step, stats)
            metrics |= {
                f"server/{name}": _length(tree)
                for name, tree in shared.items()
                if tree is not state["shared"].get(name)
            }

        return AveragingState(
            weights=weights,
            shared=shared,
            server=server,
            evaluated=weights
            if evaluated is params
            else Weights(old.spec, evaluated, weights.buffers),
        ), metrics

    def _whole(self, env: Env) -> tuple[int, float]:
        """Return the number N of clients that may take part, and the sum of their p_i.

        The weights p_i are those before normalisation. N may be millions. The sum
        therefore has one term per distinct number of samples, not one per client.
        """
        # Number of clients of each size
        clients = np.bincount(self.population(env))
        sizes = [n for n in np.flatnonzero(clients).tolist() if n]
        return int(clients[1:].sum()), sum(self.weight(n) * int(clients[n]) for n in sizes)

    def outcome(self, state: State) -> Outcome:
        return Outcome((state["evaluated"],), self.delivers)


@dataclass(frozen=True)
class Collecting(Averaging):
    """An aggregator that needs all updates of the cohort at once, such as a median.

    Memory grows with the cohort.
    """

    @abstractmethod
    def merge(self, updates: Sequence[Tree], p: Sequence[float]) -> Tree:
        """Merge the updates of the cohort into one update.

        Args:
            updates: The quotients u_i / a_i of updates and normalisers, at least one,
                in job order.
            p: Weights that `shares` returned, divided by their sum.
        """

    def add(self, merging: Any, update: Tree, p: float, a: float) -> list[Tree]:
        return [*(merging or []), update if a == 1.0 else trees.scale(update, 1 / a)]

    def merged(self, merging: Any, p: Sequence[float]) -> Tree:
        total = sum(p)
        return self.merge(merging, [each / total for each in p])


def _floating(tree: Tree) -> Tree:
    """Return the floating-point tensors of a tree, without integer counters."""
    return {name: value for name, value in tree.items() if value.is_floating_point()}


def _length(tree: Tree) -> float:
    """Return the Euclidean norm of a tree's floating-point tensors, taken together."""
    return math.sqrt(trees.squared_norm(_floating(tree)))


@dataclass
class _Seen:
    """Values that the server collects from the clients' results as they arrive.

    They are the weights p_i before normalisation, the numbers of local steps tau_i, the
    squared norms of the quotients u_i / a_i, and the sums of buffers and payloads.

    Args:
        old: The model that the clients received.
        trainer: The trainer, or None if it does not use the mean of the payloads.
    """

    old: Weights
    trainer: Trainer | None
    p: list[float] = field(default_factory=list)
    tau: list[int] = field(default_factory=list)
    squared_norms: list[float] = field(default_factory=list)
    buffer_sums: Tree = field(default_factory=dict)
    payload_sums: dict[str, Tree] = field(default_factory=dict)
    payload_weight: float = 0.0

    def add(self, result: ClientResult, p: float, payload_weight: float) -> None:
        if not self.p:
            self.buffer_sums = {
                **trees.clone(self.old.buffers),
                **trees.zeros_like(_floating(self.old.buffers)),
            }
            if self.trainer is not None:
                self.payload_sums = {
                    name: trees.zeros_like(tree) for name, tree in result.payload.items()
                }

        if self.buffer_sums:
            self._add_buffers(result.weights.buffers, p)

        if self.trainer is not None:
            check_payload(result.payload, self.payload_sums, result.client, self.trainer)
        for name, sums in self.payload_sums.items():
            if sums:
                values = trees.tensors(result.payload[name], sums)
                torch._foreach_add_(trees.tensors(sums), values, alpha=payload_weight)

        self.payload_weight += payload_weight
        self.p.append(p)
        self.tau.append(result.num_steps)

    def _add_buffers(self, buffers: Tree, p: float) -> None:
        sums, values = _floating(self.buffer_sums), _floating(buffers)
        if sums:
            torch._foreach_add_(trees.tensors(sums), trees.tensors(values, sums), alpha=p)
        counts = {name: value for name, value in self.buffer_sums.items() if name not in sums}
        for names in trees.by_dtype(counts):
            own, new = [counts[name] for name in names], [buffers[name] for name in names]
            if own[0].dtype == torch.bool:
                # CUDA has no fused maximum of booleans
                own, new = ([value.view(torch.uint8) for value in part] for part in (own, new))
            torch._foreach_maximum_(own, new)

    def buffers(self) -> Tree:
        total = sum(self.p)
        # Copy frozen buffers, because the mean of equal numbers may differ from these
        # numbers in the last bit
        frozen = self.old.frozen
        frozen_buffers = {k: v for k, v in self.old.buffers.items() if k in frozen}
        sums = _floating(self.buffer_sums)
        means = torch._foreach_div(trees.tensors(sums), total) if sums else ()
        return {**self.buffer_sums, **dict(zip(sums, means, strict=True)), **frozen_buffers}

    def payload(self) -> dict[str, Tree]:
        return {
            name: trees.scale(tree, 1 / self.payload_weight) if tree else {}
            for name, tree in self.payload_sums.items()
        }

    def stats(self, env: Env, N: int, whole: float, p: Sequence[float]) -> RoundStats:
        """Return the statistics of the round.

        Args:
            env: The environment at this step.
            N: Number of clients that may take part.
            whole: Sum of the weights p_i of these N clients, before normalisation.
            p: Weights of the updates in the merged update, before normalisation.
        """
        total = sum(p)
        return RoundStats(
            round=env.round,
            N=N,
            m=len(self.p),
            share=sum(self.p) / whole,
            lr=env.lr,
            lr_0=env.local_training.lr,
            p=tuple(each / total for each in p),
            tau=tuple(self.tau),
            squared_norms=tuple(self.squared_norms),
        )
