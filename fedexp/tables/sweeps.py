"""Sweeps of a tuning file: check and launch their runs, and choose the best values.

A sweep tries several values, called points, of one coefficient of a method. A point has
one run per seed. These runs also have the values that earlier sweeps of the method
chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError, suggest
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running.check import CheckedJob, check_splits, name_job_in_errors
from fedexp.storage.run_folder import RunFolder, read_result_and_status
from fedexp.storage.selection import dotted_items
from fedexp.tables.cells import key_of, planned_cells
from fedexp.tables.load import load_table
from fedexp.tables.lookup import read_path
from fedexp.tuning.space import Choice
from fedexp.tuning.study import Launch, is_stored, read_run
from fedexp.tuning.summary import edge_warnings
from fedexp.tuning.tuned_files import (
    Swept,
    Tuning,
    add_results,
    load_tuning,
    output_file,
    stored_results,
    tuned_files,
)

if TYPE_CHECKING:
    from fedexp.running.experiment import Experiment

# Keys that do not change a run's numbers. If only these keys are overridden, the
# results may be written to conf/tuned.
_NEUTRAL = ("output_root", "data_root", "device", "threads")


@dataclass(frozen=True)
class TuningPlan:
    """The checked runs of a tuning, and the files that it reads and writes.

    Args:
        tuning: The sweeps, and the results of earlier commands.
        source: File with the hand-written part.
        target: File that receives the results.
        methods: Methods to tune.
        extra: Overrides of all runs.
        earlier: Results that a new `target` begins with.
    """

    tuning: Tuning
    source: Path
    target: Path
    methods: tuple[str, ...]
    extra: tuple[str, ...]
    earlier: Mapping[str, tuple[Swept, ...]]


@dataclass(frozen=True)
class _PointRuns:
    """The runs of one point of a sweep.

    Args:
        label: Name of the point, for messages.
        configs: Resolved configs of its runs, one per seed.
    """

    label: str
    configs: tuple[ResolvedConfig, ...]


# Returns the number of each point (None for a failure), or None to stop the tuning.
_Measure = Callable[[list[_PointRuns]], list[float | None] | None]


def sweep_overrides(
    tuning: Tuning, method: str, setting: Sequence[str], extra: Sequence[str] = ()
) -> list[tuple[str, ...]]:
    """List the overrides of the runs of one point, one run per seed.

    Args:
        tuning: Tuning that sweeps the method.
        method: Column of the table.
        setting: Overrides of the coefficients.
        extra: Overrides that are appended to every run.
    """
    only = {**{key: [value] for key, value in tuning.cell.items()}, "method": [method]}
    (planned,) = planned_cells(
        load_table(tuning.table, tuned=False),
        tuning.variant,
        only=only,
        seeds=tuning.seeds,
        extra=[*tuning.overrides, *setting, *extra],
    )
    return [job.overrides for job in planned.jobs]


def tried_ranges(
    tuning: Tuning, method: str, extra: Sequence[str] = ()
) -> list[tuple[Choice, str]]:
    """Return the range of each key that was tuned, and its best value.

    A range has all values that were tried for the key. For the keys of later sweeps,
    one of them is the value in the method's config, which the first sweep measures.
    This value is the best one if a later sweep found no better one.

    Args:
        tuning: Tuning with results of the method.
        method: Column of the table.
        extra: Overrides that are appended to every run.
    """
    results = tuning.results[method]
    config: dict[str, Any] = {}
    # Composing takes long, so it is left out if no value of the config is needed.
    if any(swept.over != results[0].over or swept.chosen is None for swept in results):
        job, *_ = sweep_overrides(tuning, method, (), extra)
        config = dict(dotted_items(compose(list(job)).values))

    ranges = []
    for key in dict.fromkeys(swept.over for swept in results):
        own = [swept for swept in results if swept.over == key]
        chosen = [swept.chosen for swept in own if swept.chosen is not None]
        points = [point for swept in own for point in swept.points]
        if key != results[0].over and isinstance(config[key], int | float):
            points.append(config[key])
        tried = tuple(map(str, points))
        best = chosen[-1] if chosen else config[key]
        if not isinstance(best, int | float):
            continue  # a value such as null has no place in a range
        ranges.append((Choice(key, tried, f"{key}={','.join(tried)}"), str(best)))
    return ranges


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
    load_table(tuning.table)  # refuses a file whose results the table could not use
    if target.is_file():
        stored_results(target)  # refuses a file that would be overwritten by mistake

    # A new file of --out begins empty. An existing one keeps results of other methods.
    earlier = tuning.results if out is None else {}
    plan = TuningPlan(
        tuning, source, target, tuple(methods or tuning.sweeps), tuple(extra), earlier
    )
    _check(plan)
    return plan


def count_runs(plan: TuningPlan) -> tuple[int, int]:
    """Return the number of a tuning's runs, and the number of those that are stored.

    Which runs a later sweep has depends on the results of the earlier sweeps. Runs that
    are not known yet count as not stored, and extensions that are not known yet do not
    count.
    """
    total = stored = 0
    for method in plan.methods:
        known: list[ResolvedConfig] = []

        def measure(
            points: list[_PointRuns], known: list[ResolvedConfig] = known
        ) -> list[float | None] | None:
            here = [config for point in points for config in point.configs]
            known += here
            values = [_value(point, plan.tuning.by)[0] for point in points]
            has_value = any(value is not None for value in values)
            return values if has_value and all(map(is_stored, here)) else None

        is_measured = _sweep_method(plan, method, measure) is not None
        declared = sum(len(sweep.points) for sweep in plan.tuning.sweeps[method])
        total += len(known) if is_measured else max(len(known), declared * len(plan.tuning.seeds))
        stored += sum(map(is_stored, known))
    return total, stored


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
    code = 0

    def measure(points: list[_PointRuns]) -> list[float | None] | None:
        nonlocal code
        code = launch([config.overrides for point in points for config in point.configs])
        if code:
            return None
        values = []
        for point in points:
            value, reason = _value(point, plan.tuning.by)
            values.append(value)
            if reason is not None:
                say(f"{point.label}  failed: {reason}")
        return values

    for method in plan.methods:
        found = _sweep_method(plan, method, measure)
        if found is None:
            return code

        # The remaining methods may take hours. If they are interrupted, the results of
        # this method must not be lost.
        add_results(plan.tuning, method, found, plan.source, plan.target, plan.earlier)
        tuned = replace(plan.tuning, results={method: found})
        say(f"{method}: {' '.join(tuned.setting(method) or ())}, written to {plan.target}")
        best = dict(tried_ranges(tuned, method, plan.extra))
        for warning in edge_warnings([*best], {space.key: value for space, value in best.items()}):
            say(f"note: {method}: {warning}")
    return 0


def _sweep_method(plan: TuningPlan, method: str, measure: _Measure) -> tuple[Swept, ...] | None:
    """Go through the sweeps of a method.

    Args:
        plan: The plan.
        method: The method.
        measure: Function that returns the number of each point.

    Returns:
        The results of all sweeps, or None if `measure` stopped the tuning.

    Raises:
        FedexpError: If all runs of the first sweep failed.
    """
    setting: dict[str, int | float] = {}
    best: float | None = None
    left = plan.tuning.extension
    found: list[Swept] = []

    for sweep in plan.tuning.sweeps[method]:
        points = [*sweep.points]
        if sweep.relative:
            # Products may be equal once they are rounded, or values that were tried
            known = {point for swept in found for point in swept.points if swept.over == sweep.over}
            best_point, is_whole = setting[sweep.over], _is_whole(plan, method)
            products = [_product(best_point, factor, is_whole) for factor in sweep.points]
            points = [
                one
                for one in dict.fromkeys(products)
                if one not in known and _is_valid(plan, method, {**setting, sweep.over: one})
            ]
        tried: list[int | float] = []
        values: list[float | None] = []
        commits: set[str] = set()
        while points:
            runs = [_point_runs(plan, method, {**setting, sweep.over: one}) for one in points]
            measured = measure(runs)
            if measured is None:
                return None
            tried, values = [*tried, *points], [*values, *measured]
            commits |= _commits(runs)
            points = [
                one
                for one in _beyond(tried, values, left)
                if _is_valid(plan, method, {**setting, sweep.over: one})
            ]
            left -= len(points)

        done = [value for value in values if value is not None]
        if not done and best is None:
            raise FedexpError("all runs of a sweep failed", where=method, got=sweep.over)
        chosen = None
        if done and (best is None or max(done) > best):
            best = max(done)
            chosen = setting[sweep.over] = tried[values.index(best)]
        found.append(Swept(sweep.over, tuple(tried), tuple(values), chosen, tuple(sorted(commits))))
    return tuple(found)


def _beyond(
    points: Sequence[int | float], values: Sequence[float | None], count: int
) -> list[int | float]:
    """Return values that continue a sweep beyond its best point.

    They continue the ratio of the two outermost points. They are whole numbers if all
    points are. There are none if the best point is neither the lowest nor the highest
    one, or if a point is not positive.

    Args:
        points: Points of the sweep.
        values: Number at every point, None for a failure.
        count: Number of values.
    """
    done = [value for value in values if value is not None]
    ordered = sorted(points)
    if not done or len(points) < 2 or ordered[0] <= 0:
        return []
    best = points[values.index(max(done))]
    are_whole = all(isinstance(point, int) for point in points)
    for end, inner in ((ordered[0], ordered[1]), (ordered[-1], ordered[-2])):
        if best == end:
            further = [end * (end / inner) ** k for k in range(1, count + 1)]
            if not are_whole:
                return [_rounded(value) for value in further]
            whole = dict.fromkeys(round(value) for value in further)
            return [value for value in whole if value > 0 and value not in points]
    return []


def _rounded(value: float) -> float:
    """Round a value to six digits, so that its text is short."""
    return float(f"{value:.6g}")


def _product(best: int | float, factor: int | float, is_whole: bool) -> int | float:
    """Return a point of a relative sweep: the best point times a factor.

    A product of whole numbers is rounded to a whole number of at least 1.
    """
    return max(1, round(best * factor)) if is_whole else _rounded(best * factor)


def _is_whole(plan: TuningPlan, method: str) -> bool:
    """Return whether a method's relative sweeps have whole numbers.

    They do if the points of its first sweep and the value without tuning are whole.
    """
    first = plan.tuning.sweeps[method][0]
    config, *_ = _point_runs(plan, method, {}).configs
    values = (dict(dotted_items(config.values)).get(first.over), *first.points)
    return all(isinstance(value, int) for value in values)


def _is_valid(plan: TuningPlan, method: str, setting: Mapping[str, int | float]) -> bool:
    """Return whether a run can have these values."""
    try:
        for config in _point_runs(plan, method, setting).configs:
            CheckedJob.of(config)
    except ConfigError:
        return False
    return True


def _point_runs(plan: TuningPlan, method: str, setting: Mapping[str, int | float]) -> _PointRuns:
    """Compose the runs of one point."""
    overrides = [f"{key}={value}" for key, value in setting.items()]
    label = f"{method} with {' '.join(overrides)}"
    with name_job_in_errors(label):
        jobs = sweep_overrides(plan.tuning, method, overrides, plan.extra)
        return _PointRuns(label, tuple(compose(list(job)) for job in jobs))


def _check(plan: TuningPlan) -> None:
    """Check every run before the first one starts.

    The experiment of every run is built. If a run has no stored result, its data split
    is also sampled. The values that earlier sweeps will choose are not known, so each
    sweep is checked without them. A factor of a relative sweep is checked with the
    first point of the first sweep that allows it.
    """
    points = []
    for method in plan.methods:
        first = plan.tuning.sweeps[method][0]
        for sweep in plan.tuning.sweeps[method]:
            values = [*sweep.points]
            if sweep.relative:
                is_whole = _is_whole(plan, method)
                for at, factor in enumerate(sweep.points):
                    products = [_product(best, factor, is_whole) for best in first.points]
                    valid = (one for one in products if _is_valid(plan, method, {sweep.over: one}))
                    values[at] = next(valid, products[0])
            points += [_point_runs(plan, method, {sweep.over: value}) for value in values]

    # This import loads torch, which takes seconds. It comes after the first checks, so
    # a mistyped key is reported at once.
    from fedexp.tables.paths import check_path
    from fedexp.tuning.objective import refuse_leakage

    missing = []
    for one in points:
        for config in one.configs:
            with name_job_in_errors(one.label):
                experiment = CheckedJob.of(config).experiment
                check_path(plan.tuning.by, experiment, "by")
                _refuse_losses(plan.tuning.by, experiment)
                refuse_leakage(experiment)
            if not (config["reuse"] and read_result_and_status(RunFolder.of(config))[0]):
                missing.append((one.label, experiment))
    check_splits(missing)


def _refuse_losses(by: str, experiment: Experiment) -> None:
    """Refuse a number of which lower values are better. The highest one is chosen."""
    if not experiment.task.higher_is_better(by):
        raise ConfigError(
            "the point with the highest number is chosen, which is the worst one for a loss",
            where="by",
            expected="a number that is better if it is higher",
            got=by,
        )


def _value(point: _PointRuns, by: str) -> tuple[float | None, str | None]:
    """Return the mean over the seeds of the number at the path `by`.

    If a run has no number, the result is None and the reason.
    """
    values = []
    for config in point.configs:
        result, reason = read_run(config)
        if result is None:
            return None, reason
        values.append(read_path(result, by))
    mean = sum(values) / len(values)
    return (None, f"{by} is not a number") if math.isnan(mean) else (mean, None)


def _commits(points: Sequence[_PointRuns]) -> set[str]:
    """Return the commits of fedexp that made the runs of points."""
    results = [read_run(config)[0] or {} for point in points for config in point.configs]
    commits = (result.get("environment", {}).get("commit") for result in results)
    return {commit for commit in commits if commit}
