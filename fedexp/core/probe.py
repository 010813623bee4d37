"""Probes: functions that an aggregator asks clients to compute.

The arguments of a probe are a local model and the client's data. The client sends the
result, which is called the answer, to the server in addition to the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedexp.core.data import Samples
from fedexp.core.net import Net
from fedexp.core.task import Task
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class ClientRecord:
    """Counts of a client's training samples, as far as they are known.

    Args:
        num_examples: Number of samples, or None if it is unknown.
        class_counts: Number of samples of each class, or None if it is unknown.
    """

    num_examples: int | None = None
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Probe(ABC):
    """A pure function of a local model, its client's data and a seed.

    It runs after training, in a process that has the client's data.
    """

    # The key of the answer in `ClientResult.probes`.
    name: ClassVar[str]

    @abstractmethod
    def __call__(
        self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int
    ) -> Tree:
        """Compute the answer that the client sends.

        Args:
            net: Network of ``weights.spec``, in evaluation mode.
            weights: The trained local model.
            task: The task, which defines the network's inputs.
            samples: The training pool.
            index: (n,) int64 positions of the client's samples in the pool, on the
                device of `samples`.
            seed: Seed of random numbers.
        """

    def from_record(self, record: ClientRecord) -> Tree | None:
        """Return the answer if it can be computed from `record`, else None.

        The tensors of the answer are on the CPU. If this method returns an answer, the
        probe does not run on the client's data.
        """
        return None
