"""The environment of an aggregator: clients, sampling and jobs.

An aggregator sees only this environment. It contains no training data of clients. It
contains test data only if the config moves test samples to the server's proxy data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from fedexp.core.data import POOLED, InputDomain, Samples
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob
from fedexp.core.layers import Layer, layers_of
from fedexp.core.local_training import LocalTraining
from fedexp.core.probe import Probe
from fedexp.core.seeds import numpy_generator, seed_of
from fedexp.core.server_optimizer import ServerOptimizer
from fedexp.core.stored_weights import ModelStore, StoredWeights
from fedexp.core.task import Task
from fedexp.core.trace import Trace
from fedexp.core.trainer import Trainer
from fedexp.core.trees import Trees
from fedexp.core.weights import ModelSpec, Weights


@dataclass(frozen=True)
class Sampling:
    """The rule that chooses the clients of a round.

    Args:
        kind: ``fixed`` chooses exactly `m` of the N clients, without replacement.
            ``bernoulli`` chooses each client independently with probability m / N. If
            no client is chosen, it samples again.
        m: Number of clients per round. With ``bernoulli``, m / N is the probability of
            each client. The mean number of clients is above m, because empty samples
            are repeated.
    """

    kind: Literal["fixed", "bernoulli"]
    m: float

    def draw(self, N: int, seed: int, round: int) -> list[int]:
        """Return the indices of a round's clients in ascending order.

        They depend only on the seed and the round, so they are the same for every
        method.

        Args:
            N: Number of clients.
            seed: Seed of the run.
            round: Communication round, from 0.
        """
        rng = numpy_generator(seed, "sample", round)
        if self.kind == "fixed":
            m = int(self.m)
            return (
                list(range(N))
                if m >= N
                else np.sort(rng.choice(N, m, replace=False, shuffle=False)).tolist()
            )
        while True:
            chosen = np.flatnonzero(rng.random(N) < self.m / N)
            if len(chosen):
                return chosen.tolist()


@dataclass(frozen=True, eq=False, kw_only=True)
class _LimitedServerWork:
    """An upper bound on the steps of server work, for small test runs.

    Args:
        limit_server_steps: The config's ``limit.server_steps``, or None for no bound.
            Methods call `server_steps` instead of reading it.
    """

    limit_server_steps: int | None = None

    def server_steps(self, wanted: int) -> int:
        """Return how many of the `wanted` server steps the bound allows."""
        return min(wanted, self.limit_server_steps or wanted)


@dataclass(frozen=True)
class Extent(_LimitedServerWork):
    """The size of a run, which is known before its data are loaded.

    Args:
        rounds: Number of communication rounds.
        clients: Number of clients.
        sampling: The rule that chooses the clients of a round.
    """

    rounds: int
    clients: int
    sampling: Sampling


@dataclass(frozen=True)
class Specs:
    """The networks of the server and the clients.

    Args:
        server: The server's network. If `clients` is empty, it is the clients' network,
            too.
        clients: Networks of clients. Client c has ``clients[c % len(clients)]``.
    """

    server: ModelSpec
    clients: tuple[ModelSpec, ...] = ()

    def of(self, client: int) -> ModelSpec:
        return self.clients[client % len(self.clients)] if self.clients else self.server

    @property
    def trained(self) -> tuple[ModelSpec, ...]:
        """The networks that clients train."""
        return self.clients or (self.server,)

    @cached_property
    def distinct(self) -> tuple[ModelSpec, ...]:
        """The networks without duplicates. The server's network is first."""
        return tuple(dict.fromkeys((self.server, *self.clients)))


