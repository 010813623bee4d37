"""The trainer interface: a client's local steps, and the server's part of a trainer."""

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
    """Mark a hook that treats all elements of its trees alike and independently.

    The hooks that can be marked are `adjustment`, `correct` and `after_step`. A marked
    hook uses no norms, means or indices. The only context fields that it uses are
    `start`, `shared`, `state`, `local_training` and `round`. An engine may call it once
    with the trees of several clients, stacked along a first axis. Hooks without the
    mark are called once per client.
    """
    hook.elementwise = True  # type: ignore[attr-defined]
    return hook


def gradient(loss: Tensor, params: Tree) -> Tree:
    """Compute the gradient of a scalar loss.

    A parameter that the loss does not depend on gets zeros. This calls the autograd
    engine directly, because the argument checks of ``torch.autograd.grad`` take a tenth
    of a small model's step.

    Args:
        loss: Scalar tensor, the mean over the batch.
        params: Parameters that require a gradient, by name.

    Returns:
        One gradient per parameter, under the same names.

    Raises:
        ValueError: The loss is not a scalar.
    """
    if loss.numel() != 1:
        raise ValueError(
            f"a loss must be a scalar, the mean over the batch, got shape {tuple(loss.shape)}"
        )
    grads = run_backward(loss, tuple(params.values()))
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), grads, strict=True)
    }


class Received(NamedTuple):
    """A whole model as a network takes it: all parameters and all buffers.

    Frozen parameters are included.
    """

    params: Tree
    buffers: Tree


class Measured(NamedTuple):
    """A loss with further scalar tensors of the batch.

    Args:
        loss: Scalar training loss.
        scalars: Scalar tensors by name, with the same names at every step. They are
            logged as ``train/NAME``.
    """

    loss: Tensor
    scalars: Mapping[str, Tensor]


class Clock(Protocol):
    """The position of a client in its round. Kernels advance it.

    Attributes:
        step: Number of the current step, from 0.
        epoch: Number of the current epoch, from 0.
    """

    step: int
    epoch: int


@dataclass(frozen=True, eq=False)
class Ctx:
    """The context that a trainer may read during a client's round.

    Args:
        start: The received parameters that are trained, w^t.
        received: The whole received model.
        shared: The trees broadcast by the server.
        state: The client state from earlier rounds.
        task: The task, which defines the loss.
        local_training: The local training of this round.
        round: Communication round, from 0.
        num_examples: Number of training samples, n_i.
        num_steps: Number of optimizer steps of this round, tau_i.
        net: The network that is trained.
        clock: The source of `step` and `epoch`.
        once: Function. ``once(name, make)`` returns the result of ``make()``. The first
            call in a step computes the result, without a graph. Later calls in the step
            return it again, for example in SAM's second gradient. Use `once` for values
            that depend on the batch but not on trained parameters.
        noise: Uniform numbers in [0, 1) by name and shape. They depend on the client,
            the round and the step.
        full_gradient: Function that returns the mean gradient of the task's loss over
            the client's data at given parameters. It uses training mode, the received
            buffers and no augmentation.
        count_classes: Function that computes `class_counts`.
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
        """Number of this step in the client's round, from 0."""
        return self.clock.step

    @property
    def epoch(self) -> int:
        """Epoch of this step, from 0."""
        return self.clock.epoch

    @cached_property
    def class_counts(self) -> Tensor:
        """Count the client's training samples of each class, at the first access.

        Returns:
            Counts of shape (classes,), int64, on the device.
        """
        return self.count_classes()

    @property
    def reference(self) -> Net:
        """A second network with the trained network's spec, in evaluation mode.

        It runs on the parameters and buffers that it is given, and does not change
        them. For example, ``ctx.reference(*ctx.received, batch.x)`` is the output of
        the received model.
        """
        return self.net.beside(self.net.spec)

    def network(self, spec: ModelSpec) -> Net:
        """Return another network in evaluation mode.

        An example is a generator whose parameters and buffers arrive in `shared`.

        Args:
            spec: Architecture of the network.
        """
        return self.net.beside(spec)


