"""The trainer interface: what one client does in one step, and the small server half that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fedexp.core.data import Noise
from fedexp.core.local_training import LocalTraining
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch, Task
from fedexp.core.torch_private import run_backward
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec

Hook = TypeVar("Hook", bound=Callable[..., Any])


def elementwise(hook: Hook) -> Hook:
    """Mark a hook (`adjustment`, `correct`, `after_step`) that treats every number of its trees alike and by itself.

    It uses no norms, means or indices. Of the context it uses only `start`, `shared`, `state`,
    `local_training` and `round`. Such a hook may be called with the trees of several clients
    stacked along a first axis. Any other hook is called client by client.
    """
    hook.elementwise = True  # type: ignore[attr-defined]
    return hook


def gradient(loss: Tensor, params: Tree) -> Tree:
    """``torch.autograd.grad`` of a scalar, zeros for what it does not depend on.

    It asks the engine itself: the public function's checks of its arguments take a tenth of a small model's step.
    """
    if loss.numel() != 1:
        raise ValueError(
            f"a loss must be a scalar, the mean over the batch; got shape {tuple(loss.shape)}"
        )
    grads = run_backward(loss, tuple(params.values()))
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), grads, strict=True)
    }


class Received(NamedTuple):
    """A whole model, as a network takes it: every parameter, frozen ones included, and every buffer."""

    params: Tree
    buffers: Tree


class Measured(NamedTuple):
    """A loss and further scalar tensors of the batch by name, the same ones at every step; logged as ``train/NAME``."""

    loss: Tensor
    scalars: Mapping[str, Tensor]


class Clock(Protocol):
    """Where a client stands in its round: steps and epochs begun before this one. Kernels move it on."""

    step: int
    epoch: int


@dataclass(frozen=True, eq=False)
class Ctx:
    """What a trainer may know during a client's round.

    Args:
        start: the received parameters that are trained (w^t); received: the whole received model.
        shared: the server's trees; state: the client state from earlier rounds.
        round: communication round, from 0; num_examples: training samples (n_i); num_steps: optimizer steps of this round
            (tau_i).
        net: the network that is trained; clock: what `step` and `epoch` read.
        once: the tensor that ``make()`` returns at this step, by name: made without a graph when first asked for, then kept for
            all gradients of the step. For what depends on the batch, and on no parameter that is trained.
        noise: uniform [0, 1) numbers by name and shape, a function of client, round and step.
        full_gradient: mean task gradient over the whole local data at given parameters, in training mode.
        count_classes: computes `class_counts`.
    """

    start: Tree
    received: Received
    shared: Trees
    state: Mapping[str, Tree]
    task: Task
    local_training: LocalTraining
    round: int
    num_examples: int
    num_steps: int
    net: Net
    clock: Clock
    once: Callable[[str, Callable[[], Tensor]], Tensor]
    noise: Noise
    full_gradient: Callable[[Tree], Tree]
    count_classes: Callable[[], Tensor]

    @property
    def step(self) -> int:
        """This step's number in the client's round, from 0."""
        return self.clock.step

    @property
    def epoch(self) -> int:
        """This step's epoch, from 0."""
        return self.clock.epoch

    @cached_property
    def class_counts(self) -> Tensor:
        """(classes,) int64: the client's training samples of each class, on the device; counted when first asked for."""
        return self.count_classes()

    @property
    def reference(self) -> Net:
        """A second network like the trained one, in evaluation mode: it runs any parameters and buffers and changes none.

        ``ctx.reference(*ctx.received, batch.x)`` is the received model's output.
        """
        return self.net.beside(self.net.spec)

    def network(self, spec: ModelSpec) -> Net:
        """Another network, in evaluation mode: a generator whose parameters and buffers come in `shared`."""
        return self.net.beside(spec)


@dataclass(frozen=True, eq=False)
class Adjustment:
    """``gradient * g + pull * (w - toward) + shift`` in place of g; and, after the optimizer's step, ``w -= lr * outside``.

    `toward` is w^t unless there is one.

    Its parts stay the same for a whole round. Engines apply it without a copy of the gradient; most methods that change
    gradients can say it this way. `outside` stays out of clipping, weight decay and momentum.
    """

    gradient: float = 1.0
    pull: float = 0.0
    toward: Tree | None = None
    shift: Tree | None = None
    outside: Tree | None = None


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """A round's step of the server: trees of the trained parameters, new minus old.

    Args:
        mean: what the aggregator made of the clients' updates, as the server optimizer received it.
        applied: what the server optimizer made of that, as added to the weights.
    """

    mean: Tree
    applied: Tree


@dataclass(frozen=True)
class Ascent:
    """The step's gradient is that at ``w + e``, ``e = rho * g / (||g|| + eps)``, g being the gradient at w.

    Foret et al. 2021 (SAM). Both gradients are of the same batch under the same random numbers; the norm is over all trained
    parameters of one client. The loss and BatchNorm's statistics are those at w; ``||e||`` is logged as
    ``train/perturbation``. It stays the same for a whole round and for all clients.
    """

    rho: float
    eps: float = 1e-12


