"""The probe that counts a client's training samples of each class.

A probe is a measurement at a client after local training.

Communication:
    Up: for each class c the number n_{i,c} of client i's samples, (classes,) integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.data import Samples, count_classes
from fedexp.core.jobs import ClientResult
from fedexp.core.net import Net
from fedexp.core.probe import ClientRecord, Probe
from fedexp.core.task import Task
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class ClassCounts(Probe):
    """The probe of class counts, for int64 labels 0 .. num_classes - 1.

    In segmentation tasks, whose targets are masks, all samples count as class 0.
    """

    num_classes: int

    name: ClassVar[str] = "class_counts"

    def __call__(
        self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int
    ) -> Tree:
        return {"n": count_classes(samples.labels(index), self.num_classes)}

    def from_record(self, record: ClientRecord) -> Tree | None:
        return None if record.class_counts is None else {"n": torch.tensor(record.class_counts)}


def counts(results: list[ClientResult]) -> Tensor:
    """Return the class counts in `results`, of shape (models, classes), int64."""
    return torch.stack([result.probes[ClassCounts.name]["n"] for result in results])