@dataclass(frozen=True, eq=False)
class Adjustment:
    """A change of the gradient that stays the same for a whole round.

    Before clipping, the gradient g is replaced by
    ``gradient * g + pull * (w - toward) + shift``. After the optimizer's step, the
    parameters change by ``w -= lr * outside``. Engines can apply an adjustment to the
    stacked gradients of several clients. Most methods that change gradients can be
    expressed this way.

    Args:
        gradient: Factor of the gradient.
        pull: Factor of the distance to `toward`.
        toward: Parameters that w is pulled toward. None stands for w^t.
        shift: Tree that is added to the gradient, or None.
        outside: Tree that is applied without clipping, weight decay and momentum, or
            None.
    """

    gradient: float = 1.0
    pull: float = 0.0
    toward: Tree | None = None
    shift: Tree | None = None
    outside: Tree | None = None


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The server's step of a round, as two trees of the trained parameters.

    Each tree is a difference: new minus old.

    Args:
        mean: The aggregated client update that the server optimizer received.
        applied: The change that the server optimizer added to the weights.
    """

    mean: Tree
    applied: Tree


@dataclass(frozen=True)
class Ascent:
    """The point at which the gradient of a step is taken.

    It is ``w + e`` with ``e = rho * g / (||g|| + eps)``, where g is the gradient at w
    (Foret et al. 2021, SAM). Both gradients use the same batch and the same random
    numbers. The norm is over all trained parameters of one client. The loss and
    BatchNorm's statistics are those at w. ``||e||`` is logged as
    ``train/perturbation``. The ascent stays the same for a whole round and for all
    clients.

    Args:
        rho: Radius of the perturbation.
        eps: Number that is added to the norm.
    """

    rho: float
    eps: float = 1e-12


class TermValue(NamedTuple):
    """The value of a `FeatureTerm` at a batch.

    Args:
        value: Value of the term.
        gradient: Its gradient with respect to z.
        scalars: The scalars that the trainer's `loss` measures, by name.
    """

    value: Tensor
    gradient: Tensor
    scalars: Tree


@dataclass(frozen=True, eq=False)
class FeatureTerm:
    """The closed form of everything that `Trainer.loss` adds to the task's loss.

    The term is a function of the representations of a batch. The function is called as
    ``of(z, received, share, task_gradient)``:

    - z is the representation of the batch by the trained model w, with shape (..., b,
      d).
    - received is the representation by the received model in evaluation mode, with the
      shape of z.
    - share is the weight of a sample in its client's mean: ``1 / b``, or a tensor (...,
      b) with zeros for padding.
    - task_gradient is a function without arguments. It returns the gradient of the
      task's loss with respect to z, with the shape of z.

    Values and scalars of the result have shape (...), one per client.

    Args:
        layer: The representation z: ``penultimate`` (the input of the network's head)
            or ``logits``.
        of: The function, which returns a `TermValue`.
    """

    layer: Literal["penultimate", "logits"]
    of: Callable[[Tensor, Tensor, float | Tensor, Callable[[], Tensor]], TermValue]


@dataclass(frozen=True)
class RoundStats:
    """Statistics of a finished round for trainers' server halves and server optimizers.

    Args:
        round: Communication round, from 0.
        N: Number of clients that may take part.
        m: Number of clients whose results were aggregated.
        share: Weight of the m clients among all N clients, in (0, 1]. It is m / N, or
            the share of all samples that the m clients have.
        lr: Local step size of this round.
        lr_0: Local step size of round 0.
        p: Aggregation weights in client order. They sum to 1.
        tau: Local steps in client order.
        squared_norms: Squared norms of the clients' updates in float64, in client
            order. The updates are those that entered the mean, after division by a
            method's normaliser a_i. Empty unless a plug-in needs them.
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
    """Local training as pure functions of trees (`fedexp.core.trees`).

    Override the hooks that a method needs. Hooks that are not overridden cost nothing.
    A trainer may have a server half: trees that the server stores for it
    (`init_shared`, `update_shared`). A local step runs in this order:

    1. ``grad`` at w. If there is an ``ascent``, ``grad`` runs again at w + e. w itself
       does not change.
    2. The gradient part of ``adjustment``, then ``correct``.
    3. Clipping, weight decay, the local optimizer.
    4. The part of ``adjustment`` outside the optimizer, then ``after_step``.

    Frozen parameters never change. ``adjustment`` and ``ascent`` are called once per
    round, before the first local step. Engines can stack the clients of any trainer,
    except one that overrides `grad`. Clients of such a trainer run serially.
    """

    @property
    def needs(self) -> Needs:
        """The requirements of this trainer, checked before anything runs."""
        return Needs()

    def check(self, spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
        """Refuse a model that this trainer cannot train, before anything is loaded.

        Args:
            spec: Architecture of the model.
            input_shape: Shape of one sample.

        Raises:
            ConfigError: The model does not fit. The message names the reason.
        """

    def init_state(self, start: Tree, received: Received) -> Trees | None:
        """Return a client's state before its first round, or None if it keeps no state.

        Args:
            start: The parameters that the client will train, later ``ctx.start``.
            received: The whole model that the client receives, later ``ctx.received``.
        """
        return None

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        """Compute the scalar training loss: the task's loss plus the method's terms.

        Args:
            net: The network.
            params: Its parameters.
            buffers: Its buffers.
            batch: Inputs and targets.
            ctx: The context of the client's round.

        Returns:
            The loss, or a `Measured` if the trainer measures named scalars.
        """
        return ctx.task.loss(net, params, buffers, batch, ctx.noise)

    def grad(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> tuple[Tree, Tensor | Measured]:
        """Compute the loss's gradient with respect to the parameters that require one.

        Returns:
            The gradient, and the detached return value of `loss`.
        """
        found = self.loss(net, params, buffers, batch, ctx)
        live = {name: value for name, value in params.items() if value.requires_grad}
        if not isinstance(found, Measured):
            return gradient(found, live), found.detach()
        scalars = {name: value.detach() for name, value in found.scalars.items()}
        return gradient(found.loss, live), Measured(found.loss.detach(), scalars)

    def feature_term(self) -> FeatureTerm | None:
        """Return the closed form of everything that `loss` adds to the task's loss.

        None means that `loss` adds nothing. Kernels with a hand-written backward pass
        use this hook. They train only with trainers whose `loss` and `feature_term` are
        defined in the same class. If the added term has no closed form, override only
        `loss`.
        """
        return None

    def ascent(self, ctx: Ctx) -> Ascent | None:
        """Return the point at which gradients are taken, or None for w.

        The SAM family overrides it.
        """
        return None

    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        """Return the change of this round's gradients before clipping, or None.

        Examples are a proximal pull, a control variate and client momentum.
        """
        return None

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        """Return the gradient after a change that `adjustment` cannot express.

        The hook runs before clipping.
        """
        return grad

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        """Return the parameters after a change that follows the optimizer's step.

        The change does not enter the optimizer's momentum.
        """
        return params

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        """Return what a client sends and stores after its round.

        It must not change `params` and `buffers`, which are the model that is sent.

        Args:
            params: The trained parameters, without frozen ones.
            buffers: The buffers after training.
            ctx: The context of the client's round.

        Returns:
            The payload for the server, and the new client state or None.
        """
        return {}, None

    def init_shared(self, start: Tree) -> Trees:
        """Return the trees that the server stores for this trainer, as of round 0.

        They are broadcast to every client.

        Args:
            start: The parameters that are trained.
        """
        return {}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        """The weights with which the server averages the clients' payloads.

        ``uniform``: equal weights. ``models``: the aggregation weights p_i.
        """
        return "uniform"

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        """Return the server's trees after a round. The model itself does not change.

        Args:
            shared: The trees before the round.
            payload_mean: Mean of the participants' payloads with the weights
                `payload_weights`.
            update: The server's step of this round.
            stats: Statistics of the round.
        """
        return shared

    def normalizer(self, tau: int, local_training: LocalTraining) -> float:
        """Return how far `tau` steps with a constant unit gradient move the weights.

        The distance is in units of lr. By Wang et al. (2020) it is ``tau`` for plain
        SGD. For SGD with momentum rho it is
        ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``.

        Args:
            tau: Number of local steps.
            local_training: The local training of the round.
        """
        rho = local_training.momentum
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
