"""The base of methods whose server trains on its own data between two rounds.

The server's data are called proxy data. In a round's first step the clients train, and
FedAvg averages their models. Each further step is a stage, a number of optimizer steps
on the server. A killed run resumes at the start of a stage. If the config asks for a
trace, the model after each stage is evaluated under the name ``student``.

State:
    Server: FedAvg's state. Within a round also `work`, the state of server training.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative
from fedexp.core.data import Samples
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import StepNoise
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.outcome import Outcome
from fedexp.core.seeds import seed_of
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights, by_spec
from fedexp.methods.bases.averaging import AveragingState
from fedexp.methods.fedavg import Mean
from fedexp.server_training.batches import batches, on_device

network = by_spec(Net)
"""Function ``network(spec, device, dtype)`` that returns a network of the server.

Networks are cached by these arguments. A cached network is in the mode of its last use,
training or evaluation.
"""

Part = tuple[int, Tensor, Tensor]
"""A batch of proxy data.

The tuple contains the number of the optimizer step in the round (from 0), the indices
of the proxy samples (b,) and the inputs (b, ...).
"""


class ServerTrainedState(AveragingState):
    """The state of FedAvg, and how far server training has come.

    Args:
        round: Number of finished rounds.
        stage: Number of finished steps in the round.
        work: The state of server training within a round, empty between rounds.
    """

    round: int
    stage: int
    work: State


@dataclass(frozen=True)
class ServerTrained(Mean):
    """The base of aggregators that train the mean of clients' models on proxy data.

    `first_step` computes the mean. A derived class may override it. With FedAvg's
    `first_step` and no optimizer steps, a method equals FedAvg bit-exactly.

    Args:
        steps: Optimizer steps of server training per round, or None. Exactly one of
            `steps` and `epochs` must be set.
        epochs: Passes over the proxy data per round, or None.
        batch_size: Batch size of proxy data.
    """

    trains_on_server: ClassVar[bool] = True

    steps: int | None = None
    epochs: int | None = 20
    batch_size: int = 128

    def __post_init__(self) -> None:
        require(
            (self.steps is None) != (self.epochs is None),
            "set one of steps and epochs, and the other one to null",
        )
        require_not_negative(self, "steps", "epochs")
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(proxy=True)

    def collect(
        self, results: Iterable[ClientResult], start: Weights, collected: State, env: Env
    ) -> Iterator[ClientResult]:
        """Yield the clients' results unchanged, and store what server training needs.

        By default nothing is stored.

        Args:
            results: The stream of results.
            start: The global model w^t that the clients received.
            collected: Dictionary that this method fills. A missing key is created with
                an empty list.
            env: The environment at this step.
        """
        yield from results

    def first_step(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        """Take FedAvg's step.

        Server training starts from the entry ``weights`` of the returned state.
        """
        return super().update(state, results, env)

    @abstractmethod
    def begin(self, collected: State, start: Weights, mean: Weights, env: Env) -> State:
        """Return the state of server training for this round.

        Args:
            collected: The dictionary that `collect` filled.
            start: The global model w^t that the clients received.
            mean: The model that server training starts from.
            env: The environment at this step.
        """

    @abstractmethod
    def train(
        self, weights: Weights, work: State, net: Net, parts: Iterator[Part], env: Env
    ) -> tuple[Weights, State, Metrics]:
        """Take one optimizer step for each batch of `parts`.

        Args:
            weights: The model.
            work: The state of server training.
            net: The server's network in training mode. Its random layers use the noise
                of the current step.
            parts: Batches of proxy data.
            env: The environment at this step.

        Returns:
            The model, the new `work` and the values to log.
        """

    def stopped(self, work: State) -> bool:
        """Return whether server training ends before all of its steps were taken."""
        return False

    def end(self, weights: Weights, work: State, env: Env) -> Weights:
        """Return the global model of the round, given the trained model `weights`."""
        return weights

    def total(self, env: Env) -> int:
        """Return the number of optimizer steps of server training per round."""
        return env.server_steps(
            (self.epochs or 0) * self.pass_length(env) if self.steps is None else self.steps
        )

    def pass_length(self, env: Env) -> int:
        """Return the number of batches of one pass over the proxy data."""
        return -(-len(proxy_of(env)) // self.batch_size)

    def steps_per_stage(self, env: Env) -> int:
        """Return the number of optimizer steps per stage.

        By default a stage is one pass over the proxy data.
        """
        return self.pass_length(env)

    def init(self, env: Env) -> ServerTrainedState:
        has_batch_norm = network(env.server_spec, env.device, env.dtype).has_batch_norm

        if has_batch_norm and len(proxy_of(env)) < 2:
            raise ConfigError(
                "BatchNorm cannot compute statistics of one sample, and the server has one",
                where="proxy.size",
                expected="2 samples or more",
                got=len(proxy_of(env)),
            )

        # `_parts` leaves out batches of one sample, so nothing would be trained
        if has_batch_norm and self.batch_size == 1 and self.total(env):
            raise ConfigError(
                "BatchNorm needs more than one sample, "
                "and every batch of proxy data would have only one",
                where="aggregator.batch_size",
                expected="2 or more",
                got=1,
                do="raise aggregator.batch_size, or choose a model without BatchNorm",
            )

        return {**super().init(env), "round": 0, "stage": 0, "work": {}}

    def position(self, state: State, step: int) -> tuple[int, int]:
        return state["round"], state["stage"]

    def plan(self, state: State, env: Env) -> list[ClientJob]:
        return [] if env.step else super().plan(state, env)

    def update(
        self, state: State, results: Iterable[ClientResult], env: Env
    ) -> tuple[State, Metrics]:
        if env.step:
            return self._stage(state, env)
        collected: State = defaultdict(list)
        start: Weights = state["weights"]
        stream = self.collect(results, start, collected, env) if self.total(env) else results
        new, metrics = self.first_step(state, stream, env)
        if not metrics["clients"] or not self.total(env):
            return {**new, "round": env.round + 1, "stage": 0, "work": {}}, metrics
        work = {"taken": 0, **self.begin(collected, start, new["weights"], env)}
        return {**new, "round": env.round, "stage": 1, "work": work}, metrics

    def _stage(self, state: State, env: Env) -> tuple[State, Metrics]:
        taken = state["work"]["taken"]
        until = min(taken + self.steps_per_stage(env), self.total(env))
        net = network(env.server_spec, env.device, env.dtype).train()

        try:
            parts = self._parts(taken, until, net, env)
            weights, work, metrics = self.train(state["weights"], state["work"], net, parts, env)
        finally:
            net.set_noise(None)
            net.release()

        work = {**work, "taken": until}
        over = until == self.total(env) or self.stopped(work)
        if over:
            weights = self.end(weights, work, env)

        if env.trace.wants(env.step):
            env.trace(env.step, {"student": Outcome((weights,), self.delivers)}, values=metrics)

        where = (
            {"round": env.round + 1, "stage": 0, "work": {}}
            if over
            else {"stage": env.step + 1, "work": work}
        )

        return {**state, "weights": weights, "evaluated": weights, **where}, metrics

    def _parts(self, taken: int, until: int, net: Net, env: Env) -> Iterator[Part]:
        """Iterate over the batches of optimizer steps `taken` to `until` - 1."""
        proxy = proxy_of(env)
        names = (env.seed, "server", env.round)
        noise = StepNoise(seed_of(*names, "noise"), env.device)
        net.set_noise(noise)
        order = batches(len(proxy), self.batch_size, *names, epochs=None, start=taken)
        for step, at in enumerate(
            on_device(islice(order, until - taken), proxy.x.device), start=taken
        ):
            if len(at) == 1 and net.has_batch_norm:
                continue  # BatchNorm cannot compute the variance of a single sample
            noise.step = step
            yield step, at, proxy.inputs(at)


def mean_loss(losses: dict[int, Tensor], total: int, env: Env) -> Metrics:
    """Return the metric ``server/loss``, the mean loss over optimizer steps.

    Without steps the result is empty.

    Args:
        losses: The loss of each optimizer step. The key is the number of the step in
            the round, from 0.
        total: Number of optimizer steps of the round, for the message.
        env: The environment at this step.

    Raises:
        FedexpError: The mean is NaN or infinite.
    """
    if not losses:
        return {}

    mean = float(torch.stack([*losses.values()]).mean())
    if not math.isfinite(mean):
        step = next((step for step, loss in losses.items() if not loss.isfinite()), max(losses))
        raise FedexpError(
            "the loss of training on the server is not finite",
            where=f"round {env.round + 1}, step {step + 1} of {total} on the server",
            do="lower aggregator.lr"
            if step
            else "lower local.lr, if the clients diverged, or aggregator.lr",
        )

    return {"server/loss": mean}


def proxy_of(env: Env) -> Samples:
    """Return the server's proxy data. The method must have ``Needs(proxy=True)``."""
    assert env.proxy is not None
    return env.proxy


def with_frozen(weights: Weights, live: Tree) -> Tree:
    """Return the parameters of `weights`, with those in `live` replaced."""
    return {**weights.params, **live}
