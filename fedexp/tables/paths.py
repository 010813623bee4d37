"""Checks of the paths and curves at which numbers are read from a run's results.

A path or curve that no result can have is refused before a job runs.
"""

from __future__ import annotations

import re
from typing import Literal

from fedexp.core.errors import ConfigError, suggest
from fedexp.running.experiment import Experiment
from fedexp.running.summary import target_name

# Keys of result.json whose values are mappings from the metrics of evaluations. These
# metrics are known before the run.
_MEASURED = (
    "best",
    "mean_last_10",
    "std_last_10",
    "last_10",
    "oracle",
)
# Keys of result.json below which names are known only after the run. Two kinds of names
# are known, and are checked, before the run: those in `_KEYS`, and metrics of test and
# validation data.
_FREE = (
    "headline",
    "metrics",
    "traced",
    "rounds",
    "rounds_to_target",
    "seconds",
    "steps_per_second",
    "stacked_share",
    "peak_memory",
    "bytes",
    "local_steps",
    "partition",
    "numerics",
    "environment",
    "profile",
    "attempts",
    "memory_probe",
)
_KEYS = {"headline": ("value",), "bytes": ("up", "down")}


def check_path(path: str, experiment: Experiment, where: str) -> None:
    """Refuse a dotted path that no result of an experiment can have.

    `fedexp.tables.lookup.read_value` later reads the number at the path. Methods may
    log values whose names are known only after the run. All such names are accepted.

    Args:
        path: The path, such as ``metrics.test/global/acc``.
        experiment: Experiment of the run.
        where: Place of the path in its YAML file, for the error message.

    Raises:
        ConfigError: No result can have the path. The message suggests the nearest path,
            or a setting that adds it to the results.
    """
    head, _, rest = path.partition(".")
    if path.startswith("oracle/"):
        head, rest = "oracle", path.removeprefix("oracle/")
    tops = [*_FREE, *_MEASURED, "rounds_to", "per_client", "trace"]
    if head not in tops:
        raise _unknown(path, where, suggest(head, tops))
    if head in _KEYS and rest not in _KEYS[head]:
        raise _unknown(path, where, suggest(path, [f"{head}.{key}" for key in _KEYS[head]]))
    if head == "trace" and not experiment.config.trace.every:
        raise _unknown(path, where, "set trace.every=1: no round of these runs is traced")

    if head == "rounds_to":
        targets = [target_name(target) for target in experiment.config.headline.targets]
        if rest not in targets:
            raise _unknown(
                path, where, suggest(rest, targets) if targets else f"set headline.targets=[{rest}]"
            )

    if head == "per_client":
        names = [f"test/local/{name}" for name in experiment.task.metric_names]
        if experiment.aggregator.delivers != "local":
            raise _unknown(
                path, where, "set a method that delivers one model per client: method=local"
            )
        _check_metric(path, re.sub(r"\.\d+$", "", rest), names, where)

    if head in _MEASURED or (head == "metrics" and rest.startswith(("test/", "val/"))):
        _check_metric(
            path,
            re.sub(r"\.\d+$", "", rest) if head == "last_10" else rest,
            experiment.metric_names,
            where,
        )


def check_curve(
    name: str, axis: Literal["iteration", "round"], experiment: Experiment, where: str
) -> None:
    """Refuse a curve that no run of an experiment can have.

    Metrics of test and validation data are known before the run. All other names are
    accepted, because methods may log them.

    Args:
        name: Name of the curve, such as ``test/global/acc``.
        axis: Whether the curve is over iterations or rounds.
        experiment: Experiment of the run.
        where: Place of the name in its YAML file, for the error message.

    Raises:
        ConfigError: No run can have the curve.
    """
    if axis == "iteration" and not experiment.config.trace.every:
        raise ConfigError(
            f"the runs have no curve '{name}' over iterations, because no round is traced",
            where=where,
            do="set trace.every=1, or axis: round for a metric of the rounds",
        )
    names = experiment.metric_names
    if axis == "round" and name.startswith(("test/", "val/")) and name not in names:
        raise ConfigError(
            f"the runs have no curve '{name}'",
            where=where,
            expected=", ".join(names),
            do=suggest(name, names),
        )


def _check_metric(path: str, name: str, names: list[str], where: str) -> None:
    if name not in names:
        raise _unknown(path, where, suggest(name, names), ", ".join(names))


def _unknown(path: str, where: str, do: str, expected: str | None = None) -> ConfigError:
    return ConfigError(
        f"'{path}' is not measured: no result of these runs can have it",
        where=where,
        expected=expected,
        do=do,
    )
