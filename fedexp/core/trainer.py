"""The trainer interface: a client's local steps, and the related work of the server.

Named tensors, such as the parameters of a model, are called a tree
(`fedexp.core.trees`).
"""

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
from fedexp.core.result_check import check_loss
from fedexp.core.task import Batch, Task
from fedexp.core.torch_private import run_backward
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import ModelSpec

Hook = TypeVar("Hook", bound=Callable[..., Any])


def elementwise(hook: Hook) -> Hook:
    """Mark a trainer's method as elementwise. This is a decorator.

    The methods `adjustment`, `correct` and `after_step` of a `Trainer` can be marked. A
    marked method must fulfil two conditions:

    - It treats all elements of its tensors alike and independently. It uses no norms,
      means or indices.
    - It uses only the fields `start`, `shared`, `state`, `local_training` and `round`
      of the context. It does not use ``local_training.epochs``.

    An engine may call a marked method once for several clients, whose tensors are
    stacked along a first axis. Methods without the mark are called once per client.
    """
    hook.elementwise = True  # type: ignore[attr-defined]
    return hook


def gradient(loss: Tensor, params: Tree) -> Tree:
    """Compute the gradient of a scalar loss.

    If the loss does not depend on a parameter, its gradient is zero.

    Args:
        loss: Scalar tensor, the mean over the batch.
        params: Parameters that require a gradient, by name.

    Returns:
        One gradient per parameter, under the same names.
    """
    grads = run_backward(loss, tuple(params.values()))
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), grads, strict=True)
    }


class Received(NamedTuple):
    """All parameters and buffers of the model that a client receives.

    Frozen parameters are included.
    """

    params: Tree
    buffers: Tree


class Measured(NamedTuple):
    """A loss and further scalars that a trainer measures on a batch.

    Args:
        loss: Scalar training loss.
        scalars: Scalar tensors by name, with the same names at every step. They are
            logged as ``train/NAME``.
    """

    loss: Tensor
    scalars: Mapping[str, Tensor]


class Clock(Protocol):
    """The number of the local step that a client is at. Kernels advance it.

    Attributes:
        step: Number of the current step, from 0.
        epoch: Number of the current epoch, from 0.
    """

    step: int
    epoch: int


@dataclass(frozen=True, eq=False)
class Ctx:
    """The information that a trainer may read while a client trains in a round.

    Args:
        start: Those parameters of the received model that are trained, w^t.
        received: The whole received model.
        shared: Trees that the server broadcasts besides the model, by name.
        state: The client's state from earlier rounds.
        task: The task, which defines the loss.
        local_training: The local training of this round.
        round: Communication round, from 0.
        num_examples: Number of training samples, n_i.
        num_steps: Number of optimizer steps of this round, tau_i.
        net: The network that is trained.
        clock: The source of `step` and `epoch`.
        once: Function that avoids repeated work. ``once(name, make)`` returns the
            result of ``make()``. The first call in a local step computes the result,
            without a graph. Later calls in this step, for example for the second
            gradient of SAM, return the stored result. Use `once` for values that depend
            on the batch but not on trained parameters.
        noise: Function that returns uniform numbers in [0, 1) for a name and a shape.
            They depend on the client, the round and the step.
        full_gradient: Function that returns the mean gradient of the task's loss over
            the client's data at given parameters. The network is in training mode with
            the received buffers. The data are not augmented.
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
        """Number of the current local step in this round, from 0."""
        return self.clock.step

    @property
    def epoch(self) -> int:
        """Epoch of the current local step, from 0."""
        return self.clock.epoch

    @cached_property
    def class_counts(self) -> Tensor:
        """Number of the client's training samples of each class.

        It is counted at the first access.

        Returns:
            Counts of shape (classes,), int64, on the device.
        """
        return self.count_classes()

    @property
    def reference(self) -> Net:
        """A second network with the trained network's architecture, in evaluation mode.

        A call gets parameters and buffers as arguments and does not change them. For
        example, ``ctx.reference(*ctx.received, batch.x)`` is the output of the received
        model.
        """
        return self.net.beside(self.net.spec)

    def network(self, spec: ModelSpec) -> Net:
        """Return another network in evaluation mode.

        An example is a generator whose parameters and buffers the server broadcasts in
        `shared`.

        Args:
            spec: Architecture of the network.
        """
        return self.net.beside(spec)


@dataclass(frozen=True, eq=False)
class Adjustment:
    """A change of the gradient whose constants stay the same for a whole round.

    Let w be the trained parameters in the current step. Before clipping, the gradient g
    at w is replaced by ``gradient * g + pull * (w - toward) + shift``. After the
    optimizer's step, the parameters change by ``w -= lr * outside``. Most methods that
    change gradients can be expressed this way. Engines can apply an adjustment to the
    stacked gradients of several clients.

    Args:
        gradient: Factor of the gradient.
        pull: Factor of the difference ``w - toward``.
        toward: Parameters toward which w is pulled. None stands for the received
            parameters w^t.
        shift: Named tensors that are added to the gradient, or None.
        outside: Named tensors that are applied outside the optimizer, so without
            clipping, weight decay and momentum. None if there are none.
    """

    gradient: float = 1.0
    pull: float = 0.0
    toward: Tree | None = None
    shift: Tree | None = None
    outside: Tree | None = None


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The server's step in a round: the averaged update and the applied change.

    Both are differences of the trained parameters, new minus old.

    Args:
        mean: The aggregated client update that the server optimizer received.
        applied: The change that the server optimizer added to the weights.
    """

    mean: Tree
    applied: Tree


