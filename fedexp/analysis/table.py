"""A table of stored runs: means over seeds, paired tests, and aggregates over rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedexp.analysis.aggregates import Aggregates, aggregate, column_pairs
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
from fedexp.core.errors import ConfigError, suggest
from fedexp.core.metrics import deviation, is_minimised
from fedexp.storage.selection import check_keys, select, text_of, value_of
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Comparison, Seeds, adjusted, compare
from fedexp.tracking.curve import is_usable

# Words in the names of costs, of which lower ones are better.
_COSTS = ("seconds", "bytes", "size", "local_steps")
# A cell of the table: the values of the row keys, and the value of the column key.
Cell = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class TableSpec:
    """The rows, columns and numbers of a table of stored runs.

    Args:
        rows: Keys whose values distinguish the rows.
        cols: Key whose values distinguish the columns.
        value: The number of a run that is shown: ``headline``, a metric, or a cost such
            as ``total/bytes_up``.
        aggregate: Whether the table has aggregates over the rows.
        better: ``higher`` or ``lower``. None: it follows from the name of the numbers
            if the table has aggregates, and is unknown otherwise.
        against: Column with which the others are compared. None: every two columns are
            compared.
    """

    rows: tuple[str, ...]
    cols: str
    value: str = "headline"
    aggregate: bool = False
    better: str | None = None
    against: str | None = None


@dataclass(frozen=True)
class RunsTable:
    """A table of stored runs.

    Args:
        spec: The rows, columns and numbers.
        places: Values of the row keys, one tuple per row.
        columns: Values of the column key.
        cells: Values of each cell by seed. A cell without runs is absent.
        comparisons: Comparisons of two columns, each with its row.
        measured: Names of the values, with the rules by which they are chosen.
        notes: Notes on runs that are left out and on the comparison of cells.
        aggregates: Aggregates over the rows, None if they are not asked for.
        better: Which numbers are better, ``higher`` or ``lower``, None if unknown.
    """

    spec: TableSpec
    places: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...]
    cells: Mapping[Cell, Mapping[Seeds, float]]
    comparisons: tuple[tuple[tuple[str, ...], Comparison], ...]
    measured: tuple[str, ...]
    notes: tuple[str, ...]
    aggregates: Aggregates | None = None
    better: str | None = None


def runs_table(runs: Sequence[StoredRun], spec: TableSpec, conditions: Sequence[str]) -> RunsTable:
    """Make a table of the finished runs that meet the conditions.

    Args:
        runs: Stored runs, the newest first.
        spec: The rows, columns and numbers.
        conditions: Conditions on runs.

    Raises:
        ConfigError: No run meets the conditions, a key or the column `spec.against`
            does not exist, runs of a cell differ in more than their seeds, or
            aggregates are not possible.
    """
    done = select(finished(runs), conditions)
    if not done:
        raise no_finished_run(runs, conditions)
    check_keys(done, [*spec.rows, spec.cols, spec.value])

    latest = newest_by_config(done)
    members = _group_by_cell(latest, spec)
    cells = {cell: _values_by_seed(cell, found, spec) for cell, found in members.items()}
    columns = sorted({column for _, column in cells}, key=sort_key)
    against = None if spec.against is None else _column(spec.against, columns)
    places = sorted(
        {place for place, _ in cells}, key=lambda place: [sort_key(text) for text in place]
    )

    pairs = [
        (place, compare(a, b, cells[place, a], cells[place, b]))
        for place in places
        for a, b in column_pairs(columns, against)
        if (place, a) in cells and (place, b) in cells
    ]
    judged = adjusted([comparison for _, comparison in pairs])
    notes = _notes(done, latest, members, spec)
    notes += _unfinished(select(runs, conditions), done, spec)
    aggregates, better = None, spec.better
    if spec.aggregate:
        better = better or _direction(latest, spec.value)
        aggregates, left_out = _aggregates(cells, places, columns, better, against)
        notes += left_out

    measured = {" ".join((run.headline or {})[k] for k in ("metric", "rule")) for run in latest}
    return RunsTable(
        spec,
        tuple(places),
        tuple(columns),
        cells,
        tuple((place, one) for (place, _), one in zip(pairs, judged, strict=True)),
        tuple(sorted(measured)) if spec.value == "headline" else (spec.value,),
        tuple(notes),
        aggregates,
        better,
    )


def mean_text(values: Sequence[float], digits: str = ".4f") -> str:
    """Return ``mean ± deviation (n)``. A single run has no deviation.

    The deviation is NaN if one of the values is not finite.

    Args:
        values: Values of the runs.
        digits: Format of the numbers.
    """
    if not values:
        return "-"
    mean, spread = mean_and_deviation(values)
    shown = "" if spread is None else f" ± {spread:{digits}}"
    return f"{mean:{digits}}{shown} ({len(values)})"


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of at least one value.

    A single value has no deviation (None). The deviation is NaN if one of the values is
    not finite, and infinite if it exceeds the largest float.
    """
    try:
        mean = statistics.fmean(values)
    except (OverflowError, ValueError):
        # The sum exceeds the largest float, or has infinities of both signs.
        mean = float(statistics.mean(values))
    if len(values) < 2:
        return mean, None
    try:
        return mean, deviation(values, is_sample=True)
    except OverflowError:
        return mean, math.inf