class TermValue(NamedTuple):
    """A `FeatureTerm` at a batch: its value, its gradient in z, and the scalars that the trainer's `loss` measures, by name."""

    value: Tensor
    gradient: Tensor
    scalars: Tree


@dataclass(frozen=True, eq=False)
class FeatureTerm:
    """What `Trainer.loss` adds to the task's loss, as a function of representations of a batch, in closed form.

    Args:
        layer: the representation, ``penultimate`` (input of the network's head) or ``logits``.
        of: from z, (..., b, d), the representation by w; the same by the received model, in evaluation mode; what a sample
            counts in its client's mean, ``1 / b`` or (..., b) with zeros for padding; and the task's gradient in z, if asked
            for, (..., b, d), at the same weights as z. Values and scalars are of shape (...), one a client.
    """

    layer: Literal["penultimate", "logits"]
    of: Callable[[Tensor, Tensor, float | Tensor, Callable[[], Tensor]], TermValue]


@dataclass(frozen=True)
class RoundStats:
    """Facts of a finished round that server halves and server optimizers use.

    Args:
        round: counted from 0; N: clients that may take part; m: clients whose results were aggregated.
        share: the weight of these m among the N, in (0, 1]: m / N, or their part of all samples.
        lr, lr_0: local step size of this round and of the first.
        p: aggregation weights, summing to 1; tau: local steps; both in client order.
        squared_norms: ||u_i||^2 of the updates, in float64, in client order, each as long as it entered the mean; empty
            unless a plug-in needs them.
    """

    round: int
    N: int
    m: int
    share: float
    lr: float
    lr_0: float
    p: tuple[float, ...]
    tau: tuple[int, ...]
    squared_norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trainer:
    """Local training as pure functions of trees. Override the hooks a method needs; the others cost nothing.

    A step is, in this order (spec: multi-round 1.2): ``grad`` (twice where there is an ``ascent``: at w, then at w + e; w
    is restored to the bit), ``adjustment``, ``correct``, clip, weight decay, local optimizer, ``after_step``; frozen
    parameters never change. ``adjustment`` and ``ascent`` are asked once a round, before its first step.

    Engines can stack clients whatever the hooks do, with one exception: a trainer with a `grad` of its own runs serially.
    """

    @property
    def needs(self) -> Needs:
        """What must hold for this trainer, checked before anything runs."""
        return Needs()

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        """Refuse a model that this trainer cannot train, before anything is loaded; `ConfigError` says why."""

    def init_state(self, start: Tree, received: Received) -> Trees | None:
        """A client state before its first round, from what ``ctx.start`` and ``ctx.received`` will be; None: it keeps none."""
        return None

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        """Scalar training loss: the task's, plus the method's own terms; with named scalars, if it measures any."""
        return ctx.task.loss(net, params, buffers, batch, ctx.noise)

    def grad(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> tuple[Tree, Tensor | Measured]:
        """Gradient with respect to the parameters that require one, and what `loss` returned, detached."""
        found = self.loss(net, params, buffers, batch, ctx)
        live = {name: value for name, value in params.items() if value.requires_grad}
        if not isinstance(found, Measured):
            return gradient(found, live), found.detach()
        scalars = {name: value.detach() for name, value in found.scalars.items()}
        return gradient(found.loss, live), Measured(found.loss.detach(), scalars)

    def feature_term(self) -> FeatureTerm | None:
        """All that `loss` adds to the task's loss, if it adds anything, for kernels that write the backward pass by hand.

        The class that defines `loss` says it; where one defines `loss` alone, such a kernel does not train it.
        """
        return None

    def ascent(self, ctx: Ctx) -> Ascent | None:
        """Where gradients are taken, if not at w itself: the SAM family."""
        return None

    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        """How this round's gradients are changed before clipping: proximal pull, control variate, client momentum."""
        return None

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        """Change the gradient before clipping in ways that `adjustment` cannot say."""
        return grad

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        """Change the parameters after the optimizer's step: a correction outside the momentum buffer."""
        return params

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        """Payload for the server and the new client state, from the trained parameters and the buffers after training."""
        return {}, None

    def init_shared(self, start: Tree) -> Trees:
        """The server half's trees before round 0, from the parameters that are trained; broadcast to every client."""
        return {}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        """Weights of the mean of payloads: each participant's alike, or the models' p_i."""
        return "uniform"

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        """The server half after a round; it moves no weights.

        Args:
            payload_mean: mean of the participants' payloads, weighted as `payload_weights` says.
        """
        return shared

    def normalizer(self, tau: int, local_training: LocalTraining) -> float:
        """How far `tau` steps with a constant unit gradient move the weights, in units of lr.

        By Wang et al. 2020: ``tau`` for plain SGD, ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)`` with momentum rho.
        """
        rho = local_training.momentum
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
