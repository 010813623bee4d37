"""Optimizers whose state is passed in and returned.

`Optimizer.step` takes parameters and a state, and returns new parameters and a new
state. It does not change its arguments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.aggregator import State
from fedexp.core.build import require, require_not_negative, require_positive
from fedexp.core.kernel import Vectors, clipped
from fedexp.core.local_optimizers import adam_step, sgd_step
from fedexp.core.trees import Tree


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """The base of optimizers that compute the same steps as torch.optim.

    In the config, a field of this type is a node whose ``_target_`` names the class.

    Args:
        weight_decay: Coupled weight decay. After clipping, the gradient g is replaced
            by ``g + weight_decay * w``, where w are the parameters.
        clip: Upper bound of the gradient's norm. The norm is over all tensors except
            those in the argument `unclipped` of `step`. None: no clipping.
    """

    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        require_not_negative(self, "weight_decay")
        require(
            self.clip is None or self.clip > 0, f"clip must be positive or null, got {self.clip}"
        )

    @abstractmethod
    def init(self, params: Tree) -> State:
        """Return the optimizer's state before the first step.

        It consists of trees and numbers. The caller stores it.
        """

    def step(
        self,
        params: Tree,
        grads: Tree,
        state: State,
        lr: float,
        unclipped: Collection[str] = (),
    ) -> tuple[Tree, State]:
        """Return the parameters and the state after one step of size `lr`.

        Args:
            params: Parameters.
            grads: Gradient of the loss with respect to `params`, with the same keys.
            state: State before the step.
            lr: Step size.
            unclipped: Names of the parameters whose gradients `clip` does not bound.
        """
        params = trees.clone(params)
        grads = dict(zip(params, trees.tensors(grads, params), strict=True))
        state = {
            key: trees.clone(value) if isinstance(value, dict) else value
            for key, value in state.items()
        }
        direction = list(grads.values())

        if self.clip is not None:
            bounded = [name for name in grads if name not in unclipped]
            scaled = clipped([grads[name] for name in bounded], self.clip, Vectors)
            direction = list({**grads, **dict(zip(bounded, scaled, strict=True))}.values())

        if self.weight_decay:
            direction = list(
                torch._foreach_add(direction, list(params.values()), alpha=self.weight_decay)
            )

        return params, self._move(list(params.values()), direction, state, lr)

    @abstractmethod
    def _move(
        self, params: list[Tensor], direction: list[Tensor], state: State, lr: float
    ) -> State:
        """Change `params` and `state` in place and return `state`."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """SGD as in torch.optim.SGD, with dampening 0."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1), got {self.momentum}")
        require(self.momentum > 0 or not self.nesterov, "nesterov needs momentum above 0")

    def init(self, params: Tree) -> State:
        return {"buffer": trees.zeros_like(params)} if self.momentum else {}

    def _move(
        self, params: list[Tensor], direction: list[Tensor], state: State, lr: float
    ) -> State:
        buffers = trees.tensors(state.get("buffer", {}))
        sgd_step(params, direction, buffers, lr, self.momentum, self.nesterov)
        return state


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam as in torch.optim.Adam."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            all(0 <= b < 1 for b in self.betas), f"betas must be in [0, 1), got {list(self.betas)}"
        )
        require_positive(self, "eps")

    def init(self, params: Tree) -> State:
        return {"t": 0, "first": trees.zeros_like(params), "second": trees.zeros_like(params)}

    def _move(
        self, params: list[Tensor], direction: list[Tensor], state: State, lr: float
    ) -> State:
        state["t"] += 1
        first, second = (list(state[name].values()) for name in ("first", "second"))
        adam_step(params, direction, first, second, state["t"], lr, self.betas, self.eps)
        return state


def cosine(lr: float, step: int, steps: int, end: float = 0.0) -> float:
    """Return the step size of a cosine schedule that falls from `lr` to `end`.

    `step` counts from 0. Step `steps` and all later steps have the step size `end`.
    """
    return end + (lr - end) * (1 + math.cos(math.pi * min(step, steps) / steps)) / 2
