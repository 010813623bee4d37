"""Metrics on parts of the data: the samples of each class or of each client.

These metrics show differences that a mean over a whole split hides. They are measured
only if the config enables them.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fedexp.core.data import FederatedData, Samples
from fedexp.core.errors import ConfigError
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.task import Metrics, Task
from fedexp.core.weights import Weights
from fedexp.data.partition import CutPartition
from fedexp.evaluation.evaluate import Evaluator

# Share of the clients, those with the worst metric, whose mean is ``_worst_10``.
WORST = 0.1


def class_names(task: Task, delivers: Delivers, split: str, classes: int) -> list[str]:
    """Return the names of the task's first metric on the samples of each class.

    The names have the form ``<split>/<delivers>/<metric>_of_class_<c>``.
    """
    return [f"{split}/{delivers}/{task.metric_names[0]}_of_class_{c}" for c in range(classes)]


def client_names(task: Task, split: str) -> list[str]:
    """Return the names of two statistics of the task's first metric over the clients.

    ``<split>/clients/<metric>_mean`` is the mean over the clients with samples in the
    split. ``<split>/clients/<metric>_worst_10`` is the mean over the worst 10 % of
    them.
    """
    return [f"{split}/clients/{task.metric_names[0]}_{ending}" for ending in ("mean", "worst_10")]


def is_part(metric: str) -> bool:
    """Return whether a metric is one of `class_names` or `client_names`."""
    return re.search(r"_of_class_\d+$|/clients/\w+_(mean|worst_10)$", metric) is not None


@dataclass(frozen=True, eq=False)
class Breakdown:
    """An evaluation of a method's outcome on each class and on each client's data.

    Args:
        evaluator: Evaluator that computes the metrics.
        data: Data of the run.
        classes: Whether the metrics of each class are measured.
        clients: Whether the metrics over clients are measured.
    """

    evaluator: Evaluator
    data: FederatedData
    classes: bool
    clients: bool

    def check(self, metrics: Iterable[str], delivers: Delivers) -> None:
        """Refuse metrics of a class if the class has no samples.

        Raises:
            ConfigError: One of `metrics` belongs to a class that a split does not
                contain.
        """
        for split, samples in (("test", self.data.test), ("val", self.data.val)):
            if not self.classes or samples is None:
                continue

            counts = torch.bincount(samples.y, minlength=self.data.num_classes).tolist()
            names = class_names(self.evaluator.task, delivers, split, self.data.num_classes)

            for c in (
                names.index(metric)
                for metric in metrics
                if metric in names and not counts[names.index(metric)]
            ):
                raise ConfigError(
                    f"'{names[c]}' cannot be measured: no {split} sample is of class {c}",
                    where="headline.metric, stop.metric",
                    expected="one of the classes "
                    f"{', '.join(str(k) for k, count in enumerate(counts) if count)}",
                )

    def __call__(self, outcome: Outcome) -> Metrics:
        """Measure an outcome by class and by client.

        Returns:
            Metrics by name. The metrics of `class_names` are measured on the test set
            and on the validation set, if there is one. Classes without samples are left
            out. The metrics of `client_names` are measured on the clients' training
            data (``train``), without augmentation, and on the validation samples that
            were held out from each client's data (``val``), if there are any.
        """
        if not outcome.models:
            return {}

        found: Metrics = {}
        for split, samples in (("test", self.data.test), ("val", self.data.val)):
            if self.classes and samples is not None:
                found |= self._of_classes(outcome, samples, split)

        if self.clients:
            partition, device = self.data.partition, self.data.train.x.device
            shares = [("train", partition.indices, partition.offsets)]
            if isinstance(partition, CutPartition) and len(partition.held):
                shares.append(("val", partition.held, partition.held_offsets))
            for split, indices, offsets in shares:
                found |= self._of_clients(
                    outcome, torch.from_numpy(indices).to(device), offsets.tolist(), split
                )
        return found

    def _of_classes(self, outcome: Outcome, samples: Samples, split: str) -> Metrics:
        counts = torch.bincount(samples.y, minlength=self.data.num_classes).tolist()
        values = self._values(
            outcome.models,
            outcome,
            samples,
            samples.y.argsort(stable=True),
            [0, *itertools.accumulate(counts)],
        )
        names = class_names(self.evaluator.task, outcome.kind, split, self.data.num_classes)
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def _of_clients(
        self, outcome: Outcome, order: torch.Tensor, offsets: list[int], split: str
    ) -> Metrics:
        """Measure the global model, or the ensemble, on the data of every client.

        If there is one model per client, each model is measured on the data of
        that client.
        """
        train = self.data.train
        if outcome.kind == "local":
            clients = outcome.clients or range(len(outcome.models))
            shares = [order[offsets[client] : offsets[client + 1]] for client in clients]
            values = [
                self._values([model], outcome, train, share, [0, len(share)])[0]
                for model, share in zip(outcome.models, shares, strict=True)
            ]
        else:
            values = self._values(outcome.models, outcome, train, order, offsets)

        task = self.evaluator.task
        known = sorted(
            (v for v in values if v is not None),
            reverse=not task.higher_is_better(task.metric_names[0]),
        )
        if not known:  # no measured client has samples in this split
            return {}

        worst = known[: math.ceil(WORST * len(known))]
        return dict(
            zip(client_names(task, split), map(statistics.fmean, (known, worst)), strict=True)
        )

    def _values(
        self,
        models: Sequence[Weights],
        outcome: Outcome,
        samples: Samples,
        order: torch.Tensor,
        bounds: Sequence[int],
    ) -> list[float | None]:
        """Return the task's first metric for each part of `samples`.

        The value of an empty part is None. The arguments are those of
        `Evaluator.parts`.
        """
        return [
            part.get(self.evaluator.task.metric_names[0])
            for part in self.evaluator.parts(models, outcome, samples, order, bounds)
        ]
