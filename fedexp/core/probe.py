"""Probes: functions of a local model and its client's data that an aggregator requests.

The client sends the results to the server in addition to the weights. The results are
called answers.
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
    """A record of what is known about a client's training samples.

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
            index: (n,) int64 positions of the client's samples in the pool, on the same
                device.
            seed: Seed of random numbers.
        """

    def from_record(self, record: ClientRecord) -> Tree | None:
        """Return the answer if `record` suffices to compute it, else None.

        The tensors of the answer are on the CPU. If there is an answer, the probe does
        not run on the client's data.
        """
        return None
