"""The number by which hyper-parameters are chosen. It is measured on held-out data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedexp.core.errors import ConfigError, suggest
from fedexp.core.paths import user_path
from fedexp.running.experiment import Experiment

# If the config holds out no samples, one training sample in this many is held out.
_SHARE = 10
# Key of result.json that has the values of `headline.rule`.
_PLACES = {"last": "metrics", "mean_last_10": "mean_last_10", "best_on_val": "best"}


@dataclass(frozen=True)
class Objective:
    """A metric of held-out data, and the rule that computes one number per run.

    Args:
        metric: Name of the metric, which begins with ``val/``.
        rule: Rule of ``headline.rule``.
        higher_is_better: Whether the number is maximised.
    """

    metric: str
    rule: str
    higher_is_better: bool

    @classmethod
    def of(cls, experiment: Experiment, metric: str = "auto") -> Objective:
        """Return the objective of an experiment that holds out data.

        Args:
            experiment: Checked experiment.
            metric: Name of the metric. ``auto`` is the metric of the headline, measured
                on the held-out data.

        Raises:
            ConfigError: The metric is not measured on held-out data, the method itself
                uses these data, or a metric of test samples ends the run.
        """
        held_out = [name for name in experiment.metric_names if name.startswith("val/")]
        refuse_leakage(experiment)
        if metric == "auto":
            metric = experiment.headline.replace("test/", "val/", 1)
        if metric not in held_out:
            is_test = metric.startswith("test/")
            meant = metric.replace("test/", "val/", 1)
            raise ConfigError(
                "a hyper-parameter must not be chosen on test data"
                if is_test
                else f"'{metric}' is not measured on held-out data",
                where="objective",
                expected=", ".join(["auto", *held_out]),
                got=metric,
                do=f"objective={meant}" if meant in held_out else suggest(meant, held_out),
            )
        return cls(
            metric, experiment.config.headline.rule, experiment.task.higher_is_better(metric)
        )

    @property
    def path(self) -> str:
        """The path of the number in ``result.json``."""
        return f"{_PLACES[self.rule]}.{self.metric}"

    @property
    def text(self) -> str:
        """A readable name of the objective."""
        return f"{self.metric} ({self.rule.replace('_', ' ')})"

    def value(self, result: Mapping[str, Any]) -> float | None:
        """Read the number from a result. It is None if it is missing or not finite."""
        value = (result.get(_PLACES[self.rule]) or {}).get(self.metric)
        return None if value is None or not math.isfinite(value) else float(value)


def refuse_leakage(experiment: Experiment) -> None:
    """Refuse a run whose number on held-out samples cannot choose a hyper-parameter.

    Raises:
        ConfigError: The method gets the held-out samples on the server, or a metric of
            test samples ends the run.
    """
    if experiment.needs.validation:
        raise ConfigError(
            "the method uses the held-out samples on the server, so they cannot judge it",
            where="aggregator",
            expected="a method that does not need validation samples",
            got=type(experiment.aggregator).__name__,
            do="switch off the method's use of validation samples, as its options explain",
        )
    metric = experiment.stop_metric
    if experiment.config.stop.target is not None and metric.startswith("test/"):
        raise ConfigError(
            "a hyper-parameter must not depend on a round that test data choose",
            where="stop.metric",
            expected="a metric that is not measured on test data, or stop.target=null",
            got=metric,
            do=f"stop.metric={metric.replace('test/', 'val/', 1)}, and set eval.held_out",
        )


def num_held_out(experiment: Experiment) -> int:
    """Return the number of samples to hold out if the config holds out none.

    It is a tenth of the training samples that remain for the clients.

    Raises:
        ConfigError: The data set is not on this machine yet, or has too few samples.
    """
    root = user_path(experiment.config.data_root, "data_root")
    other = experiment.proxy.dataset
    sets = [one for one in (experiment.dataset, other) if one is not None]
    do = "set eval.held_out to a number of training samples"
    if not all(file.exists() for one in sets for file in one.expected_files(root)):
        raise ConfigError(
            "no samples are held out, and the data set has not been downloaded yet",
            where="eval.held_out",
            do=f"{do}, or download the data: fedexp-data prepare",
        )

    arrays = [one.load(root, download=False) for one in sets]
    parts = experiment.division.parts(experiment.dataset, arrays[0], arrays[-1])
    count = len(parts.train_at) // _SHARE
    if not count:
        raise ConfigError(
            "a tenth of the training samples is no sample",
            where="eval.held_out",
            expected=f"at least {_SHARE} training samples",
            got=len(parts.train_at),
            do=do,
        )
    return count
