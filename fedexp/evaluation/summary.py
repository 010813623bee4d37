"""From a run's rows to its numbers: last, best, mean of the last ten, headline, rounds to target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from fedexp.core.errors import ConfigError, suggest


def summarise(
    rows: Sequence[dict[str, Any]],
    *,
    headline: str,
    rule: Literal["last", "mean_last_10", "best_on_val"],
    metric: str,
    stop_metric: str,
    target: float | None,
    higher_is_better: bool,
) -> dict[str, Any]:
    """The result's metrics.

    Args:
        rows: ``metrics.jsonl``; headline: the outcome's own metric, used where `metric` is ``auto``.

    ``best`` looks at the test set over rounds and is an oracle: it is also listed under ``oracle/`` and is never the
    headline. ``mean_last_10`` is over evaluated rounds.
    """
    name = headline if metric == "auto" else metric
    evaluated = [row for row in rows if headline in row]
    if not any(name in row for row in evaluated):
        known = [key for key in (evaluated[-1] if evaluated else {}) if "/" in key]
        raise ConfigError(f"no metric '{name}' was measured", where="headline.metric", do=suggest(name, known))
    measured = [key for key in evaluated[-1] if key.startswith(("test/", "val/"))]
    last = {key: value for key, value in evaluated[-1].items() if key != "round"}
    tail = evaluated[-10:]
    means = {key: statistics.fmean(row[key] for row in tail) for key in measured}
    best = {key: _best([row[key] for row in evaluated], key, higher_is_better) for key in measured}
    oracle = {f"oracle/{key}": value for key, value in best.items() if key.startswith("test/")}
    if rule == "last":
        value = last[name]
    elif rule == "mean_last_10":
        value = statistics.fmean(row[name] for row in tail)
    else:
        watch = name.replace("test/", "val/", 1)
        pick = max if higher_is_better else min
        value = pick(evaluated, key=lambda row: row[watch])[name]
    goal = headline if stop_metric == "auto" else stop_metric
    reached = next(
        (row["round"] for row in evaluated if target is not None and _meets(row.get(goal), target, higher_is_better)),
        None,
    )
    return {
        "headline": {"metric": name, "rule": rule, "value": value},
        "metrics": last,
        "best": best,
        "mean_last_10": means,
        **oracle,
        "rounds": rows[-1]["round"],
        "rounds_to_target": reached,
    }


def _best(values: list[float], name: str, higher_is_better: bool) -> float:
    usable = [value for value in values if not math.isnan(value)]
    if not usable:
        return math.nan
    return min(usable) if "loss" in name or not higher_is_better else max(usable)


def _meets(value: float | None, target: float, higher_is_better: bool) -> bool:
    return value is not None and (value >= target if higher_is_better else value <= target)
