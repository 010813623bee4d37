"""Local optimizers on lists of tensors, equal to torch.optim's but without building an optimizer object a client.

``torch.optim.SGD(...)`` costs more than a whole round of a small model the first time, and more than a step after that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedexp.core.jobs import Budget

Step = Callable[[list[Tensor], list[Tensor]], None]  # (parameters, changed in place; gradients, left alone)


def make_step(budget: Budget) -> Step:
    """One client's optimizer for one round; its state starts empty."""
    return _adam(budget) if budget.optimizer == "adam" else _sgd(budget)


def _sgd(budget: Budget) -> Step:
    """``b = momentum * b + g`` (b starts as the first g), ``w -= lr * b``."""
    lr, momentum = budget.lr, budget.momentum
    buffer: list[Tensor] = []

    def plain(params: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_add_(params, grads, alpha=-lr)

    def heavy_ball(params: list[Tensor], grads: list[Tensor]) -> None:
        if buffer:
            torch._foreach_mul_(buffer, momentum)
            torch._foreach_add_(buffer, grads)
        else:
            buffer.extend(g.clone() for g in grads)
        torch._foreach_add_(params, buffer, alpha=-lr)

    return heavy_ball if momentum else plain


def _adam(budget: Budget) -> Step:
    """Adam with bias correction (Kingma & Ba 2015, Algorithm 1)."""
    (beta_1, beta_2), eps, lr = budget.betas, budget.eps, budget.lr
    first: list[Tensor] = []
    second: list[Tensor] = []
    t = 0

    def step(params: list[Tensor], grads: list[Tensor]) -> None:
        nonlocal t
        if not first:
            first.extend(torch.zeros_like(g) for g in grads)
            second.extend(torch.zeros_like(g) for g in grads)
        t += 1
        torch._foreach_lerp_(first, grads, 1 - beta_1)
        torch._foreach_mul_(second, beta_2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta_2)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, (1 - beta_2**t) ** 0.5)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, first, denominator, value=-lr / (1 - beta_1**t))

    return step
