"""Local optimizers on lists of tensors, equal to torch.optim's but without building an optimizer object a client.

``torch.optim.SGD(...)`` costs more than a whole round of a small model the first time, and more than a step after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedexp.core.budget import Budget


class LocalOptimizer(ABC):
    """One client's optimizer for one round, or that of several stacked clients: every operation is elementwise."""

    @abstractmethod
    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Change `params` in place; `grads` are left alone."""

    @abstractmethod
    def keep(self, count: int) -> None:
        """Go on with the first `count` of the stacked clients."""


def make_optimizer(budget: Budget) -> LocalOptimizer:
    """A fresh optimizer; its state starts empty."""
    return Adam(budget) if budget.optimizer == "adam" else Sgd(budget)


class Sgd(LocalOptimizer):
    """`momentum_step`; without momentum, ``w -= lr * g``."""

    def __init__(self, budget: Budget) -> None:
        self._lr, self._momentum = budget.lr, budget.momentum
        self._buffer: list[Tensor] = []

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if not self._momentum:
            torch._foreach_add_(params, grads, alpha=-self._lr)
            return
        if not self._buffer:
            self._buffer = [torch.zeros_like(g) for g in grads]
        momentum_step(params, grads, self._buffer, self._lr, self._momentum)

    def keep(self, count: int) -> None:
        self._buffer = [b[:count] for b in self._buffer]


class Adam(LocalOptimizer):
    """`adam_step`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []
        self._t = 0

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if not self._first:
            self._first = [torch.zeros_like(g) for g in grads]
            self._second = [torch.zeros_like(g) for g in grads]
        self._t += 1
        budget = self._budget
        adam_step(params, grads, self._first, self._second, self._t, budget.lr, budget.betas, budget.eps)

    def keep(self, count: int) -> None:
        self._first = [value[:count] for value in self._first]
        self._second = [value[:count] for value in self._second]


def momentum_step(
    params: list[Tensor], grads: list[Tensor], buffer: list[Tensor], lr: float, momentum: float, nesterov: bool = False
) -> None:
    """``b = momentum * b + g``, ``w -= lr * b`` (nesterov: ``w -= lr * (g + momentum * b)``), in place; b starts at zero."""
    torch._foreach_mul_(buffer, momentum)
    torch._foreach_add_(buffer, grads)
    direction = torch._foreach_add(grads, buffer, alpha=momentum) if nesterov else buffer
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
) -> None:
    """Step `t` (from 1) of Adam with bias correction (Kingma & Ba 2015, Algorithm 1), in place; both moments start at zero."""
    beta_1, beta_2 = betas
    torch._foreach_lerp_(first, grads, 1 - beta_1)
    torch._foreach_mul_(second, beta_2)
    torch._foreach_addcmul_(second, grads, grads, value=1 - beta_2)
    denominator = torch._foreach_sqrt(second)
    torch._foreach_div_(denominator, (1 - beta_2**t) ** 0.5)
    torch._foreach_add_(denominator, eps)
    torch._foreach_addcdiv_(params, first, denominator, value=-lr / (1 - beta_1**t))
