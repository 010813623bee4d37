"""Detection of runs whose accuracy is at chance level.

Such a run has not learned. Its number still counts in every mean and test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedexp.core.aggregator import Aggregator
from fedexp.core.build import locate
from fedexp.core.renames import renames
from fedexp.tables.record import RunRecord
from fedexp.tables.report.configs import flat
from fedexp.tables.schema import Column, Table

# Accuracy on the test data if the largest class is always predicted, by option of
# `dataset`. MNIST's classes differ slightly in size. In the other data sets, all
# classes have the same size.
_CHANCE = {
    "mnist": 0.1135,
    "fashion_mnist": 0.1,
    "cifar10": 0.1,
    "cifar10_jpeg": 0.1,
    "cifar100": 0.01,
}
# An accuracy counts as at chance level if it is at most (1 + margin) times the chance
# level.
_MARGIN = 0.1
# Matches paths in a result at which the accuracy of a model is stored.
_ACCURACY = re.compile(r"(best|metrics|per_client|rounds)\..*/acc(\.\d+)?")


def is_at_chance(
    table: Table, column: Column, run: RunRecord, config: Mapping[str, Any] | None
) -> bool:
    """Return whether a trained model of a run is at chance level.

    The answer is False if the chance level is not known, or if the column's number is
    not an accuracy. It is also False if the method only merges models, because a merged
    model may be at chance level although every client has learned.

    Args:
        table: The table.
        column: The run's column.
        run: The run.
        config: Config of the run. None: it is not known.
    """
    chance = _CHANCE.get(run.dataset)
    path = table.value_path(column)
    is_accuracy = (
        run.metric.endswith("/acc") if path == "headline.value" else _ACCURACY.fullmatch(path)
    )
    if chance is None or run.value is None or not is_accuracy or config is None:
        return False
    accuracy = run.value / table.headline.scale
    return accuracy <= chance * (1 + _MARGIN) and _is_trained(column, flat(config))


def _is_trained(column: Column, config: Mapping[str, Any]) -> bool:
    """Return whether the column's model is trained, and not only merged from others.

    A model is trained if the run has several rounds, if it is the local model of one
    client, or if the server trains it.
    """
    if column.role == "local" or config["rounds"] > 1:
        return True
    path = config["aggregator._target_"]
    kind = locate(renames().new_path(path) or path, Aggregator, "aggregator")
    return bool(getattr(kind, "trains_on_server", False))
