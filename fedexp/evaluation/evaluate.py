"""Evaluation of a method's outcome (its models) on a split of the data.

The names of the metrics contain the split and the kind of the outcome: ``global``,
``ensemble`` or ``local``.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedexp.core.data import Samples
from fedexp.core.device import wide
from fedexp.core.metrics import deviation
from fedexp.core.net import Net
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.result_check import check_totals, checked_task_metrics
from fedexp.core.task import Batch, Metrics, Task
from fedexp.core.weights import Weights, by_spec

# Endings of metric names by the kind of the outcome. If the outcome is "local", each
# metric has three values: mean, standard deviation and minimum over the models.
ENDINGS: dict[Delivers, tuple[str, ...]] = {
    "global": ("",),
    "ensemble": ("",),
    "local": ("_mean", "_std", "_min"),
}


def metric_names(task: Task, delivers: Delivers, split: str) -> list[str]:
    """Return the names of the metrics of an evaluation on `split`.

    By default, runs are compared by the metric with the first name.
    """
    return [
        f"{split}/{delivers}/{name}{ending}"
        for name in task.metric_names
        for ending in ENDINGS[delivers]
    ]


class Evaluator:
    """An evaluator of methods' outcomes.

    It caches networks, so that they need not be built for every evaluation.

    Args:
        task: Task that defines predictions and metrics.
        batch_size: Number of samples per forward pass.
    """

    def __init__(self, task: Task, batch_size: int) -> None:
        self.task = task
        self.batch_size = batch_size
        self._nets = by_spec(Net)

    def __call__(self, outcome: Outcome, samples: Samples, split: str) -> Metrics:
        """Measure an outcome on a split.

        Returns:
            Metrics by name. The names are ``<split>/global/*`` for one global model and
            ``<split>/ensemble/*`` for an ensemble. If there is one model per client,
            every model is measured on the whole split. The names are then
            ``<split>/local/*`` with the endings ``_mean``, ``_std`` and ``_min``, for
            the mean, the standard deviation and the minimum over the models. All three
            are NaN if a value is NaN. With an infinite value, the deviation is NaN.
        """
        if not outcome.models:
            return {}

        if outcome.kind != "local":
            measured = self._measure(outcome.models, outcome, samples)
            return {
                f"{split}/{outcome.kind}/{name}": measured[name] for name in self.task.metric_names
            }

        spread: list[float] = []
        for values in self.each(outcome, samples, split).values():
            # `min` would depend on the place of a NaN
            lowest = math.nan if any(map(math.isnan, values)) else min(values)
            spread += [statistics.fmean(values), deviation(values, is_sample=False), lowest]
        return dict(zip(metric_names(self.task, "local", split), spread, strict=True))

    def each(self, outcome: Outcome, samples: Samples, split: str) -> dict[str, list[float]]:
        """Measure every model separately on the whole split.

        Returns:
            Lists of values by metric name (``<split>/local/*``). A list has one value
            per model, in the order of the outcome's models. If there is one model per
            client, this is the order of the clients.
        """
        measured = [self._measure([model], outcome, samples) for model in outcome.models]
        return {
            f"{split}/local/{name}": [metrics[name] for metrics in measured]
            for name in self.task.metric_names
        }

    @torch.no_grad()
    def parts(
        self,
        models: Sequence[Weights],
        outcome: Outcome,
        samples: Samples,
        order: Tensor,
        bounds: Sequence[int],
    ) -> list[Metrics]:
        """Compute the task's metrics separately for each part of `samples`.

        A part is, for example, the samples of one class. One forward pass may contain
        samples of several parts.

        Args:
            models: The models of the outcome that are evaluated.
            outcome: The outcome, which defines how the models are combined.
            samples: Samples that are divided into parts.
            order: Positions in `samples`, (n,), int64. Part g has the positions
                ``order[bounds[g]:bounds[g + 1]]``.
            bounds: Ascending bounds of the parts in `order`. There is one bound more
                than there are parts.

        Returns:
            The metrics of each part. They are {} for an empty part.
        """
        nets = [self._net(model) for model in models]
        weights = None if outcome.weights is None else outcome.weights.to(order.device)
        outcome = replace(outcome, weights=weights)
        totals: list[dict[str, Tensor]] = [{} for _ in bounds[1:]]

        first = 0  # the first part that does not end before the batch
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            stop = start + len(index)
            y = samples.y.index_select(0, index)
            output = self._output(nets, models, outcome, Batch(samples.inputs(index), y))
            while first < len(totals) and bounds[first + 1] <= start:
                first += 1

            # Parts that begin after the batch are not visited. Otherwise, the time
            # would be quadratic in the number of parts
            for part in range(first, bisect.bisect_left(bounds, stop, hi=len(totals))):
                low, high, total = bounds[part], bounds[part + 1], totals[part]
                own = slice(max(0, low - start), min(len(index), high - start))
                if own.start < own.stop:
                    sums = self.task.totals(output[own], y[own])
                    check_totals(sums, self.task)
                    for name, value in sums.items():
                        total[name] = total[name] + value if name in total else value

        # Reading a number from a GPU waits for all its work, so all are read at once.
        values = [wide(value) for total in totals for value in total.values()]
        numbers = iter(torch.stack(values).tolist() if values else ())
        sizes = [high - low for low, high in itertools.pairwise(bounds)]
        return [
            self.task.metrics({name: next(numbers) for name in total}, size) if size else {}
            for total, size in zip(totals, sizes, strict=True)
        ]

    def _measure(self, models: Sequence[Weights], outcome: Outcome, samples: Samples) -> Metrics:
        order = torch.arange(len(samples), device=samples.y.device)
        measured = self.parts(models, outcome, samples, order, [0, len(samples)])[0]
        return checked_task_metrics(measured, self.task.metric_names, self.task)

    def _output(
        self, nets: Sequence[Net], models: Sequence[Weights], outcome: Outcome, batch: Batch
    ) -> Tensor:
        """Return the output of the model, or of the ensemble, for a batch."""
        inputs = self.task.inputs(batch)
        outputs = [
            self.task.predict(net, model.params, model.buffers, *inputs)
            for net, model in zip(nets, models, strict=True)
        ]
        return (
            self.task.combine(outputs, outcome.combine, outcome.weights)
            if outcome.kind == "ensemble"
            else outputs[0]
        )

    def _net(self, model: Weights) -> Net:
        first = next(iter(model.params.values()))
        net = self._nets(model.spec, first.device, first.dtype)
        net.train(False)
        return net
