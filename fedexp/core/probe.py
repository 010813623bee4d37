"""Probes: what an aggregator may ask about a trained local model and its client's data, beyond the weights."""

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
    """What was written down about a client's training samples; None: it was not.

    Args:
        num_examples: how many; class_counts: how many of each class.
    """

    num_examples: int | None = None
    class_counts: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Probe(ABC):
    """A pure function of a local model, its client's data and a seed; run after training, where the data are."""

    name: ClassVar[str]  # under which an aggregator finds it in `ClientResult.probes`

    @abstractmethod
    def __call__(
        self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int
    ) -> Tree:
        """What the client sends up.

        Args:
            net: of ``weights.spec``, in evaluation mode.
            task: says what the net is given of a batch.
            samples: the training pool; index: (n,) int64 positions of the client's samples in it, on the same device.
        """

    def from_record(self, record: ClientRecord) -> Tree | None:
        """The answer, on the CPU, where `record` says it: the client's data are not asked then."""
        return None
