"""The interface of a stacked kernel: the gradients of several clients, computed as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import StepNoise
from fedexp.core.net import Net
from fedexp.core.trainer import Adjustment
from fedexp.core.trees import Tree, Trees


class NotStackableError(Exception):
    """A trainer's loss cannot be computed for several clients at once."""


@dataclass(frozen=True, eq=False)
class StackBatch:
    """One step's batches of k clients.

    Args:
        x, y: (k, b, ...) inputs and (k, b) targets; rows beyond a client's own batch are padding.
        share: what each row counts in its client's mean: 1 / b, or (k, b) with zeros for padding where sizes differ.
        noises: each client's random numbers, set to this step.
    """

    x: Tensor
    y: Tensor
    share: float | Tensor
    noises: list[StepNoise]


@dataclass(eq=False)
class StackTrees:
    """The trees of k clients, each tensor with a leading axis of k; `start` and `shared` may repeat one client's.

    Args:
        live: the parameters that are trained; params: those and the frozen ones.
        state: the client states; empty where neither kernel nor hooks read them.
        num_steps: steps of each client in this round; None where they differ.
    """

    params: Tree
    live: Tree
    buffers: Tree
    start: Tree
    shared: Trees
    state: Trees
    num_steps: int | None


class StackKernel(ABC):
    """Computes gradients for one stack; made anew for each."""

    same_sizes: ClassVar[bool]  # must all clients of a stack have equally many samples?
    reads_state: ClassVar[bool]  # does it look at ``stack.state``?

    @classmethod
    @abstractmethod
    def fits(cls, job: ClientJob, net: Net) -> bool:
        """Whether it computes what the job's trainer, task and network say."""

    @abstractmethod
    def __init__(self, job: ClientJob, net: Net) -> None:
        """For a stack of jobs that agree with `job` in trainer, task, budget, network and frozen parameters."""

    @abstractmethod
    def gradients(self, stack: StackTrees, batch: StackBatch) -> tuple[Tree, Tensor]:
        """Gradients of every client's own loss by the names of ``stack.live``, and the (k,) losses."""

    def descend(self, stack: StackTrees, batch: StackBatch, adjustment: Adjustment | None) -> Tensor | None:
        """Take a whole step of plain SGD or heavy ball, in place, and return the (k,) losses; None: not offered.

        Asked for only where nothing but an adjustment happens between gradient and optimizer.
        """
        return None

    def keep(self, count: int) -> None:
        """Go on with the first `count` clients."""
