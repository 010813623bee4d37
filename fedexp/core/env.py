"""What an aggregator may ask of the world: clients, sampling, jobs. No client's data, no test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from fedexp.core.data import InputDomain, Samples
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
    """Who takes part in a round.

    Args:
        kind: ``fixed`` (exactly `m`, without replacement) or ``bernoulli`` (every client by itself with probability
            m / N, drawn again while nobody was drawn).
        m: expected number of clients a round.
    """

    kind: Literal["fixed", "bernoulli"]
    m: float

    def draw(self, N: int, seed: int, round: int) -> list[int]:
        """Ascending client indices; a function of seed and round alone, so every method sees the same sequence."""
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


@dataclass(frozen=True)
class Extent:
    """What is known of a run before its data are loaded.

    Args:
        rounds, clients: how many; who takes part is drawn by `sampling`.
        limit_server_steps: ``limit.server_steps``; methods ask `server_steps`.
    """

    rounds: int
    clients: int
    sampling: Sampling
    limit_server_steps: int | None = None

    def server_steps(self, wanted: int) -> int:
        """How many steps a method's server work may take that would take `wanted`: fewer in smoke forms."""
        return min(wanted, self.limit_server_steps or wanted)


@dataclass(frozen=True)
class Specs:
    """Who has which network.

    Args:
        server: the server's, and every client's where there are no `clients`.
        clients: client c has number c modulo their number.
    """

    server: ModelSpec
    clients: tuple[ModelSpec, ...] = ()

    def of(self, client: int) -> ModelSpec:
        return self.clients[client % len(self.clients)] if self.clients else self.server

    @property
    def trained(self) -> tuple[ModelSpec, ...]:
        """Those that clients train."""
        return self.clients or (self.server,)

    @cached_property
    def distinct(self) -> tuple[ModelSpec, ...]:
        """Each once, the server's first."""
        return tuple(dict.fromkeys((self.server, *self.clients)))


@dataclass(frozen=True, eq=False)
class Env:
    """The world as an aggregator sees it in step `step` of round `round` (both counted from 0).

    Args:
        sizes: (clients,) int64 training samples a client.
        specs: the server's network and the clients'.
        init: ``same`` (all start from the global model, or that of their architecture) or ``different`` (each from its own
            initialisation).
        input_shape: of one sample.
        local_training: The config's ``local.*``. `job` applies the per-round decay of the step size.
        proxy: server data, or None.
        validation: the clients' held-out shares together, where a plug-in's needs ask for them, else None.
        domain: how an image becomes a network's input: ``env.domain.normalise(images)``.
        trace: takes what the server's models go through within a round, where the config asks for it.
        models: where `store` puts models.
        limit_server_steps: ``limit.server_steps``; methods ask `server_steps`.
        legacy: state of the generator that drew the split, or None; methods ask `after_split`.
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
    limit_server_steps: int | None = None
    legacy: Mapping[str, Any] | None = None

    @property
    def server_spec(self) -> ModelSpec:
        """The server's network; every client's, too, under the need ``same_architecture``."""
        return self.specs.server

    def spec_of(self, client: int) -> ModelSpec:
        """The network that `client` trains."""
        return self.specs.of(client)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The server's model's linear and convolutional layers in forward order; the last is the output layer."""
        return layers_of(self.server_spec, self.input_shape)

    @property
    def num_clients(self) -> int:
        return len(self.sizes)

    @property
    def lr(self) -> float:
        """Step size of this round, ``lr_0 * decay^round``."""
        return self.local_training_this_round.lr

    @cached_property
    def local_training_this_round(self) -> LocalTraining:
        """The local training of this round, with its step size."""
        return self.local_training.at_round(self.round)

    def at(self, round: int, step: int = 0) -> Env:
        return replace(self, round=round, step=step)

    @property
    def first(self) -> bool:
        """Whether this is the run's first step: nothing in it depends on earlier ones."""
        return self.round == self.step == 0

    def server_steps(self, wanted: int) -> int:
        """How many steps a method's server work may take that would take `wanted`: fewer in smoke forms."""
        return min(wanted, self.limit_server_steps or wanted)

    def after_split(self) -> np.random.RandomState:
        """NumPy's legacy generator as the split of the data left it; of a split from a file, as ``seed_data`` seeds it.

        Published code that seeds it once goes on with this stream; nothing else here draws from it.
        """
        if self.legacy is None:
            raise ConfigError("the split of these data was not drawn here", where="partition")
        generator = np.random.RandomState(0)
        generator.set_state(dict(self.legacy))
        return generator

    def sample(self) -> list[int]:
        """This round's participants; a client without data takes part with weight 0, that is, not at all."""
        return [
            c for c in self.sampling.draw(self.num_clients, self.seed, self.round) if self.sizes[c]
        ]

    def initial_weights(self, client: int | None = None) -> Weights:
        """The global model's initialisation, or client `client`'s: of its architecture, and its own with ``init=different``."""
        names = ("init",) if client is None or self.init == "same" else ("init", client)
        spec = self.server_spec if client is None else self.spec_of(client)
        return Weights.init(spec, seed_of(self.seed, *names), self.device, self.dtype)

    def store(self, weights: Weights) -> StoredWeights:
        """A reference for the state in place of `weights`: a run moves the model to disk and reads it when asked for."""
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
        """Local training of `client` in this step. The runner attaches the client's state.

        Args:
            local_training: Local training of its own, made from `local_training_this_round` by
                `dataclasses.replace`. None: `local_training_this_round`.
            frozen: names of parameters that must not change, besides those that the model declares.
        """
        return ClientJob(
            client=client,
            start=start,
            trainer=self.trainer,
            task=self.task,
            local_training=local_training or self.local_training_this_round,
            round=self.round,
            step=self.step,
            seed=seed_of(
                self.seed, "client", self.round, client, *([self.step] if self.step else [])
            ),
            shared=shared,
            frozen=frozen | (start.frozen & start.params.keys()),
            probes=probes,
        )