@dataclass(frozen=True)
class Ascent:
    """The constants of SAM's perturbation (Foret et al. 2021).

    The gradient of a local step is taken at ``w + e`` instead of w. The perturbation is
    ``e = rho * g / (||g|| + eps)``. Here w are the trained parameters, and g is the
    gradient at w. ``||g||`` is its norm over all trained parameters of one client. The
    gradients at w and at w + e use the same batch and the same random numbers. The
    logged loss and the statistics of BatchNorm are those at w. ``||e||`` is logged as
    ``train/perturbation``. The constants are the same for a whole round and for all
    clients.

    Args:
        rho: Radius of the perturbation.
        eps: Number that is added to the norm.
    """

    rho: float
    eps: float = 1e-12


class TermValue(NamedTuple):
    """The value of a `FeatureTerm` for a batch.

    Args:
        value: Value of the term.
        gradient: Gradient of the term with respect to the representation z.
        scalars: The scalars that the trainer's `loss` measures, by name.
    """

    value: Tensor
    gradient: Tensor
    scalars: Tree


@dataclass(frozen=True, eq=False)
class FeatureTerm:
    """The closed form of the terms that `Trainer.loss` adds to the task's loss.

    Their sum, here called the term, is a function of two representations of a batch.
    The function is called as ``of(z, received, share, task_gradient)``:

    - ``z`` is the representation of the batch by the trained model. Its shape is (...,
      b, d) for b samples and d features. The leading dimensions (...) stand for stacked
      clients, and are absent for one client.
    - ``received`` is the representation by the received model in evaluation mode. It
      has the shape of z.
    - ``share`` is the weight of a sample in the mean over its client's batch. It is
      ``1 / b``, or a tensor (..., b) that has zeros for padding.
    - ``task_gradient`` is a function without arguments. It returns the gradient of the
      task's loss with respect to z, in the shape of z.

    The function returns a `TermValue`. Its value and scalars have shape (...), one
    entry per client.

    Args:
        layer: The representation z: ``penultimate`` (the input of the network's head)
            or ``logits``.
        of: The function.
    """

    layer: Literal["penultimate", "logits"]
    of: Callable[[Tensor, Tensor, float | Tensor, Callable[[], Tensor]], TermValue]


