"""From a run's rows to its numbers: last, best, mean of the last ten, headline, rounds to target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from fedexp.core.errors import FedexpError
from fedexp.running.experiment import Experiment


def summarise(rows: Sequence[dict[str, Any]], experiment: Experiment) -> dict[str, Any]:
    """The result's metrics.

    Args:
        rows: ``metrics.jsonl``.

    ``best`` looks at the test set over rounds and is an oracle: it is also listed under ``oracle/`` and is never the
    headline. ``mean_last_10`` is over evaluated rounds.
    """
    name, rule, target = experiment.headline, experiment.config.headline.rule, experiment.config.stop.target
    higher = experiment.task.higher_is_better
    evaluated = [row for row in rows if name in row]
    if not evaluated:
        raise FedexpError(
            "the run delivered no model to evaluate: no client ever took part", where="partition, sampling"
        )
    measured = [key for key in evaluated[-1] if key.startswith(("test/", "val/"))]
    last = {key: value for key, value in evaluated[-1].items() if key not in ("round", "step")}
    tail = evaluated[-10:]
    means = {key: statistics.fmean(row[key] for row in tail) for key in measured}
    best = {key: _best([row[key] for row in evaluated], higher(key)) for key in measured}
    if rule == "last":
        value = last[name]
    elif rule == "mean_last_10":
        value = means[name]
    else:
        watch = name.replace("test/", "val/", 1)
        value = (max if higher(name) else min)(evaluated, key=lambda row: row[watch])[name]
    reached = target is not None and next(
        (row["round"] for row in evaluated if experiment.meets(row.get(experiment.stop_metric), target)), None
    )
    return {
        "headline": {"metric": name, "rule": rule, "value": value},
        "metrics": last,
        "best": best,
        "mean_last_10": means,
        **{f"oracle/{key}": value for key, value in best.items() if key.startswith("test/")},
        "rounds": rows[-1]["round"],
        "rounds_to_target": reached or None,
    }


def _best(values: list[float], higher_is_better: bool) -> float:
    usable = [value for value in values if not math.isnan(value)]
    return (max if higher_is_better else min)(usable) if usable else math.nan
