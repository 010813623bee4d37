"""Local optimizers on lists of tensors. Their steps equal those of ``torch.optim``.

``torch.optim`` itself is not used, because every client would need a new optimizer
object. The first call of ``torch.optim.SGD(...)`` takes longer than a whole round of a
small model. Every later call takes longer than a local step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedexp.core.local_training import LocalTraining


class LocalOptimizer:
    """The optimizer of one client for one round, or of several stacked clients.

    The tensors of stacked clients are joined along a first axis. Every operation is
    elementwise, so clients do not affect each other. The state of the optimizer is
    empty at first.

    Args:
        local_training: Local training that defines the optimizer and its constants.

    Attributes:
        steps_taken: Number of steps that have been taken.
    """

    def __init__(self, local_training: LocalTraining) -> None:
        self._local_training = local_training
        self.steps_taken = 0
        # The optimizer's state, a list of entries with one tensor per parameter:
        # - Adam: first and second moments.
        # - AMSGrad: first and second moments, and the maxima of the second moments.
        # - RMSprop: second moments.
        # - SGD: momentum buffers, or no entry if the momentum is 0.
        self._averages: list[list[Tensor]] = []

    def start(self, like: list[Tensor]) -> None:
        """Set the optimizer's state to zeros, in the shapes and layouts of `like`."""
        count = {"adam": 2, "amsgrad": 3, "rmsprop": 1}.get(
            self._local_training.optimizer, 1 if self._local_training.momentum else 0
        )
        self._averages = [[torch.zeros_like(value) for value in like] for _ in range(count)]

    def of_clients(self, clients: slice) -> LocalOptimizer:
        """Return an optimizer for some of the stacked clients.

        Its state is a view of this optimizer's state. Call `start` first, because the
        state must exist.
        """
        part = LocalOptimizer(self._local_training)
        part._averages = [[value[clients] for value in values] for values in self._averages]
        return part

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Take a step: change `params` in place. `grads` do not change."""
        local_training = self._local_training
        if not self._averages:
            self.start(grads)
        self.steps_taken += 1
        if local_training.optimizer in ("adam", "amsgrad"):
            first, second, *largest = self._averages
            adam_step(
                params,
                grads,
                first,
                second,
                self.steps_taken,
                local_training.lr,
                local_training.betas,
                local_training.eps,
                *largest,
            )
        elif local_training.optimizer == "rmsprop":
            rmsprop_step(
                params,
                grads,
                self._averages[0],
                local_training.lr,
                local_training.betas[1],
                local_training.eps,
            )
        else:
            buffer = self._averages[0] if local_training.momentum else []
            sgd_step(params, grads, buffer, local_training.lr, local_training.momentum)


def sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    buffer: list[Tensor],
    lr: float,
    momentum: float,
    nesterov: bool = False,
) -> None:
    """Take a step of SGD in place: ``b = momentum * b + g``, ``w -= lr * b``.

    Here w is `params`, g is `grads`, and b is `buffer`, which starts at zero. With
    `nesterov`, the second equation is ``w -= lr * (g + momentum * b)``. If the momentum
    is 0, the step is ``w -= lr * g``, and the buffer is not used.
    """
    direction = grads
    if momentum:
        torch._foreach_mul_(buffer, momentum)
        torch._foreach_add_(buffer, grads)
        direction = list(torch._foreach_add(grads, buffer, alpha=momentum)) if nesterov else buffer
    torch._foreach_add_(params, direction, alpha=-lr)


def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    largest: list[Tensor] | None = None,
) -> None:
    """Take a step of Adam with bias correction, in place.

    Kingma & Ba 2015, Algorithm 1. Both moments start at zero.

    Args:
        params: Parameters, changed in place.
        grads: Gradients.
        first: First moments, changed in place.
        second: Second moments, changed in place.
        t: Number of the step, from 1.
        lr: Step size.
        betas: Decay rates of the moments.
        eps: Number that is added to the square root of the second moments.
        largest: Elementwise maxima of the second moments so far, which start at zero.
            They replace `second` in the step (AMSGrad, Reddi, Kale & Kumar 2018). As in
            torch, the maximum is taken before the bias correction. None for plain Adam.
    """
    beta_1, beta_2 = betas
    torch._foreach_lerp_(first, grads, 1 - beta_1)
    torch._foreach_mul_(second, beta_2)
    torch._foreach_addcmul_(second, grads, grads, value=1 - beta_2)
    if largest is not None:
        torch._foreach_maximum_(largest, second)
    denominator = torch._foreach_sqrt(second if largest is None else largest)
    torch._foreach_div_(denominator, (1 - beta_2**t) ** 0.5)
    torch._foreach_add_(denominator, eps)
    torch._foreach_addcdiv_(params, first, denominator, value=-lr / (1 - beta_1**t))


def rmsprop_step(
    params: list[Tensor],
    grads: list[Tensor],
    second: list[Tensor],
    lr: float,
    alpha: float,
    eps: float,
) -> None:
    """Take a step of RMSprop in place (Hinton, Srivastava & Swersky 2012).

    The step is ``v = alpha v + (1 - alpha) g^2``, ``w -= lr g / (sqrt(v) + eps)``. Here
    w is `params`, g is `grads`, and v is `second`, which starts at zero. As in torch,
    eps is outside the square root.
    """
    torch._foreach_mul_(second, alpha)
    torch._foreach_addcmul_(second, grads, grads, value=1 - alpha)
    denominator = torch._foreach_sqrt(second)
    torch._foreach_add_(denominator, eps)
    torch._foreach_addcdiv_(params, grads, denominator, value=-lr)