@dataclass(frozen=True)
class RoundStats:
    """Statistics of a finished round, which server optimizers and trainers may use.

    The tuples have one entry per aggregated client, in client order.

    Args:
        round: Communication round, from 0.
        N: Number of clients that may take part.
        m: Number of clients whose results were aggregated.
        share: Weight of the m clients among all N clients, in (0, 1]. With equal
            weights it is m / N. Otherwise it is the fraction of all training samples
            that the m clients have.
        lr: Local step size of this round.
        lr_0: Local step size before the schedule: ``local.lr``.
        p: Weights with which the updates enter the merged update. They sum to 1. A
            client that the aggregator rejects has weight 0.
        tau: Numbers of local steps.
        squared_norms: Squared norms of the client updates, in float64. If a method
            divides the update of client i by a normaliser a_i before averaging, the
            norm is that of the quotient. Empty unless a plug-in needs the norms.
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
    """Local training, as methods (hooks) that a subclass may override.

    The hooks are pure functions. Hooks that are not overridden cost nothing. A trainer
    may also have tensors on the server, which are broadcast to the clients
    (`init_shared`, `update_shared`). A local step at the parameters w runs in this
    order:

    1. ``grad`` computes the gradient at w. If ``ascent`` defines a perturbation e,
       ``grad`` runs again at w + e, and w itself does not change.
    2. The gradient is changed by ``adjustment``, then by ``correct``.
    3. The gradient is clipped, weight decay is added, and the local optimizer steps.
    4. The field ``outside`` of ``adjustment`` is applied, then ``after_step``.

    Frozen parameters never change. ``adjustment`` and ``ascent`` are called once per
    round, before the first local step. Engines can train several clients as one stacked
    model, unless the trainer overrides `grad`. Clients of such a trainer run serially.
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
        """Return a client's state before its first round, or None for no state.

        Args:
            start: The parameters that the client will train (`Ctx.start`).
            received: The whole model that the client receives (`Ctx.received`).
        """
        return None

    def loss(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> Tensor | Measured:
        """Compute the scalar training loss: the task's loss plus the method's terms.

        Args:
            net: The network.
            params: Parameters of the network.
            buffers: Buffers of the network.
            batch: Inputs and targets.
            ctx: The context of the client's round.

        Returns:
            The loss, or a `Measured` if the trainer measures named scalars.
        """
        return ctx.task.loss(net, params, buffers, batch, ctx.noise)

    def check_loss(self, found: Tensor | Measured, task: Task) -> None:
        """Refuse a return value of `loss` that is not scalar.

        Args:
            found: The return value.
            task: The task. Without an own `loss`, the trainer returns the task's loss.

        Raises:
            FedexpError: A value does not fit. The message has file and line of `loss`.
        """
        measured = found if isinstance(found, Measured) else Measured(found, {})
        source = task if type(self).loss is Trainer.loss else self
        check_loss(measured.loss, measured.scalars, source)

    def grad(
        self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx
    ) -> tuple[Tree, Tensor | Measured]:
        """Compute the gradient of `loss` with respect to the trained parameters.

        These are the entries of `params` that require a gradient.

        Returns:
            The gradient, and the detached return value of `loss`.
        """
        found = self.loss(net, params, buffers, batch, ctx)
        live = {name: value for name, value in params.items() if value.requires_grad}
        self.check_loss(found, ctx.task)
        if not isinstance(found, Measured):
            return gradient(found, live), found.detach()
        scalars = {name: value.detach() for name, value in found.scalars.items()}
        return gradient(found.loss, live), Measured(found.loss.detach(), scalars)

    def feature_term(self) -> FeatureTerm | None:
        """Return the closed form of the terms that `loss` adds to the task's loss.

        None means that `loss` adds nothing. Kernels with a hand-written backward pass
        use this hook. They accept only trainers whose `loss` and `feature_term` are
        defined in the same class. If the terms have no closed form, override only
        `loss`. These kernels then do not accept the trainer.
        """
        return None

    def ascent(self, ctx: Ctx) -> Ascent | None:
        """Return the constants of SAM's perturbation, or None for no perturbation.

        Methods of the SAM family override this hook.
        """
        return None

    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        """Return a change of the gradients in this round, or None.

        Examples are a proximal pull, a control variate and client momentum.
        """
        return None

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        """Change the gradient in a way that `adjustment` cannot express, and return it.

        The hook runs before clipping.
        """
        return grad

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        """Change the parameters after the optimizer's step, and return them.

        The change does not affect the optimizer's momentum.
        """
        return params

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        """Return what a client sends in addition to the model, and what it stores.

        The hook runs after the last local step of a round. It must not change `params`
        and `buffers`, because they are the model that the client sends.

        Args:
            params: The trained parameters, without frozen ones.
            buffers: The buffers after training.
            ctx: The context of the client's round.

        Returns:
            The trees for the server (payload), and the trees of the new client state.
            Both are dicts of trees by name. These names contain no "/". If the trainer
            has `update_shared`, all clients of a round must send floating-point tensors
            with the same names and shapes. If the state is None, the client keeps its
            earlier state.
        """
        return {}, None

    def init_shared(self, start: Tree) -> Trees:
        """Return the tensors that the server stores for this trainer before round 0.

        They are broadcast to every client.

        Args:
            start: The parameters that are trained, with their initial values.
        """
        return {}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        """The kind of weights with which the server averages the clients' payloads.

        ``uniform`` means equal weights. ``models`` means the weights p_i with which the
        server averages the models.
        """
        return "uniform"

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        """Return the tensors that the server stores for this trainer after a round.

        This hook does not change the model.

        Args:
            shared: The tensors before the round.
            payload_mean: Mean of the payloads of the aggregated clients, with the
                weights `payload_weights`.
            update: The server's step of this round.
            stats: Statistics of the round.
        """
        return shared

    def normalizer(self, tau: int, local_training: LocalTraining) -> float:
        """Return the distance that `tau` steps with a constant unit gradient move w.

        The distance is in units of the step size (a_i in Wang et al. 2020).
        For plain SGD it is ``tau``. For SGD with momentum rho it is
        ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``.

        Args:
            tau: Number of local steps.
            local_training: The local training of the round.
        """
        rho = local_training.momentum
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
