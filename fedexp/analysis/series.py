"""Series of a picture: means over seeds with 95 % intervals, in panels.

The horizontal axis is the progress of the runs, such as rounds or bytes, or a key of
the config. On a progress axis, a run has one point per round. On the axis of a key, a
run has one point.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import t

from fedexp.analysis.groups import (
    EQUAL_RUNS,
    differing_keys,
    finished,
    implied_keys,
    listed,
    made_by_different_code,
    newest_by_config,
    no_finished_run,
    notes_on_data,
    seed_text,
    seeds_of,
    shown_value,
    sort_key,
)
from fedexp.analysis.rounds import round_rows
from fedexp.core.errors import ConfigError, nearest
from fedexp.storage.identity import SEEDS
from fedexp.storage.selection import (
    ABSENT,
    check_keys,
    is_number,
    nearest_key,
    select,
    text_of,
    value_of,
)
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Seeds
from fedexp.tables.verdicts import LEVEL
from fedexp.tracking.curve import is_usable

# Progress axes, by their names on the command line. The values are the columns of
# `fedexp.analysis.rounds.round_rows`.
PROGRESS: Mapping[str, str] = {
    "round": "round",
    "step": "step",
    "bytes": "total/bytes",
    "seconds": "total/seconds",
    "local_steps": "total/local_steps",
}
# If more keys than this differ, a message suggests the nodes that contain them.
_SHOWN = 4

Labels = tuple[str, ...]


@dataclass(frozen=True)
class PlotSpec:
    """The axes, series and panels of a picture.

    Args:
        x: Name of a progress axis, or a key of the config with numbers as values.
        y: Metric, or ``headline``, the main result of a run.
        by: Keys whose values distinguish the series of a panel.
        rows: Keys whose values distinguish the rows of panels.
        cols: Keys whose values distinguish the columns of panels.
        allowed: Keys in which the runs of different series may differ, although the
            picture does not show them.
    """

    x: str = "round"
    y: str = "headline"
    by: tuple[str, ...] = ("method",)
    rows: tuple[str, ...] = ()
    cols: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that the picture shows."""
        own = () if self.x in PROGRESS else (self.x,)
        return (*self.by, *self.rows, *self.cols, *own)


