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
    """``b = momentum * b + g`` (b starts as the first g), ``w -= lr * b``."""

    def __init__(self, budget: Budget) -> None:
        self._lr, self._momentum = budget.lr, budget.momentum
        self._buffer: list[Tensor] = []

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        if not self._momentum:
            torch._foreach_add_(params, grads, alpha=-self._lr)
            return
        if self._buffer:
            torch._foreach_mul_(self._buffer, self._momentum)
            torch._foreach_add_(self._buffer, grads)
        else:
            self._buffer = [g.clone() for g in grads]
        torch._foreach_add_(params, self._buffer, alpha=-self._lr)

    def keep(self, count: int) -> None:
        self._buffer = [b[:count] for b in self._buffer]


class Adam(LocalOptimizer):
    """Adam with bias correction (Kingma & Ba 2015, Algorithm 1)."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._first: list[Tensor] = []
        self._second: list[Tensor] = []
        self._t = 0

    def step(self, params: list[Tensor], grads: list[Tensor]) -> None:
        (beta_1, beta_2), eps, lr = self._budget.betas, self._budget.eps, self._budget.lr
        if not self._first:
            self._first = [torch.zeros_like(g) for g in grads]
            self._second = [torch.zeros_like(g) for g in grads]
        self._t += 1
        torch._foreach_lerp_(self._first, grads, 1 - beta_1)
        torch._foreach_mul_(self._second, beta_2)
        torch._foreach_addcmul_(self._second, grads, grads, value=1 - beta_2)
        denominator = torch._foreach_sqrt(self._second)
        torch._foreach_div_(denominator, (1 - beta_2**self._t) ** 0.5)
        torch._foreach_add_(denominator, eps)
        torch._foreach_addcdiv_(params, self._first, denominator, value=-lr / (1 - beta_1**self._t))

    def keep(self, count: int) -> None:
        self._first = [value[:count] for value in self._first]
        self._second = [value[:count] for value in self._second]
