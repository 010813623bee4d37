"""Interface of a stacked kernel.

Such a kernel computes the gradients of several clients at once.
"""

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
    """A computation of a trainer that cannot be done for several clients at once.

    The message gives the reason.
    """


class UnlikeJobsError(NotStackableError):
    """The jobs of a stack differ in a value that must be equal for all of them.

    Jobs of clients with equally many samples may still agree in the value.
    """


class UnlikeClientsError(Exception):
    """A loss has read a number that differs between the clients of a batch.

    Before raising this error, the kernel adds the name of the number to its attribute
    `alike`. It changes nothing else, so the step can be repeated with fewer clients.
    """


@dataclass(frozen=True, eq=False)
class StackBatch:
    """The batches of k clients in one step.

    The clients are consecutive in the stack. They all take the step of the same number.
    If the kernel does not pad, they are also in the same epoch. The longest of their
    batches has b rows, one per sample.

    Args:
        x: Inputs of shape (k, b, ...). Rows beyond a client's own batch are padding.
        y: Targets of shape (k, b, ...).
        share: Weight of each row in the mean loss of its client. If all clients have b
            rows, it is the number 1 / b. Otherwise it is a (k, b) tensor with zeros for
            padding.
        own: Context of each client at this step.
        clients: The clients, as a range of positions in the stack.
    """

    x: Tensor
    y: Tensor
    share: float | Tensor
    own: list[Ctx]
    clients: slice

    def of_clients(self, start: int, stop: int) -> StackBatch:
        """Return the batch of some of these clients, at positions in this batch."""
        rows = slice(start, stop)
        share = self.share[rows] if isinstance(self.share, Tensor) else self.share
        first = self.clients.start
        return StackBatch(
            self.x[rows], self.y[rows], share, self.own[rows], slice(first + start, first + stop)
        )


@dataclass(eq=False)
class StackTrees:
    """The trees of k clients. Each tensor has a leading axis of length k.

    Tensors of `received` and `shared` may be views that repeat one tensor for all
    clients.

    Args:
        params: Parameters of the clients, trained in place unless they are frozen.
        buffers: Buffers of the clients, changed in place.
        trained: Names of the parameters that are not frozen.
        received: Models that the clients received.
        shared: Trees that the server broadcast.
        state: Client states. Empty if no kernel and no hook reads them.
    """

    params: Tree
    buffers: Tree
    trained: tuple[str, ...]
    received: Received
    shared: Trees
    state: Trees

    @cached_property
    def live(self) -> Tree:
        """Parameters that are trained."""
        return {name: self.params[name] for name in self.trained}

    @cached_property
    def start(self) -> Tree:
        """The parameters of `live` as they were received."""
        return {name: self.received.params[name] for name in self.trained}


class StackedVectors(Vectors):
    """Operations on the tensors of k clients at once.

    Tensors have a leading axis of length k. Norms and factors have shape (k,).
    """

    @staticmethod
    def norm(tensors: list[Tensor]) -> Tensor:
        rows = [value.reshape(len(value), -1) for value in tensors]
        norms = [torch.linalg.vector_norm(row, dim=1) for row in rows]
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
    """Reshape factors of shape (k,) to multiply all entries of each client."""
    return factor.reshape(-1, *[1] * (value.dim() - 1))


class StackKernel(ABC):
    """A kernel that computes gradients for one stack. Each stack has its own kernel."""

    # Whether shorter batches are padded, so that all clients take a step together.
    # Without padding, only clients with batches of the same length take a step
    # together.
    pads: ClassVar[bool]
    # Names of numbers in a client's context that the loss reads. Clients that differ in
    # one of these numbers do not take steps together. The kernel adds the name of a
    # number when the loss reads it.
    alike: frozenset[str] = frozenset()

    @classmethod
    @abstractmethod
    def misfit(cls, job: ClientJob, net: Net) -> str | None:
        """Return why this kernel cannot compute the job, or None if it can.

        The kernel can compute the job if it returns exactly the gradients that the
        job's trainer, task and network define.
        """

    @classmethod
    def reads_context(cls, trainer: Trainer) -> bool:
        """Return whether the kernel reads ``stack.state``."""
        return False

    @abstractmethod
    def __init__(self, job: ClientJob, net: Net) -> None:
        """Prepare for a stack of jobs like `job`.

        All jobs of the stack have the same trainer, task, network and frozen
        parameters. They have the same local training, except for the number of epochs.
        """

    @abstractmethod
    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor | Measured]:
        """Return the gradients of each client's own loss, and the losses and scalars.

        The training statistics in ``stack.buffers`` are updated.

        Returns:
            The gradients by the names in ``stack.live``, and the losses and scalars of
            shape (k,), where k is the number of clients.
        """

    def gradients_uphill(
        self, stack: StackTrees, batch: StackBatch, ascent: Ascent
    ) -> tuple[Tree, Tensor | Measured, Tensor]:
        """Return the gradients after an ascent, and the losses and scalars before it.

        Returns:
            The gradients at the point w + e, the losses and scalars at w, and the norms
            of e. Here w are the parameters of a client, and e is the perturbation that
            `ascent` defines. Losses, scalars and norms have shape (k,), where k is the
            number of clients.
        """

        def gradient_at(there: Tree) -> Tree:
            moved = replace(
                stack, params={**stack.params, **there}, buffers=trees.clone(stack.buffers)
            )
            try:
                return self.gradients(moved, batch)[0]
            except UnlikeClientsError as error:
                # The first pass changed the buffers, so the step cannot be repeated.
                raise UnlikeJobsError(
                    f"its loss reads {error} in the second pass of a step only"
                ) from error

        grads, loss = self.gradients(stack, batch)
        grads, norm = ascended(ascent, grads, stack.live, gradient_at, StackedVectors)
        return grads, loss, norm


class FusedKernel(StackKernel):
    """A kernel that can compute the gradient and take the step in one operation."""

    @property
    @abstractmethod
    def fuses_ascent(self) -> bool:
        """Whether `descend` accepts an ascent."""

    @abstractmethod
    def descend(
        self,
        stack: StackTrees,
        batch: StackBatch,
        adjustment: Adjustment | None,
        ascent: Ascent | None,
    ) -> dict[str, Tensor]:
        """Take a whole step of plain SGD or of SGD with heavy-ball momentum, in place.

        The optimizer must use the gradient directly, without operations such as
        clipping in between. Only an ascent and an adjustment are allowed.

        Returns:
            The losses and all other measured values by name. Each has shape (k,), where
            k is the number of clients.
        """