@dataclass(frozen=True)
class Point:
    """A mean over the runs of a series that differ only in their seeds.

    Args:
        x: Place on the horizontal axis. If the axis shows progress, such as the bytes
            sent until a round, it is the mean over the runs. If the axis shows a config
            key that the runs do not have, it is NaN.
        mean: Mean of the values.
        low: Lower end of the 95 % interval of the mean, equal to `mean` for one run.
        high: Upper end of the interval.
        values: Values of the runs.
    """

    x: float
    mean: float
    low: float
    high: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class PlotData:
    """The numbers of a picture.

    Args:
        spec: The axes, series and panels.
        metric: Name of the values, with the rule if they are the headlines.
        panels: Points by series, for each panel. A panel is identified by the values
            of `PlotSpec.rows` and those of `PlotSpec.cols`.
        series: All series, identified by the values of `PlotSpec.by`, in order.
        seeds: All seeds, as texts.
        num_runs: Number of runs.
        notes: Missing runs and other facts that a reader must know.
    """

    spec: PlotSpec
    metric: str
    panels: Mapping[tuple[Labels, Labels], Mapping[Labels, Sequence[Point]]]
    series: Sequence[Labels]
    seeds: Sequence[str]
    num_runs: int
    notes: Sequence[str]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t distribution.

    The interval is ``mean ± t * s / sqrt(n)``. Here s is the sample standard deviation,
    and t is the 0.975 quantile with n - 1 degrees of freedom. For a single value, the
    interval is the value.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    quantile = float(t.ppf(1 - LEVEL / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def plot_data(runs: Sequence[StoredRun], spec: PlotSpec, conditions: Sequence[str]) -> PlotData:
    """Compute the numbers of a picture.

    Args:
        runs: Stored runs, the newest first.
        spec: The axes, series and panels.
        conditions: Conditions that the runs must meet.

    Raises:
        ConfigError: There are no finished runs, a key or metric does not exist, or the
            runs differ in more than the picture shows.
        StorageError: A file of a run was changed.
    """
    present = [run for run in runs if run.config and not run.is_aside]
    chosen = select(present, conditions)
    done = newest_by_config(finished(chosen))
    if not done:
        raise no_finished_run(runs, conditions)
    _check_keys(done, spec)
    groups = _grouped(done, spec)
    _refuse_other_differences(groups, spec)
    notes: list[str] = []
    groups = {
        place: _one_per_seed(members, _name(spec, place), notes)
        for place, members in groups.items()
    }

    metric = _metric(done, spec)
    panels: dict[tuple[Labels, Labels], dict[Labels, list[Point]]] = {}
    for place in sorted(groups, key=_place_key):
        rows, cols, series, _ = place
        points = panels.setdefault((rows, cols), {}).setdefault(series, [])
        name = _name(spec, place)
        if spec.x in PROGRESS:
            points += _curve(groups[place], spec.x, metric, name, notes)
        else:
            points += _point(groups[place], spec, metric, name, notes)

    seeds = sorted({seed_text(seeds_of(run)) for run in done}, key=sort_key)
    return PlotData(
        spec,
        _headline_name(done) if metric == "headline" else metric,
        panels,
        sorted({series for _, _, series, _ in groups}, key=_labels_key),
        seeds,
        sum(map(len, groups.values())),
        [*_missing([*done, *chosen], spec), *notes_on_data(done), *notes],
    )


# --- groups of runs

# The values of `PlotSpec.rows`, of `cols` and of `by`, and the value of the key of the
# horizontal axis ("" on a progress axis).
_Place = tuple[Labels, Labels, Labels, str]


def _place(run: StoredRun, spec: PlotSpec) -> _Place:
    rows, cols, by = (
        tuple(shown_value(run, key) for key in keys) for keys in (spec.rows, spec.cols, spec.by)
    )
    return rows, cols, by, "" if spec.x in PROGRESS else text_of(value_of(run, spec.x))


def _grouped(runs: Iterable[StoredRun], spec: PlotSpec) -> dict[_Place, list[StoredRun]]:
    groups: dict[_Place, list[StoredRun]] = {}
    for run in sorted(runs, key=lambda run: sort_key(seed_text(seeds_of(run)))):
        groups.setdefault(_place(run, spec), []).append(run)
    return groups


def _one_per_seed(runs: Sequence[StoredRun], name: str, notes: list[str]) -> list[StoredRun]:
    """Return the newest run of each seed of a group, and add notes on the group."""
    newest: dict[Seeds, StoredRun] = {}
    for run in runs:
        newest.setdefault(seeds_of(run), run)
    if len(newest) < len(runs):
        notes.append(f"{name}: {len(runs) - len(newest)} {EQUAL_RUNS} are left out")
    if made_by_different_code(newest.values()):
        notes.append(f"{name}: runs were made by different code")
    return list(newest.values())


def _labels_key(labels: Iterable[str]) -> list[tuple[int, float, str]]:
    return [sort_key(label) for label in labels]


def _place_key(place: _Place) -> tuple[Any, ...]:
    return *(_labels_key(labels) for labels in place[:3]), sort_key(place[3])


def _name(spec: PlotSpec, place: _Place) -> str:
    """Return the conditions that identify a group of runs, as text."""
    rows, cols, by, x = place
    pairs = [*zip((*spec.by, *spec.rows, *spec.cols), (*by, *rows, *cols), strict=True)]
    if spec.x not in PROGRESS:
        pairs.append((spec.x, x))
    return " ".join(f"{key}={text}" for key, text in pairs)


# --- checks


def _check_keys(runs: Sequence[StoredRun], spec: PlotSpec) -> None:
    known = any(value_of(run, spec.x) is not ABSENT for run in runs)
    if spec.x not in PROGRESS and not known and (near := nearest(spec.x, PROGRESS)):
        raise ConfigError(
            f"there is no horizontal axis '{spec.x}'",
            expected=f"{', '.join(PROGRESS)}, or a key of the config",
            do=f"did you mean '{near}'?",
        )
    check_keys(runs, [*spec.keys, *spec.allowed])
    for run in runs if spec.x not in PROGRESS else ():
        value = value_of(run, spec.x)
        if value is not ABSENT and not is_number(value):
            raise ConfigError(
                f"the values of '{spec.x}' are not numbers",
                where=run.name,
                got=text_of(value),
                do=f"use it as by={spec.x}, rows={spec.x} or cols={spec.x}",
            )


def _refuse_other_differences(groups: Mapping[_Place, list[StoredRun]], spec: PlotSpec) -> None:
    """Refuse runs that differ in keys which the picture does not show."""
    for place, members in groups.items():
        differing = differing_keys(members)
        if differing:
            first, texts = next(iter(differing.items()))
            everyone = [run for found in groups.values() for run in found]
            raise ConfigError(
                f"runs of one series differ in more than their seeds: {listed(differing)}",
                where=_name(spec, place),
                got=f"{first}: {listed(texts)}",
                do=f"add a condition ({_condition(first, texts, everyone)}), "
                f"or by={','.join([*spec.by, first])}",
            )

    firsts = [members[0] for members in groups.values()]
    differing = differing_keys(firsts, [*implied_keys(spec.keys), *spec.allowed])
    if differing:
        first, texts = next(iter(differing.items()))
        nodes = differing if len(differing) <= _SHOWN else {key.split(".")[0] for key in differing}
        raise ConfigError(
            f"the series differ in more than {', '.join(spec.keys)}: {listed(differing)}",
            expected="runs that are equal in all keys that the picture does not show",
            got=f"{first}: {listed(texts)}",
            do=f"add a condition ({_condition(first, texts, firsts)}), show the key "
            f"(cols={first}), or allow the difference (--allow {','.join(sorted(nodes))})",
        )


def _condition(key: str, values: Sequence[str], runs: Iterable[StoredRun]) -> str:
    """Return a condition that leaves one of the values of a key.

    Runs without the key, such as those of other methods, meet it, too.
    """
    others = [value for value in values[1:] if value != "-"]
    if all(value_of(run, key) is not ABSENT for run in runs) or not others:
        return f"{key}={values[0]}"
    return f"{key}!={','.join(others)}"


def _metric(runs: Sequence[StoredRun], spec: PlotSpec) -> str:
    """Return the metric of the vertical axis.

    On the axis of a key, it may be ``headline``, which includes the headline's rule.
    """
    if spec.y != "headline":
        if spec.x not in PROGRESS:
            check_keys(runs, [spec.y])
        return spec.y
    names = sorted({str((run.headline or {}).get("metric")) for run in runs})
    if len(names) > 1:
        raise ConfigError(
            "the runs have different headlines",
            got=", ".join(names),
            do=f"set y, e.g. y={names[0]}",
        )
    return names[0] if spec.x in PROGRESS else "headline"


def _headline_name(runs: Iterable[StoredRun]) -> str:
    names = {f"{run.headline['metric']} ({run.headline['rule']})" for run in runs if run.headline}
    return ", ".join(sorted(names))


# --- numbers


def _curve(
    runs: Sequence[StoredRun], x: str, metric: str, name: str, notes: list[str]
) -> list[Point]:
    """Return one point per round that all runs have measured.

    Each point is a mean over the runs, also of the place on the horizontal axis.
    """
    curves = [_measured(run, x, metric) for run in runs]
    common = [at for at in curves[0] if all(at in curve for curve in curves)]
    longest = max(max(curve) for curve in curves)
    if common and common[-1] < longest:
        notes.append(f"{name}: drawn to {_unit(x)} {common[-1]}, because a seed ended there")

    points = []
    lost = []
    for at in common:
        places, values = zip(*(curve[at] for curve in curves), strict=True)
        if all(map(is_usable, values)):
            points.append(Point(statistics.fmean(places), *mean_interval(values), values))
        else:
            lost.append(at)
    if lost:
        is_to_the_end = lost == common[-len(lost) :]
        where = f"from {_unit(x)} {lost[0]}" if is_to_the_end else _listed_places(lost, _unit(x))
        flaw = _flaw(curve[at][1] for at in lost for curve in curves)
        notes.append(f"{name}: {metric} is {flaw} {where}")
    return points


def _flaw(values: Iterable[float]) -> str:
    """Return why values, of which some cannot be drawn, are left out."""
    return "too large to draw" if all(map(math.isfinite, values)) else "not finite"


def _listed_places(places: Sequence[int], unit: str) -> str:
    plural = "s" if len(places) > 1 else ""
    return f"in {unit}{plural} {listed(map(str, places))}"


def _unit(x: str) -> str:
    return "round" if x == "round" else "step"


def _measured(run: StoredRun, x: str, metric: str) -> dict[int, tuple[float, float]]:
    """Return the places on the axis and the values of a run, by round or step.

    If a round has several steps, the last measured one counts on the axis of rounds.
    """
    rows = round_rows(run)
    measured = [row for row in rows if is_number(row.get(metric))]
    if not measured:
        known = {name for row in rows for name in row if "/" in name}
        near = nearest_key(metric, known)
        raise ConfigError(
            f"a run has no metric '{metric}'",
            where=run.name,
            expected=", ".join(sorted(known)),
            do=f"did you mean '{near}'?" if near else "set y to a metric of the run",
        )
    if any(row[PROGRESS[x]] is None for row in measured):
        raise ConfigError(
            "the times of a run's rounds are not stored",
            where=str(run.path / "timing.jsonl"),
            do="use another x, or leave the run out by a condition",
        )
    return {row[_unit(x)]: (float(row[PROGRESS[x]]), float(row[metric])) for row in measured}


def _point(
    runs: Sequence[StoredRun], spec: PlotSpec, metric: str, name: str, notes: list[str]
) -> list[Point]:
    values = []
    for run in runs:
        value = value_of(run, metric)
        if not is_number(value):
            raise ConfigError(
                f"'{metric}' of a run is not a number", where=run.name, got=text_of(value)
            )
        values.append(float(value))
    if not all(map(is_usable, values)):
        notes.append(f"{name}: {metric} is {_flaw(values)}")
        return []
    x = value_of(runs[0], spec.x)
    return [Point(math.nan if x is ABSENT else float(x), *mean_interval(values), tuple(values))]


def _missing(runs: Sequence[StoredRun], spec: PlotSpec) -> list[str]:
    """Name the combinations of panels, series and seeds that have no finished run.

    Nothing is named if seeds distinguish series, panels or points.

    Args:
        runs: Finished and unfinished runs, the finished ones first.
        spec: The axes, series and panels.
    """
    if set(spec.keys) & {*SEEDS}:
        return []
    status: dict[tuple[_Place, str], str] = {}
    for run in runs:
        status.setdefault((_place(run, spec), seed_text(seeds_of(run))), run.status)
    places = {place for place, _ in status}
    seeds = sorted({seed for _, seed in status}, key=sort_key)
    down = sorted({rows for rows, _, _, _ in places}, key=_labels_key)
    across = sorted({cols for _, cols, _, _ in places}, key=_labels_key)
    own = sorted({(by, x) for _, _, by, x in places}, key=lambda one: _place_key(((), (), *one)))

    found = []
    for rows, cols, (by, x) in itertools.product(down, across, own):
        place = (rows, cols, by, x)
        states = {seed: status.get((place, seed), "not run") for seed in seeds}
        absent = {seed: state for seed, state in states.items() if state != "done"}
        if len(absent) == len(seeds) and set(absent.values()) == {"not run"}:
            found.append(f"missing: {_name(spec, place)}: no run")
        elif absent:
            missing = ", ".join(f"seed {seed} ({state})" for seed, state in absent.items())
            found.append(f"missing: {_name(spec, place)}: {missing}")
    return found