@dataclass(frozen=True, eq=False)
class Env(_LimitedServerWork):
    """The environment of an aggregator in one step of a round.

    Args:
        sizes: Number of training samples of each client, (clients,), int64.
        specs: The networks of the server and the clients.
        seed: Seed of the run.
        trainer: The trainer of the run.
        server_optimizer: The server optimizer of the run.
        task: The task of the run.
        local_training: The config's ``local.*``, with the step size before its
            schedule.
        rounds: Number of communication rounds.
        sampling: The rule that chooses the clients of a round.
        init: ``same`` (all clients of an architecture have the same initial weights) or
            ``different`` (every client has its own initial weights).
        device: Device of training.
        dtype: Type of parameters.
        num_classes: Number of classes.
        input_shape: Shape of one sample.
        proxy: Data that the server may use (proxy data), or None.
        validation: Validation samples that were held out from all clients, in one set.
            None if no plug-in needs them.
        domain: The normalisation and the augmentation of the clients' inputs.
        round: Communication round, from 0.
        step: Step within the round, from 0.
        trace: Receiver of the server's intermediate models within a round. It ignores
            these models unless ``trace.every`` or ``trace.weights`` is set.
        models: The storage in which `store` puts models.
        client_dropout: Probability with which a client drops out of a round.
        legacy: State of NumPy's legacy generator after it sampled the partition, or
            None. Methods call `after_split` instead of reading it.
    """

    sizes: np.ndarray
    specs: Specs
    seed: int
    trainer: Trainer
    server_optimizer: ServerOptimizer
    task: Task
    local_training: LocalTraining
    rounds: int
    sampling: Sampling
    init: Literal["same", "different"]
    device: torch.device
    dtype: torch.dtype
    num_classes: int
    input_shape: tuple[int, ...]
    proxy: Samples | None = None
    validation: Samples | None = None
    domain: InputDomain = field(default_factory=InputDomain)
    round: int = 0
    step: int = 0
    trace: Trace = field(default_factory=Trace)
    models: ModelStore = field(default_factory=ModelStore)
    client_dropout: float = 0.0
    legacy: Mapping[str, Any] | None = None

    @property
    def server_spec(self) -> ModelSpec:
        """The server's network.

        If the method needs ``same_architecture`` (see `Needs`), the clients have this
        network, too.
        """
        return self.specs.server

    def spec_of(self, client: int) -> ModelSpec:
        """Return the network that `client` trains."""
        return self.specs.of(client)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Linear and convolutional layers of the server's model in forward order.

        The last layer is the output layer.
        """
        return layers_of(self.server_spec, self.input_shape)

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def lr(self) -> float:
        """Step size of this round: ``local.lr`` times `LocalTraining.lr_factor`."""
        return self.local_training_this_round.lr

    @cached_property
    def local_training_this_round(self) -> LocalTraining:
        """The local training of this round, with its step size."""
        return self.local_training.at_round(self.round, self.rounds)

    def at(self, round: int, step: int = 0) -> Env:
        return replace(self, round=round, step=step)

    @property
    def first(self) -> bool:
        """Whether this is the first step of the run."""
        return self.round == self.step == 0

    def after_split(self) -> np.random.RandomState:
        """Return NumPy's legacy generator in its state after the split of the data.

        Some published code seeds NumPy once, splits the data among the clients, and
        then draws further numbers from the same generator. The returned generator
        produces these further numbers. If the split was read from a file, the generator
        has only been seeded with ``seed_data``. Nothing else in fedexp draws from it.

        Raises:
            ConfigError: The split was not sampled in this run.
        """
        if self.legacy is None:
            raise ConfigError("the split of these data was not drawn here", where="partition")
        generator = np.random.RandomState(0)
        generator.set_state(dict(self.legacy))
        return generator

    def sample(self) -> list[int]:
        """Return the clients that take part in this round.

        Clients without data are left out, because their aggregation weight would be 0.
        """
        return [
            c for c in self.sampling.draw(self.num_clients, self.seed, self.round) if self.sizes[c]
        ]

    def initial_weights(self, client: int | None = None) -> Weights:
        """Return the initial weights of the global model, or of `client`.

        The weights of a client fit the client's network. With ``init=different`` every
        client's weights are sampled with another seed.
        """
        names = ("init",) if client is None or self.init == "same" else ("init", client)
        spec = self.server_spec if client is None else self.spec_of(client)
        return Weights.init(spec, seed_of(self.seed, *names), self.device, self.dtype)

    def store(self, weights: Weights) -> StoredWeights:
        """Store `weights` and return a reference, which a state may contain.

        A run may move the model to disk and read it again when the reference is used.
        """
        return self.models.store(weights)

    def job(
        self,
        client: int,
        start: Weights,
        shared: Trees,
        frozen: frozenset[str] = frozenset(),
        probes: tuple[Probe, ...] = (),
        local_training: LocalTraining | None = None,
    ) -> ClientJob:
        """Return the job that trains `client` in this step.

        The runner adds the client's state to the job.

        Args:
            client: Index of the client.
            start: The model that training starts from.
            shared: Trees (`fedexp.core.trees`) that the server broadcasts besides the
                model, by name.
            frozen: Names of parameters that must not change. Parameters that the
                model's class declares as frozen never change.
            probes: Functions of the trained model and the client's data (see `Probe`).
            local_training: Local training of this job, if it differs from
                `local_training_this_round`. Make it from `local_training_this_round`
                with `dataclasses.replace`. With uneven local work, its number of epochs
                is scaled to the client (see `_with_own_epochs`).
        """
        return ClientJob(
            client=client,
            start=start,
            trainer=self.trainer,
            task=self.task,
            local_training=self._with_own_epochs(
                client, local_training or self.local_training_this_round
            ),
            round=self.round,
            step=self.step,
            seed=seed_of(
                self.seed, "client", self.round, client, *([self.step] if self.step else [])
            ),
            shared=shared,
            frozen=frozen | (start.frozen & start.params.keys()),
            probes=probes,
            drops_out=self._drops_out(client),
        )

    def draw_epochs(self, client: int) -> int:
        """Return how many passes a client makes in this round, with uneven work.

        A straggler's number is uniform in {epochs_min, ..., epochs}. Other clients make
        `epochs` passes. A client is a straggler with probability `stragglers`. With
        ``epochs_drawn=once``, the draw does not depend on the round.

        Source: ``stragglers=1`` is the setting of Wang et al., Tackling the Objective
            Inconsistency Problem, NeurIPS 2020, for example E_i ~ U(2, 5). Smaller
            values are like the settings of Li et al., Federated Optimization in
            Heterogeneous Networks, MLSys 2020, where exactly this share of a round's
            clients are stragglers.
        """
        config = self.local_training
        assert config.epochs is not None  # callers check it
        if config.epochs_min is None:
            return config.epochs
        names = [client] if config.epochs_drawn == "once" else [self.round, client]
        rng = numpy_generator(self.seed, "local epochs", *names)
        if rng.random() >= config.stragglers:
            return config.epochs
        return int(rng.integers(config.epochs_min, config.epochs, endpoint=True))

    def _with_own_epochs(self, client: int, local_training: LocalTraining) -> LocalTraining:
        """Return `local_training` with the number of epochs of `client`.

        It differs from the given number only with uneven local work (`draw_epochs`). A
        method may ask for another number than the config's. The drawn number is then
        scaled by the same factor and rounded, to at least one epoch. Training on the
        pooled data always has the given number.
        """
        usual, given = self.local_training.epochs, local_training.epochs
        if client == POOLED or not usual or not given:
            return local_training
        drawn = self.draw_epochs(client)
        if drawn == usual:
            return local_training
        return replace(local_training, epochs=max(1, round(given * drawn / usual)))

    def _drops_out(self, client: int) -> bool:
        """Return whether `client` drops out of this round.

        This depends only on the seed, the round and the client. It is therefore the
        same for every method, and in all steps of the round.
        """
        if not self.client_dropout or client == POOLED:
            return False
        rng = numpy_generator(self.seed, "dropout", self.round, client)
        return bool(rng.random() < self.client_dropout)
