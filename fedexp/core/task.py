"""The task interface: the loss and the metrics of a batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fedexp.core.data import Noise, Targets
from fedexp.core.errors import FedexpError
from fedexp.core.metrics import is_minimised
from fedexp.core.net import Net
from fedexp.core.trees import Tree
from fedexp.core.user_code import place_of_class

Metrics = dict[str, float]


def member_shares(stacked: Tensor, weights: Tensor | None) -> Tensor:
    """Return the shares of an ensemble's members, which sum to one.

    Args:
        stacked: The members' outputs, of shape (models, ...).
        weights: Weights of the members, or None for equal shares.

    Returns:
        Shares of shape (models, 1, ...), which multiply `stacked`.
    """
    shares = (
        stacked.new_full((len(stacked),), 1 / len(stacked))
        if weights is None
        else (weights.flatten() / weights.sum()).to(stacked)
    )
    return shares.reshape(-1, *[1] * (stacked.dim() - 1))


class Batch(NamedTuple):
    """A batch of samples on the training device.

    Args:
        x: Normalised inputs (b, ...). In training they are augmented.
        y: Targets (b, ...).
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """The learning problem. It defines the loss and metrics of a network's output.

    Examples are classification, segmentation and generative models.
    """

    # Whether `loss` is the mean softmax cross-entropy of logits and int64 labels.
    cross_entropy: ClassVar[bool] = False

    # Kind of targets that a data set for this task must have.
    targets: ClassVar[Targets] = "labels"

    # Upper bound of all metrics that are to be maximised. A target value in the config
    # must not exceed this bound.
    highest: ClassVar[float] = math.inf

    @abstractmethod
    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        """Compute the mean training loss of a batch, a scalar.

        Random layers of the loss draw from `noise`.
        """

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the network's inputs for a batch outside training.

        Conditional models also receive the labels.
        """
        return (batch.x,)

    def predict(self, net: Net, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        """Compute the model's output in evaluation mode.

        By default it is the network's output.

        Args:
            net: The network.
            params: Parameters of the network.
            buffers: Buffers of the network.
            inputs: The values that the method `inputs` returns. Without labels, only
                the samples.
        """
        return net(params, buffers, *inputs)

    @abstractmethod
    def combine(self, outputs: Sequence[Tensor], rule: str, weights: Tensor | None) -> Tensor:
        """Combine the outputs of an ensemble's members into one output.

        Args:
            outputs: One output per member.
            rule: ``logits`` or ``probs``, see `Outcome.combine`.
            weights: Weights of the members, see `Outcome.weights`, or None.
        """

    @abstractmethod
    def totals(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the sums of the metrics over a batch, as scalar tensors by name.

        The sums of all batches are added, and `metrics` then computes means from them.
        """

    def metrics(self, totals: dict[str, float], count: int) -> Metrics:
        """Compute the metrics of a data set by name (``acc``, ``loss`` ...).

        By default they are means over the samples.

        Args:
            totals: The values that the method `totals` returns, summed over all
                batches.
            count: Number of samples.
        """
        lacking = [name for name in self.metric_names if name not in totals]
        if lacking:
            raise FedexpError(
                f"a task's sums lack the metric '{lacking[0]}'",
                where=place_of_class(type(self)),
                expected=f"sums of {', '.join(self.metric_names)} (metric_names)",
                got=", ".join(totals) or "no sums",
                do="return a sum for every metric from `totals`, or override `metrics`",
            )
        return {name: totals[name] / count for name in self.metric_names}

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """Names of the values that `metrics` returns.

        The first is by default the headline metric, the main result of a run.
        """

    def higher_is_better(self, name: str) -> bool:
        """Return whether metric `name`, which may have prefixes, is to be maximised.

        By default, metrics are minimised if their name contains ``loss``, or if it is
        the name of an error, such as ``mse``. Prefixes (``test/global/``) and endings
        such as ``_mean`` and ``_worst_10`` do not count, see
        `fedexp.core.metrics.is_minimised`. A task with another metric that is minimised
        overrides this method.
        """
        return not is_minimised(name)

    def output_shape(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the model's output for one sample of a data set.

        By default the output has one entry per class. The first number of the shape is
        passed to the model as its number of classes.
        """
        return (num_classes,)
