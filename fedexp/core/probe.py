"""Probes: questions of an aggregator about a local model and its client's data.

The answers go up besides the weights.
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
    """Recorded facts of a client's training samples. None means that a fact is unknown.

    Args:
        num_examples: Number of samples.
        class_counts: Number of samples of each class.
    """

    num_examples: int | None = None
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Probe(ABC):
    """A pure function of a local model, its client's data and a seed.

    It runs after training, in the place where the data are.
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
            index: (n,) int64 positions of the client's samples in the pool, on the same
                device.
            seed: Seed of random numbers.
        """

    def from_record(self, record: ClientRecord) -> Tree | None:
        """Return the answer on the CPU if `record` holds it, else None.

        With an answer the client's data are not used.
        """
        return None
