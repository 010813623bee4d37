"""Evaluation of an outcome on a split, under metric names that say what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from fedexp.core.aggregator import Outcome
from fedexp.core.data import Samples
from fedexp.core.models import ModelSpec, Net, Weights
from fedexp.core.task import Metrics, Task


class Evaluator:
    """Measures outcomes; keeps one network an architecture.

    Args:
        batch_size: inputs a forward pass.
    """

    def __init__(self, task: Task, batch_size: int) -> None:
        self.task = task
        self.batch_size = batch_size
        self._nets: dict[ModelSpec, Net] = {}

    def __call__(self, outcome: Outcome, samples: Samples, split: str) -> Metrics:
        """``<split>/global/*`` for one model, ``<split>/ensemble/*`` for an ensemble, ``<split>/local/*_mean|_std|_min``
        for one model a client (spread over clients; every model sees the whole split)."""
        if not outcome.models:
            return {}
        if outcome.kind == "model":
            return _named(f"{split}/global", self._measure(outcome.models, outcome, samples))
        if outcome.kind == "ensemble":
            return _named(f"{split}/ensemble", self._measure(outcome.models, outcome, samples))
        each = [self._measure([model], outcome, samples) for model in outcome.models]
        spread: Metrics = {}
        for name in each[0]:
            values = [metrics[name] for metrics in each]
            spread[f"{name}_mean"] = statistics.fmean(values)
            spread[f"{name}_std"] = statistics.pstdev(values)
            spread[f"{name}_min"] = min(values)
        return _named(f"{split}/local", spread)

    def headline(self, outcome_kind: str) -> str:
        """The metric that is compared by default for an outcome of this kind."""
        name = self.task.headline
        return {
            "model": f"test/global/{name}",
            "ensemble": f"test/ensemble/{name}",
            "per_client": f"test/local/{name}_mean",
        }[outcome_kind]

    @torch.no_grad()
    def _measure(self, models: Sequence[Weights], outcome: Outcome, samples: Samples) -> Metrics:
        totals: dict[str, torch.Tensor] = {}
        for start in range(0, len(samples), self.batch_size):
            part = slice(start, start + self.batch_size)
            x = samples.inputs(part)
            outputs = [self.task.predict(self._net(model), model.params, model.buffers, x) for model in models]
            output = outputs[0] if len(outputs) == 1 else self.task.combine(outputs, outcome.combine, outcome.weights)
            for name, value in self.task.totals(output, samples.y[part]).items():
                totals[name] = totals[name] + value if name in totals else value
        return self.task.metrics({name: float(value) for name, value in totals.items()}, len(samples))

    def _net(self, model: Weights) -> Net:
        if model.spec not in self._nets:
            first = next(iter(model.params.values()))
            self._nets[model.spec] = Net(model.spec, first.device, first.dtype)
            self._nets[model.spec].train(False)
        return self._nets[model.spec]


def _named(prefix: str, metrics: Metrics) -> Metrics:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
