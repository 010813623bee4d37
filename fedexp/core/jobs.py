"""Client work as values: what a client is asked to do and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fedexp.core.models import Weights
from fedexp.core.task import Metrics, Task
from fedexp.core.trees import Tree, Trees, num_bytes

if TYPE_CHECKING:
    from fedexp.core.probe import Probe
    from fedexp.core.trainer import Trainer


@dataclass(frozen=True)
class Budget:
    """Local work of one round.

    Args:
        epochs, steps: passes over the client's data, or a fixed number of steps (exactly one is set).
        batch_size: the last batch of an epoch may be smaller.
        optimizer: ``sgd`` (heavy ball with `momentum`) or ``adam`` (`betas`, `eps`); its state starts empty every round.
        lr: this round's step size; lr_0: the first round's.
        weight_decay: coupled, ``g + weight_decay * w``, after clipping.
        clip: bound of the gradient's norm over all parameters, or None.
        max_steps: a cap on either form of work, or None.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    optimizer: Literal["sgd", "adam"]
    lr: float
    lr_0: float
    momentum: float
    weight_decay: float
    clip: float | None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_steps: int | None = None


@dataclass(frozen=True, eq=False)
class ClientJob:
    """One client's work in one round: a pure function of these values and the client's data.

    Args:
        client: index, or `fedexp.core.data.POOLED`.
        start: the model local training starts from.
        round: counted from 0; 0 means that nothing here depends on earlier rounds.
        seed: the stream that batch order, augmentation and random layers draw from.
        shared: trees broadcast by the server (control variate, momentum ...).
        state: this client's own memory; the runner fills it in and takes it back.
        frozen: names of parameters that must not change.
        probes: what the server asks of the trained model and the client's data besides.
    """

    client: int
    start: Weights
    trainer: Trainer
    task: Task
    budget: Budget
    round: int
    seed: int
    shared: Trees
    state: Trees | None = None
    frozen: frozenset[str] = frozenset()
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True, eq=False)
class ClientResult:
    """What a client sends back.

    Args:
        weights: the locally trained model.
        num_examples: size of its training data; num_steps: optimizer steps taken (tau_i).
        payload: further trees sent to the server; state: the client's new memory (None: it keeps none).
        metrics: ``loss``, the mean training loss over the steps; none where nothing was trained.
        probes: answers to ``job.probes`` by name; the runner fills them in.
    """

    client: int
    weights: Weights
    num_examples: int
    num_steps: int
    payload: Trees
    state: Trees | None
    metrics: Metrics
    probes: dict[str, Tree] = field(default_factory=dict)


def bytes_down(job: ClientJob) -> int:
    """What a server would send for `job`: the model and the broadcast trees."""
    return sum(map(num_bytes, (job.start.params, job.start.buffers, *job.shared.values())))


def bytes_up(result: ClientResult) -> int:
    """What a client would send back: the model, its payload and the answers to probes."""
    sent = (result.weights.params, result.weights.buffers, *result.payload.values(), *result.probes.values())
    return sum(map(num_bytes, sent))
