"""The interface of a stacked kernel: the gradients of several clients, computed as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import Vectors, ascended
from fedexp.core.net import Net
from fedexp.core.trainer import Adjustment, Ascent, Ctx, Measured, Received, Trainer
from fedexp.core.trees import Tree, Trees


class NotStackableError(Exception):
    """What a trainer does cannot be done for several clients at once; says why."""


@dataclass(frozen=True, eq=False)
class StackBatch:
    """One step's batches of k clients.

    Args:
        x, y: (k, b, ...) inputs and (k, b) targets; rows beyond a client's own batch are padding.
        share: what each row counts in its client's mean: 1 / b, or (k, b) with zeros for padding where sizes differ.
        own: each client's context, at this step.
    """

    x: Tensor
    y: Tensor
    share: float | Tensor
    own: list[Ctx]


@dataclass(eq=False)
class StackTrees:
    """The trees of k clients, each tensor with a leading axis of k; `received` and `shared` may repeat one client's.

    Args:
        params, buffers: what the clients train on, in place; trained: names of the parameters that are not frozen.
        state: the client states; empty where neither kernel nor hooks read them.
    """

    params: Tree
    buffers: Tree
    trained: tuple[str, ...]
    received: Received
    shared: Trees
    state: Trees

    @cached_property
    def live(self) -> Tree:
        """The parameters that are trained."""
        return {name: self.params[name] for name in self.trained}

    @cached_property
    def start(self) -> Tree:
        """Those of `live` as `received`."""
        return {name: self.received.params[name] for name in self.trained}


class StackedVectors(Vectors):
    """One vector a client: tensors have a leading axis of k, norms and factors are (k,)."""

    @staticmethod
    def norm(tensors: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(value.flatten(1), dim=1) for value in tensors]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return norm

    @staticmethod
    def scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
        return [value * _each(factor, value) for value in tensors]

    @staticmethod
    def moved(tensors: list[Tensor], along: list[Tensor], factor: Tensor) -> list[Tensor]:
        return [
            value.addcmul(step, _each(factor, value))
            for value, step in zip(tensors, along, strict=True)
        ]


def _each(factor: Tensor, value: Tensor) -> Tensor:
    """A client's own factor for all of its entries in `value`."""
    return factor.reshape(-1, *[1] * (value.dim() - 1))


class StackKernel(ABC):
    """Computes gradients for one stack; made anew for each."""

    same_sizes: ClassVar[bool]  # must all clients of a stack have equally many samples?

    @classmethod
    @abstractmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        """Why it does not compute what the job's trainer, task and network say; None where it does."""

    @classmethod
    def reads_context(cls, trainer: Trainer) -> bool:
        """Whether it looks at ``stack.state``."""
        return False

    @abstractmethod
    def __init__(self, job: ClientJob, net: Net) -> None:
        """For a stack of jobs that agree with `job` in trainer, task, budget, network and frozen parameters."""

    @abstractmethod
    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        """Gradients of every client's own loss by the names of ``stack.live``, and the (k,) losses and scalars.

        Training statistics in ``stack.buffers`` move on.
        """

    def gradients_uphill(
        self, stack: StackTrees, batch: StackBatch, ascent: Ascent
    ) -> tuple[Tree, Tensor | Measured, Tensor]:
        """What `gradients` returns, the gradients being those at what `ascent` climbs to, and the (k,) norms of the climb."""

        def gradient_at(there: Tree) -> Tree:
            moved = replace(
                stack, params={**stack.params, **there}, buffers=trees.clone(stack.buffers)
            )
            return self.gradients(moved, batch)[0]

        grads, loss = self.gradients(stack, batch)
        grads, norm = ascended(ascent, grads, stack.live, gradient_at, StackedVectors)
        return grads, loss, norm

    def keep_first(self, count: int) -> None:
        """Go on with the first `count` clients."""


class FusedKernel(StackKernel):
    """A kernel that can take gradient and step as one."""

    @property
    @abstractmethod
    def fuses_ascent(self) -> bool:
        """Whether `descend` takes an ascent."""

    @abstractmethod
    def descend(
        self,
        stack: StackTrees,
        batch: StackBatch,
        adjustment: Adjustment | None,
        ascent: Ascent | None,
    ) -> dict[str, Tensor]:
        """Take a whole step of plain SGD or heavy ball, in place; the (k,) losses, and what else is measured, by name.

        Called only where nothing but an ascent and an adjustment happen between gradient and optimizer.
        """
