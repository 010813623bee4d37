"""Tracing: evaluation and storage of a method's intermediate models within a round.

`Tracer` implements the interface in `fedexp.core.trace`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fedexp.core.data import FederatedData, Samples
from fedexp.core.device import to_device
from fedexp.core.outcome import Outcome
from fedexp.core.trace import Trace
from fedexp.core.trees import Tree
from fedexp.evaluation.evaluate import Evaluator


@dataclass(eq=False)
class Traced:
    """The recorded values and models of one step.

    An aggregator passes on intermediate models in named series (see
    `fedexp.core.trace.Trace`).

    Args:
        rows: One row per evaluated iteration. A row has the number of the iteration in
            the round (``iteration``), the values that the method reports, and the
            metrics of each series. ``<series>/<metric>`` is measured on the test set.
            ``<series>/val/<metric>`` is measured on the validation samples, if there
            are any. If a series has one model per client, each metric is a list with
            one value per client. Such a series has ``<series>/train/<metric>`` instead
            of validation metrics, measured on each client's own training data.
        weights: Stored parameters, named ``<iteration>/<series>/<index>/<parameter>``.
            The index is the number of the model in the series.
        seconds: Seconds that evaluating and storing took.
    """

    rows: list[dict[str, Any]]
    weights: Tree
    seconds: float

    def of_step(self, within: int) -> dict[str, float]:
        """Return the finite float values of the step's only row, by name.

        The result is empty if `within` is 0 or the step was not evaluated. It is also
        empty for methods that have several iterations per step.

        Args:
            within: Number of the step within its round, from 0.
        """
        row = self.rows[0] if within and [row["iteration"] for row in self.rows] == [within] else {}
        return {name: v for name, v in row.items() if isinstance(v, float) and math.isfinite(v)}


class Tracer(Trace):
    """A receiver that evaluates models and stores weights at chosen iterations.

    Args:
        evaluator: Evaluator of the traced outcomes.
        data: Data on which the outcomes are evaluated.
        every: Every `every`-th iteration is evaluated. If 0, no iteration is evaluated.
        weights: Numbers of the iterations whose weights are stored.
    """

    def __init__(
        self, evaluator: Evaluator, data: FederatedData, every: int, weights: tuple[int, ...]
    ) -> None:
        self._evaluator = evaluator
        self._data = data
        self._every = every
        self._stored_iterations = weights
        self._traced = Traced([], {}, 0.0)

    def wants(self, iteration: int) -> bool:
        return (
            self._every > 0 and iteration % self._every == 0
        ) or iteration in self._stored_iterations

    def __call__(
        self,
        iteration: int,
        outcomes: Mapping[str, Outcome],
        clients: Sequence[int] = (),
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        began = time.perf_counter()

        if self._every > 0 and iteration % self._every == 0:
            row: dict[str, Any] = {"iteration": iteration, **values}
            for series, outcome in outcomes.items():
                row |= {
                    f"{series}/{name}": value
                    for name, value in self._values(outcome, clients).items()
                }
            self._traced.rows.append(row)

        if iteration in self._stored_iterations:
            for series, outcome in outcomes.items():
                for number, model in enumerate(outcome.models):
                    # Copies are stored, because the method may change tensors in place.
                    self._traced.weights |= {
                        f"{iteration}/{series}/{number}/{name}": value.to("cpu", copy=True)
                        for name, value in model.params.items()
                    }

        self._traced.seconds += time.perf_counter() - began

    def _values(self, outcome: Outcome, clients: Sequence[int]) -> dict[str, Any]:
        if outcome.kind != "local":
            found = _short(self._evaluator(outcome, self._data.test, ""))
            if self._data.val is None:
                return found
            val = _short(self._evaluator(outcome, self._data.val, ""))
            return found | {f"val/{name}": value for name, value in val.items()}

        values: dict[str, Any] = _short(self._evaluator.each(outcome, self._data.test, ""))

        own = [
            _short(self._evaluator(Outcome((model,), "global"), self._own(client), ""))
            for model, client in zip(outcome.models, clients, strict=True)
        ]
        return values | {f"train/{name}": [row[name] for row in own] for name in own[0]}

    def _own(self, client: int) -> Samples:
        train = self._data.train
        index = to_device(self._data.positions(client), train.x.device)
        return replace(
            train, x=train.x.index_select(0, index), y=train.y.index_select(0, index), augment=None
        )

    def take(self) -> Traced:
        """Return everything that was recorded since the last call of this method."""
        taken = self._traced
        self._traced = Traced([], {}, 0.0)
        return taken


def _short(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics with shorter names, without the prefixes for split and outcome."""
    return {name.rpartition("/")[2]: value for name, value in metrics.items()}
