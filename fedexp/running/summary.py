"""The summary of a run's rows: last, best and mean values, headline, targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from fedexp.core.errors import FedexpError
from fedexp.core.metrics import deviation
from fedexp.running.experiment import Experiment


def summarise(
    rows: Sequence[dict[str, Any]], experiment: Experiment, traced: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Compute the metrics of ``result.json``.

    ``best`` has, for each metric on the test or validation set, its best value over the
    rounds. A best value on the test set uses test data for the choice of the round. It
    is therefore also listed under ``oracle/``, and is never the headline.

    ``last_10`` has the values of the last ten evaluated rounds, or of all evaluated
    rounds if there are fewer. Rounds that lack the metric do not count. The values are
    stored so that a report can pool them over several runs. ``mean_last_10`` and
    ``std_last_10`` are their mean and standard deviation. The standard deviation of n
    values divides by n, as NumPy's does by default. It is NaN if one of the values is
    not finite.

    A round may lack a metric. For example, ``val/clients/*`` is absent if no measured
    client has validation samples.

    ``rounds_to`` maps each target in ``headline.targets`` to the first evaluated round
    that reaches it, or to infinity if no round does. A key has two decimals (0.30). If
    the target has more decimals, the key has them too (0.385).

    ``traced`` summarises the values of the headline's metric that were traced within
    rounds. Series with one model per client are left out. For each other series, on
    test and on validation samples, ``traced`` has the ``last`` value, the ``best``
    value, and the round and iteration of the best value (``at``). A best value on test
    data is also listed under ``oracle/``.

    Args:
        rows: Rows of ``metrics.jsonl``.
        experiment: Checked experiment.
        traced: Rows of the files ``trace/<round>.json``, one per iteration within a
            round, in order. The key ``round`` is added to each row.

    Raises:
        FedexpError: The run has no evaluated round, or no round measured the headline.
    """
    name = experiment.headline
    rule = experiment.config.headline.rule
    stop = experiment.config.stop.target
    higher = experiment.task.higher_is_better
    evaluated = [row for row in rows if name in row]

    if not evaluated:
        if any(key.startswith("test/") for row in rows for key in row):
            raise _never_measured(name)
        if any(row.get("skipped_clients") for row in rows):
            raise FedexpError(
                "the run delivered no model to evaluate: the results of all clients that took "
                "part contain NaN or infinity",
                where="on_nonfinite=skip_client",
                do="lower local.lr",
            )
        raise FedexpError(
            "the run delivered no model to evaluate: no client ever took part",
            where="partition, sampling, client_dropout",
            do="lower client_dropout, or raise rounds"
            if experiment.config.client_dropout
            else None,
        )

    measured: dict[str, list[float]] = {}
    for key in dict.fromkeys(key for row in reversed(evaluated) for key in row):
        if key.startswith(("test/", "val/")):
            measured[key] = [row[key] for row in evaluated if key in row]

    last = {key: value for key, value in evaluated[-1].items() if key not in ("round", "step")}
    tail = {key: values[-10:] for key, values in measured.items()}
    means = {key: statistics.fmean(values) for key, values in tail.items()}
    best = {key: _best(values, higher(key)) for key, values in measured.items()}

    if rule == "last":
        value = last[name]
    elif rule == "mean_last_10":
        value = means[name]
    else:
        watch = name.replace("test/", "val/", 1)
        usable = [row for row in evaluated if watch in row]
        if not usable:
            raise _never_measured(watch)
        value = (max if higher(name) else min)(usable, key=lambda row: row[watch])[name]

    within = _summarise_trace(
        traced, name.rpartition("/")[2], experiment.task.metric_names, higher(name)
    )

    def first_round_reaching(metric: str, target: float) -> int | None:
        return next(
            (
                row["round"]
                for row in evaluated
                if experiment.meets(metric, row.get(metric), target)
            ),
            None,
        )

    return {
        "headline": {"metric": name, "rule": rule, "value": value},
        "metrics": last,
        "best": best,
        "mean_last_10": means,
        "std_last_10": {key: deviation(values, is_sample=False) for key, values in tail.items()},
        "last_10": tail,
        **{f"oracle/{key}": value for key, value in best.items() if key.startswith("test/")},
        **within,
        "rounds": rows[-1]["round"],
        "rounds_to_target": None
        if stop is None
        else first_round_reaching(experiment.stop_metric, stop),
        "rounds_to": {
            target_name(target): first_round_reaching(name, target) or math.inf
            for target in experiment.config.headline.targets
        },
    }


def _never_measured(name: str) -> FedexpError:
    return FedexpError(
        f"no round measured '{name}'",
        where="headline.metric, headline.rule",
        expected="a metric that at least one round measures",
        do="set headline.metric=auto, or hold out more validation samples",
    )


def _summarise_trace(
    rows: Sequence[dict[str, Any]], metric: str, names: Sequence[str], higher_is_better: bool
) -> dict[str, Any]:
    """Summarise `metric` in each traced series that has all metrics in `names`.

    The keys of a row are ``<series>/<metric>``. The result is empty if nothing was
    traced.
    """
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    at: dict[str, list[int]] = {}

    for row in rows:
        for key, value in row.items():
            series, _, ending = key.rpartition("/")
            whole = ending == metric and all(f"{series}/{name}" in row for name in names)
            if not whole or not isinstance(value, float) or math.isnan(value):
                continue
            last[key] = value
            if key not in best or (value > best[key] if higher_is_better else value < best[key]):
                best[key], at[key] = value, [row["round"], row["iteration"]]

    if not last:
        return {}
    return {
        "traced": {"last": last, "best": best, "at": at},
        **{f"oracle/{key}": value for key, value in best.items() if "/val/" not in key},
    }


def target_name(target: float) -> str:
    """Return the key of a target in ``rounds_to``.

    Different targets have different keys.
    """
    if round(target, 2) == target:
        return f"{target:.2f}"
    short = f"{target:g}"
    return short if float(short) == target else repr(target)


def _best(values: list[float], higher_is_better: bool) -> float:
    usable = [value for value in values if not math.isnan(value)]
    return (max if higher_is_better else min)(usable) if usable else math.nan