def _column(name: str, columns: Sequence[str]) -> str:
    """Return the column with this name, or with the same number (0.10 for 0.1).

    Raises:
        ConfigError: There is no such column.
    """
    if name in columns:
        return name
    is_text, number, _ = sort_key(name)
    if not is_text:
        for column in columns:
            if sort_key(column)[:2] == (0, number):
                return column
    raise ConfigError(
        f"the table has no column '{name}'",
        where="against",
        expected=", ".join(columns),
        do=suggest(name, columns),
    )


def _group_by_cell(runs: Iterable[StoredRun], spec: TableSpec) -> dict[Cell, list[StoredRun]]:
    cells: dict[Cell, list[StoredRun]] = {}
    for run in runs:
        cell = tuple(shown_value(run, key) for key in spec.rows), shown_value(run, spec.cols)
        cells.setdefault(cell, []).append(run)
    return cells


def _values_by_seed(cell: Cell, runs: Sequence[StoredRun], spec: TableSpec) -> dict[Seeds, float]:
    """Return the values of a cell by seed.

    Raises:
        ConfigError: The runs of the cell differ in more than their seeds.
    """
    differing = differing_keys(runs)
    if differing:
        keys, texts = (*spec.rows, spec.cols), (*cell[0], cell[1])
        first, found = next(iter(differing.items()))
        raise ConfigError(
            f"runs of one cell differ in more than their seeds: {listed(differing)}",
            where=" ".join(f"{key}={text}" for key, text in zip(keys, texts, strict=True)),
            got=f"{first}: {listed(found)}",
            do=f"add a condition ({first}={found[0]}), or rows={','.join([*spec.rows, first])}",
        )

    values: dict[Seeds, float] = {}
    for run in runs:  # newest first
        number = value_of(run, spec.value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(
                f"'{spec.value}' of a run is not a number", where=run.name, got=text_of(number)
            )
        values.setdefault(seeds_of(run), float(number))
    return dict(
        sorted(values.items(), key=lambda item: [sort_key(text_of(seed)) for seed in item[0]])
    )


def _direction(runs: Sequence[StoredRun], value: str) -> str:
    """Return whether higher or lower numbers are better, by the name of the numbers.

    Raises:
        ConfigError: The runs' headlines are better in different directions.
    """
    names = {value}
    if value == "headline":
        names = {str((run.headline or {}).get("metric")) for run in runs}
    found = {
        "lower" if is_minimised(name) or any(word in name for word in _COSTS) else "higher"
        for name in names
    }
    if len(found) > 1:
        raise ConfigError(
            "the runs' headlines are better in different directions",
            where="value",
            got=listed(sorted(names)),
            do="set value to a metric that all of these runs have",
        )
    return found.pop()


def _aggregates(
    cells: Mapping[Cell, Mapping[Seeds, float]],
    places: Sequence[tuple[str, ...]],
    columns: Sequence[str],
    better: str,
    against: str | None,
) -> tuple[Aggregates, list[str]]:
    """Return the aggregates of the complete rows, and notes on the other rows.

    Raises:
        ConfigError: There are fewer than two columns or complete rows.
    """

    def has_numbers(place: tuple[str, ...], column: str) -> bool:
        numbers = cells.get((place, column), {}).values()
        return bool(numbers) and all(map(is_usable, numbers))

    lacking = [
        (place, column) for place in places for column in columns if not has_numbers(place, column)
    ]
    complete = [place for place in places if place not in dict(lacking)]
    if len(columns) < 2 or len(complete) < 2:
        without = listed([f"{column} in {' '.join(place)}" for place, column in lacking])
        raise ConfigError(
            "aggregates need two columns, and two rows in which all columns have only numbers "
            "that are finite and not huge",
            where="--aggregate",
            got=f"{len(columns)} columns, {len(complete)} such rows of {len(places)}"
            + (f"; without such numbers: {without}" if without else ""),
            do="add runs or conditions, or leave out --aggregate",
        )

    scores = {column: [cells[place, column] for place in complete] for column in columns}
    notes = [
        f"note: the aggregates leave out {' '.join(place)}, in which a column has no number, or "
        "one that is not finite or is huge"
        for place in places
        if place not in complete
    ]
    if len({len(row) for column in scores.values() for row in column}) > 1:
        notes.append("note: cells have different numbers of runs, which all count in the IQM")

    found = aggregate(scores, better == "higher", against)
    notes += [
        f"note: {one.column} has no intervals, because its rows have only some seeds in common"
        for one in found.columns
        if one.mean.low is None and min(map(len, scores[one.column])) > 1
    ]
    return found, notes


def _notes(
    runs: Sequence[StoredRun],
    latest: Sequence[StoredRun],
    cells: Mapping[Cell, Sequence[StoredRun]],
    spec: TableSpec,
) -> list[str]:
    """Return notes on runs that are left out, on other code, and on differing keys."""
    notes = []
    rules = {tuple((run.headline or {})[key] for key in ("metric", "rule")) for run in latest}
    if spec.value == "headline" and len(rules) > 1:
        notes.append("note: the runs' headlines are different metrics or rules")
    if len(runs) > len(latest):
        older = len(runs) - len(latest)
        notes.append(f"note: {older} results that other code made earlier are left out")
    mixed = [
        " ".join([*place, column])
        for (place, column), members in cells.items()
        if made_by_different_code(members)
    ]
    if mixed:
        notes.append(f"note: runs of one cell were made by different code: {listed(mixed)}")
    notes += [f"note: {note}" for note in notes_on_data(latest)]
    repeated = sum(
        len(members) - len({seeds_of(run) for run in members}) for members in cells.values()
    )
    if repeated:
        notes.append(f"note: {repeated} {EQUAL_RUNS} are left out")

    implied = implied_keys([*spec.rows, spec.cols])
    differing = [*differing_keys([members[0] for members in cells.values()], implied)]
    if differing:
        notes.append(f"note: cells differ also in {listed(differing)}")
    return notes


def _unfinished(runs: Sequence[StoredRun], done: Sequence[StoredRun], spec: TableSpec) -> list[str]:
    """Return a note that names the runs without a result, empty if there are none.

    Runs that ``reuse=false`` moved aside are not named. A run is also not named if
    there is a finished run of the same config.
    """
    configs = {run.path.parent.name for run in done}
    missing = [
        run
        for run in newest_by_config(run for run in runs if run.config and not run.is_aside)
        if run.path.parent.name not in configs
    ]
    if not missing:
        return []

    names = []
    for run in missing:
        keys = " ".join(f"{key}={shown_value(run, key)}" for key in (*spec.rows, spec.cols))
        names.append(f"{keys} seed {seed_text(seeds_of(run))} ({run.status})")
    left_out = "run is" if len(missing) == 1 else "runs are"
    return [f"note: {len(missing)} unfinished {left_out} left out: {listed(names)}"]
