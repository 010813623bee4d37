"""The trainer interface: what one client does in one step, and the small server half that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedexp.core.budget import Budget
from fedexp.core.data import Noise
from fedexp.core.needs import Needs
from fedexp.core.net import Net
from fedexp.core.task import Batch, Task
from fedexp.core.trees import Tree, Trees

_run_backward = torch.autograd.Variable._execution_engine.run_backward

Hook = TypeVar("Hook", bound=Callable[..., Any])


def elementwise(hook: Hook) -> Hook:
    """Mark a hook (`adjustment`, `correct`, `after_step`) that treats every number of its trees alike and by itself.

    It uses no norms, means or indices and, of the context, only `start`, `shared`, `state` and `budget`. Such a hook may
    be called with the trees of several clients stacked along a first axis; any other is called client by client.
    """
    hook.elementwise = True  # type: ignore[attr-defined]
    return hook


def gradient(loss: Tensor, params: Tree) -> Tree:
    """``torch.autograd.grad`` of a scalar, zeros for what it does not depend on.

    It asks the engine itself: the public function's checks of its arguments take a tenth of a small model's step.
    """
    if loss.numel() != 1:
        raise ValueError(f"a loss must be a scalar, the mean over the batch; got shape {tuple(loss.shape)}")
    grads = _run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        tuple(params.values()),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(params.items(), grads, strict=True)
    }


@dataclass(frozen=True, eq=False)
class Ctx:
    """What a trainer may know during a client's round.

    Args:
        start: the received parameters (w^t); shared: the server's trees; state: the client state from earlier rounds.
        num_steps: optimizer steps of this round (tau_i).
        noise: uniform [0, 1) numbers by name and shape, a function of client, round and step.
        full_gradient: mean task gradient over the whole local data at given parameters, in training mode.
    """

    start: Tree
    shared: Trees
    state: Mapping[str, Tree]
    task: Task
    budget: Budget
    num_steps: int
    noise: Noise
    full_gradient: Callable[[Tree], Tree]


@dataclass(frozen=True, eq=False)
class Adjustment:
    """``gradient * g + pull * (w - w^t) + shift`` in place of g; and, after the optimizer's step, ``w -= lr * outside``.

    Its parts stay the same for a whole round. Engines apply it without a copy of the gradient; most methods that change
    gradients can say it this way. `outside` stays out of clipping, weight decay and momentum.
    """

    gradient: float = 1.0
    pull: float = 0.0
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
class RoundStats:
    """Facts of a finished round that server halves and server optimizers use.

    Args:
        round: counted from 0; N: clients in all; m: clients whose results were aggregated.
        lr, lr_0: local step size of this round and of the first.
        p: aggregation weights, summing to 1; tau: local steps; both in client order.
        squared_norms: ||u_i||^2 of the updates, in float64, in client order, each as long as it entered the mean; empty
            unless a plug-in needs them.
    """

    round: int
    N: int
    m: int
    lr: float
    lr_0: float
    p: tuple[float, ...]
    tau: tuple[int, ...]
    squared_norms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trainer:
    """Local training as pure functions of trees. Override the hooks a method needs; the others cost nothing.

    A step is, in this order (spec: multi-round 1.2): ``grad``, ``adjustment``, ``correct``, clip, weight decay, local
    optimizer, ``after_step``; frozen parameters never change.
    """

    @property
    def needs(self) -> Needs:
        """What must hold for this trainer, checked before anything runs."""
        return Needs()

    def init_state(self, start: Tree) -> Trees | None:
        """A client state before its first round, from the received parameters that it will train; None: it keeps none."""
        return None

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        """Scalar training loss: the task's, plus the method's own terms."""
        return ctx.task.loss(net, params, buffers, batch, ctx.noise)

    def grad(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> tuple[Tree, Tensor]:
        """Gradient with respect to the parameters that require one, and the loss."""
        loss = self.loss(net, params, buffers, batch, ctx)
        return gradient(loss, {name: value for name, value in params.items() if value.requires_grad}), loss.detach()

    def adjustment(self, ctx: Ctx) -> Adjustment | None:
        """How this round's gradients are changed before clipping: proximal pull, control variate, client momentum."""
        return None

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        """Change the gradient before clipping in ways that `adjustment` cannot say."""
        return grad

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        """Change the parameters after the optimizer's step: a correction outside the momentum buffer."""
        return params

    def finish(self, params: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        """Payload for the server and the new client state, from the trained parameters."""
        return {}, None

    def init_shared(self, start: Tree) -> Trees:
        """The server half's trees before round 0, from the parameters that are trained; broadcast to every client."""
        return {}

    @property
    def payload_weights(self) -> Literal["uniform", "models"]:
        """Weights of the mean of payloads: each participant's alike, or the models' p_i."""
        return "uniform"

    def update_shared(self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats) -> Trees:
        """The server half after a round; it moves no weights.

        Args:
            payload_mean: mean of the participants' payloads, weighted as `payload_weights` says.
        """
        return shared

    def normalizer(self, tau: int, budget: Budget) -> float:
        """How far `tau` steps with a constant unit gradient move the weights, in units of lr.

        By Wang et al. 2020: ``tau`` for plain SGD, ``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)`` with momentum rho.
        """
        rho = budget.momentum
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
