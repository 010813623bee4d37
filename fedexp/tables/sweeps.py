"""Sweeps of a tuning file: check and launch their runs, and choose the best values.

A sweep tries several values, called points, of one coefficient of a method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError, suggest
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running.check import CheckedJob, check_splits, name_job_in_errors
from fedexp.storage.run_folder import RunFolder, read_result_and_status
from fedexp.tables.cells import key_of, planned_cells
from fedexp.tables.load import load_table
from fedexp.tables.lookup import read_path
from fedexp.tuning.space import Choice
from fedexp.tuning.study import Launch, read_run
from fedexp.tuning.summary import edge_warnings
from fedexp.tuning.tuned_files import (
    Swept,
    Tuning,
    load_tuning,
    output_file,
    tuned_files,
    write_results,
)

# Keys that do not change a run's numbers. If only these keys are overridden, the
# results may be written to conf/tuned.
_NEUTRAL = ("output_root", "data_root", "device", "threads")


@dataclass(frozen=True)
class TuningPlan:
    """The checked runs of a tuning, and the files that it reads and writes.

    Args:
        tuning: The sweeps, and the results of earlier runs.
        source: File with the hand-written part.
        target: File that receives the results.
        configs: Resolved configs by method, one per point of its sweep.
    """

    tuning: Tuning
    source: Path
    target: Path
    configs: dict[str, list[ResolvedConfig]]


def sweep_overrides(
    tuning: Tuning, method: str, extra: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """List the overrides of a method's runs, one run per point of its sweep.

    Args:
        tuning: Tuning that sweeps the method.
        method: Column of the table.
        extra: Overrides that are appended to every run.

    Returns:
        The overrides of each run, in the order of the points.
    """
    sweep, table = tuning.sweeps[method], load_table(tuning.table)
    only = {**{key: [value] for key, value in tuning.cell.items()}, "method": [method]}

    runs = []
    for point in sweep.points:
        added = [*tuning.overrides, f"{sweep.over}={point}", *extra]
        (planned,) = planned_cells(table, "reduced", only=only, seeds=[tuning.seed], extra=added)
        (job,) = planned.jobs
        runs.append(job.overrides)
    return runs


def plan_tuning(
    name: str, methods: Sequence[str], extra: Sequence[str], out: Path | None
) -> TuningPlan:
    """Check everything that can be wrong before the first run starts.

    Args:
        name: File of ``conf/tuned``, without its suffix.
        methods: Methods to tune. Empty: all methods of the file.
        extra: Overrides of all runs.
        out: File that receives the results. None: ``./conf/tuned/<name>.yaml``.

    Returns:
        The runs and the files.

    Raises:
        FedexpError: If the name or a method is unknown, if a run cannot be composed, or
            if the results must not be written to the file.
    """
    tuning, source = load_tuning(name), tuned_files()[name]

    for method in methods:
        if method not in tuning.sweeps:
            raise ConfigError(
                f"'{method}' is not swept", where=str(source), do=suggest(method, tuning.sweeps)
            )

    if out is None and any(key_of(override) not in _NEUTRAL for override in extra):
        raise ConfigError(
            "these overrides change the results, which do not belong in conf/tuned",
            got=" ".join(extra),
            do="give another file: --out FILE",
        )
    target = output_file(name, out)

    configs: dict[str, list[ResolvedConfig]] = {}
    for method in methods or tuning.sweeps:
        configs[method] = []
        runs = sweep_overrides(tuning, method, extra)
        for point, overrides in zip(tuning.sweeps[method].points, runs, strict=True):
            with name_job_in_errors(_run_name(tuning, method, point)):
                configs[method].append(compose(list(overrides)))

    _check(tuning, configs)
    return TuningPlan(tuning, source, target, configs)


def run_tuning(plan: TuningPlan, launch: Launch, say: Callable[[str], None]) -> int:
    """Launch the runs of all methods, and write the file after every method.

    Args:
        plan: Plan that `plan_tuning` returned.
        launch: Function that launches the jobs that have no stored result.
        say: Function that prints a line for the user.

    Returns:
        The exit code of the first launch that did not return 0, or 0.

    Raises:
        FedexpError: If all runs of a sweep failed.
    """
    results = dict(plan.tuning.results)
    for method, configs in plan.configs.items():
        sweep = plan.tuning.sweeps[method]
        if code := launch([config.overrides for config in configs]):
            return code
        values = []
        for point, config in zip(sweep.points, configs, strict=True):
            value, reason = _value(config, plan.tuning.by)
            values.append(value)
            if reason is not None:
                say(f"{_run_name(plan.tuning, method, point)}  failed: {reason}")
        results[method] = Swept(tuple(values), _best(plan.tuning, method, values))

        # The remaining methods may take hours. If they are interrupted, the results of
        # this method must not be lost.
        write_results(plan.tuning, results, plan.source, plan.target)
        chosen = str(results[method].chosen)
        say(f"{method}: {sweep.over}={chosen}, written to {plan.target}")
        points = tuple(map(str, sweep.points))
        space = Choice(sweep.over, points, f"{sweep.over}={','.join(points)}")
        for warning in edge_warnings([space], {sweep.over: chosen}):
            say(f"note: {method}: {warning}")
    return 0


def _check(tuning: Tuning, configs: dict[str, list[ResolvedConfig]]) -> None:
    """Check every run before the first one starts.

    The experiment of every run is built. If a run has no stored result, its data split
    is also sampled.
    """
    # This import loads torch, which takes seconds. It comes after the first checks, so
    # a mistyped key is reported at once.
    from fedexp.tables.paths import check_path
    from fedexp.tuning.objective import refuse_used_samples

    missing = []
    for method, of_method in configs.items():
        for point, config in zip(tuning.sweeps[method].points, of_method, strict=True):
            label = _run_name(tuning, method, point)
            with name_job_in_errors(label):
                experiment = CheckedJob.of(config).experiment
                check_path(tuning.by, experiment, "by")
                refuse_used_samples(experiment)
            if not (config["reuse"] and read_result_and_status(RunFolder.of(config))[0]):
                missing.append((label, experiment))
    check_splits(missing)


def _run_name(tuning: Tuning, method: str, point: float) -> str:
    return f"{method} with {tuning.sweeps[method].over}={point}"


def _value(config: ResolvedConfig, by: str) -> tuple[float | None, str | None]:
    """Read the number at the path `by`, or return None and why there is none."""
    result, reason = read_run(config)
    if result is None:
        return None, reason
    value = read_path(result, by)
    return (None, f"{by} is not a number") if math.isnan(value) else (value, None)


def _best(tuning: Tuning, method: str, values: Sequence[float | None]) -> int | float:
    """Return the first point with the highest value."""
    sweep = tuning.sweeps[method]
    done = [value for value in values if value is not None]
    if not done:
        raise FedexpError("all runs of a sweep failed", where=method, got=sweep.over)
    return sweep.points[values.index(max(done))]
