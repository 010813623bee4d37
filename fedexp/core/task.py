"""What a batch is, what its loss is and what is measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedexp.core.data import Noise, Targets
from fedexp.core.net import Net
from fedexp.core.trees import Tree

Metrics = dict[str, float]


class Batch(NamedTuple):
    """Normalised (and, in training, augmented) inputs (b, ...) and targets (b, ...), on the device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """Classification, segmentation, generative models ...: the part of an experiment that knows what an output means."""

    # Is `loss` the mean softmax cross-entropy of the net's logits and int64 labels?
    cross_entropy: ClassVar[bool] = False
    targets: ClassVar[Targets] = "labels"  # of the data sets that it is for
    # Bound of all metrics that are to be maximised; a target above it is refused
    highest: ClassVar[float] = math.inf

    @abstractmethod
    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        """Mean training loss of a batch (a scalar); random layers of the loss draw from `noise`."""

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the network is given of a batch outside training; conditional models are given labels, too."""
        return (batch.x,)

    @abstractmethod
    def predict(self, net: Net, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        """The model's output for `inputs` of a batch, or for unlabelled samples alone, in evaluation mode."""

    @abstractmethod
    def combine(self, outputs: Sequence[Tensor], rule: str, weights: Tensor | None) -> Tensor:
        """One output for an ensemble's several."""

    @abstractmethod
    def totals(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums over the batch (scalar tensors), which `metrics` divides once every batch is in."""

    @abstractmethod
    def metrics(self, totals: dict[str, float], count: int) -> Metrics:
        """Final values by name (``acc``, ``loss`` ...) from the summed `totals` of `count` samples."""

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """What `metrics` returns; the first is compared by default."""

    def higher_is_better(self, name: str) -> bool:
        """Whether metric `name` (with or without its prefixes) is to be maximised."""
        return "loss" not in name

    @abstractmethod
    def output_shape(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the model's output for one sample of a data set; the first number is what the model is told as its classes."""
