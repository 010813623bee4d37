"""A leaderboard: the results of all methods of a table in all of its rows.

A table is a leaderboard if `Table.equal_tuning` names files in ``conf/tuned``. The
coefficients of all its columns are then chosen with equally many runs. Its first column
is the reference, with which all other methods are compared.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from fedexp.analysis.aggregates import Aggregates, ColumnAggregate, aggregate, means_by_seed
from fedexp.analysis.series import mean_interval
from fedexp.core.errors import ConfigError
from fedexp.tables.cells import PlannedCell
from fedexp.tables.grouping import grouped
from fedexp.tables.record import RunRecord, TableRecord
from fedexp.tables.report.csv import csv_text
from fedexp.tables.report.report import Value
from fedexp.tables.schema import Table
from fedexp.tables.seeds import Comparison, Seeds, adjusted, compare

# Metric of `RowResult.worst_tenth`.
WORST_TENTH = "train/clients/acc_worst_10"
# Phases of `RowResult.round_seconds`.
_ROUND = ("train", "probe", "aggregate")


@dataclass(frozen=True)
class RowResult:
    """The results of a method in one row of a leaderboard.

    All numbers are means over runs, unless it says otherwise. A number is None if a run
    does not have it.

    Args:
        n: Number of runs.
        mean: Mean of the table's numbers.
        low: Lower end of the 95 % interval of the mean (Student's t). None if there is
            only one run.
        high: Upper end of this interval, or None.
        worst_tenth: Accuracy on the training data of the 10 % of clients with the
            lowest accuracy, in the table's unit.
        target: The target of the headline, in the table's unit.
        rounds_to_target: Median over runs of the first round that reaches the target.
            It is infinite if at most half of the runs reach it.
        bytes_to_target: `rounds_to_target` times the bytes that all clients send and
            receive in a round.
        num_bytes: Bytes that all clients send and receive in a run.
        round_seconds: Seconds of a round, without the evaluation: local training of all
            clients, probes and aggregation. None if it was not timed.
        server_seconds: Seconds of aggregation in a round. None if it was not timed.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    worst_tenth: float | None
    target: float | None
    rounds_to_target: float | None
    bytes_to_target: float | None
    num_bytes: float | None
    round_seconds: float | None
    server_seconds: float | None


@dataclass(frozen=True)
class Entry:
    """A method of a leaderboard.

    Args:
        column: Key of the table's column.
        label: Label of the column.
        method: Option of ``method``, empty if no run is done.
        rows: Results in the rows of the leaderboard. None: a run of the row is missing,
            or its number is not finite.
        aggregate: Aggregates over the rows that count (`Leaderboard.counted`). None if
            the results of such a row are missing.
        difference: Comparison of the method with the reference. The number of a seed is
            the mean over the rows that count. The p values are adjusted for the number
            of methods. None for the reference, and if the results of such a row are
            missing.
    """

    column: str
    label: str
    method: str
    rows: tuple[RowResult | None, ...]
    aggregate: ColumnAggregate | None
    difference: Comparison | None


@dataclass(frozen=True)
class Leaderboard:
    """A leaderboard.

    Args:
        table: The table.
        rows: Conditions of the rows in which most methods are complete.
        missing: Conditions of the other rows, which are not shown yet.
        absent: For each of the `rows` and then of the `missing` rows, the labels of the
            methods of which the table has no cell there.
        entries: The methods, by average rank. Methods without a rank come last.
        aggregates: Aggregates over the rows that count. None if fewer than two methods
            have results in all of them.
    """

    table: Table
    rows: tuple[Mapping[str, Value], ...]
    missing: tuple[Mapping[str, Value], ...]
    absent: tuple[tuple[str, ...], ...]
    entries: tuple[Entry, ...]
    aggregates: Aggregates | None

    @property
    def reference(self) -> Entry:
        """The entry of the table's first column."""
        first = self.table.methods[0].key
        return next(entry for entry in self.entries if entry.column == first)

    @property
    def counted(self) -> list[int]:
        """The numbers of the rows that count in ranks, means and differences.

        The table has a cell of every method in them.
        """
        return [at for at in range(len(self.rows)) if not self.absent[at]]

    @property
    def missing_counted(self) -> list[Mapping[str, Value]]:
        """Conditions of the `missing` rows that will count."""
        absent = self.absent[len(self.rows) :]
        return [row for row, labels in zip(self.missing, absent, strict=True) if not labels]

    def rows_with(self, name: str) -> list[int]:
        """Return the numbers of the rows in which a method has a field of `RowResult`.

        Rounds, for example, may be timed in one of the rows only.
        """
        return [
            at
            for at in range(len(self.rows))
            if any(
                row is not None and getattr(row, name) is not None
                for row in (entry.rows[at] for entry in self.entries)
            )
        ]

    def mean_over_rows(self, entry: Entry, name: str) -> float | None:
        """Return a method's mean over the counted rows that are `rows_with` a field.

        Returns:
            The mean. None if the method lacks the field in one of these rows, or if
            there are no such rows.
        """
        rows = [entry.rows[at] for at in self.rows_with(name) if at in self.counted]
        return _mean(None if row is None else getattr(row, name) for row in rows)


def leaderboard(
    table: Table,
    cells: Sequence[PlannedCell],
    record: TableRecord,
    timing: TableRecord | None = None,
) -> Leaderboard:
    """Compare the methods of a table.

    Args:
        table: The table.
        cells: All cells of the recorded variant.
        record: The record of the table's runs.
        timing: The record of runs that were made for their times only, on a machine
            that computed nothing else. None: there are no such runs.
    """
    every = {table.row_key(cell.conditions): cell.conditions for cell in cells}
    runs: dict[str, dict[tuple[Value, ...], list[RunRecord]]] = {}
    for cell in cells:
        own = runs.setdefault(cell.method, {})
        own[table.row_key(cell.conditions)] = record.runs_of(table, cell)
    complete = Counter(
        place for own in runs.values() for place, found in own.items() if _is_complete(found)
    )
    planned = Counter(place for own in runs.values() for place in own)
    # The first methods of a new row must not cost all others their rank.
    places = {at: conditions for at, conditions in every.items() if 2 * complete[at] > planned[at]}
    missing = {at: conditions for at, conditions in every.items() if at not in places}
    absent = {
        at: tuple(table.columns[column].label for column, own in runs.items() if at not in own)
        for at in (*places, *missing)
    }
    # A method that cannot run in a row must not lose its rank.
    counted = [at for at in places if not absent[at]]

    scores: dict[str, list[dict[Seeds, float]]] = {
        column: [
            {(run.split_seed,): run.value for run in own[place] if run.value is not None}
            for place in counted
        ]
        for column, own in runs.items()
        if counted and all(_is_complete(own[place]) for place in counted)
    }
    aggregates = aggregate(scores, table.higher_is_better) if len(scores) > 1 else None
    ranked = {one.column: one for one in aggregates.columns} if aggregates else {}
    differences = _differences(table.methods[0].key, scores)
    timed = grouped(
        (key[:2], run) for key, run in (timing.runs.items() if timing else ()) if run.done
    )

    entries = [
        Entry(
            column,
            table.columns[column].label,
            next((run.choice for found in own.values() for run in found if run.choice), ""),
            tuple(
                _row_result(
                    own.get(place, ()), table.headline.scale, timed.get((place, column), ())
                )
                for place in places
            ),
            ranked.get(column),
            differences.get(column),
        )
        for column, own in runs.items()
    ]
    entries.sort(key=lambda entry: entry.aggregate.rank if entry.aggregate else math.inf)
    return Leaderboard(
        table,
        tuple(places.values()),
        tuple(missing.values()),
        tuple(absent.values()),
        tuple(entries),
        aggregates,
    )


def _differences(
    reference: str, scores: Mapping[str, Sequence[Mapping[Seeds, float]]]
) -> dict[str, Comparison]:
    """Compare each column with the reference, on means over the rows that count."""
    means = {column: means_by_seed(rows) for column, rows in scores.items()}
    if reference not in means:
        return {}
    found = [
        compare(reference, column, means[reference], own)
        for column, own in means.items()
        if column != reference
    ]
    return {comparison.b: comparison for comparison in adjusted(found)}


def _is_complete(runs: Sequence[RunRecord]) -> bool:
    """Return whether there are runs, and all have a finite number."""
    return bool(runs) and all(run.value is not None and math.isfinite(run.value) for run in runs)


def _row_result(
    runs: Sequence[RunRecord], scale: float, timed: Sequence[RunRecord]
) -> RowResult | None:
    if not _is_complete(runs):
        return None

    worst = _mean(run.parts.get(WORST_TENTH) for run in runs)
    traffic = _mean(
        None if run.bytes_up is None or run.bytes_down is None else run.bytes_up + run.bytes_down
        for run in runs
    )
    target, rounds = _target(runs)
    to_target = None
    if rounds is not None and traffic is not None and runs[0].rounds:
        to_target = rounds * traffic / runs[0].rounds

    mean, low, high = mean_interval([run.value for run in runs if run.value is not None])

    return RowResult(
        len(runs),
        mean,
        low if len(runs) > 1 else None,
        high if len(runs) > 1 else None,
        None if worst is None else worst * scale,
        None if target is None else target * scale,
        rounds,
        to_target,
        traffic,
        _round_seconds(timed, _ROUND),
        _round_seconds(timed, ("aggregate",)),
    )


def _target(runs: Sequence[RunRecord]) -> tuple[float | None, float | None]:
    """Return the target of runs, and the median of the rounds in which they reach it.

    Raises:
        ConfigError: The runs have several targets.
    """
    targets = sorted({name for run in runs for name in run.rounds_to})
    if len(targets) > 1:
        raise ConfigError(
            "the runs of a leaderboard have one target",
            where="headline.targets",
            got=", ".join(targets),
        )
    if not targets or any(not run.rounds_to for run in runs):
        return None, None
    rounds = statistics.median_high([run.rounds_to[targets[0]] for run in runs])
    return float(targets[0]), rounds


def _round_seconds(runs: Sequence[RunRecord], phases: Sequence[str]) -> float | None:
    """Return the mean seconds of a round that runs spent in some phases."""
    return _mean(
        sum(run.phases.get(phase, 0.0) for phase in phases) / run.rounds if run.rounds else None
        for run in runs
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of values, None if there are none or one of them is None."""
    every = list(values)
    known = [value for value in every if value is not None]
    return statistics.fmean(known) if known and len(known) == len(every) else None


# Columns of the CSV file that name a result.
_NAMES = ("leaderboard", "row", "counts", "method", "label")
# Columns with the fields of `RowResult`.
_ROW = tuple(field.name for field in fields(RowResult))
# Columns with the results of a method over the rows that count.
_OVERALL = (
    "rank",
    "win_rate",
    "mean_of_rows",
    "mean_of_rows_low",
    "mean_of_rows_high",
    "difference",
    "difference_low",
    "difference_high",
    "p",
)


def to_csv(leaderboards: Iterable[Leaderboard]) -> str:
    """Return leaderboards as CSV, one line per method and row.

    Numbers have full precision. The last columns, from ``rank`` on, are over the rows
    that count (``counts`` is 1). They are equal in all lines of a method.
    """
    lines = []
    for board in leaderboards:
        for entry in board.entries:
            own = entry.aggregate
            overall: list[float | None] = [None] * 5
            if own is not None:
                mean = own.mean
                overall = [own.rank, own.win_rate, mean.value, mean.low, mean.high]
            gap = entry.difference
            if gap is None:
                overall += [None] * 4
            else:
                overall += [gap.difference, *(gap.interval or (None, None)), gap.p]
            for at, (conditions, row) in enumerate(zip(board.rows, entry.rows, strict=True)):
                results = [None if row is None else getattr(row, name) for name in _ROW]
                counts = int(at in board.counted)
                names = [board.table.name, row_text(conditions), counts, entry.column, entry.label]
                lines.append([*names, *results, *overall])
    return csv_text([*_NAMES, *_ROW, *_OVERALL], lines)


def row_text(conditions: Mapping[str, Value]) -> str:
    """Return the conditions of a row as text, such as ``clients=5 alpha=0.1``."""
    return " ".join(f"{key}={value}" for key, value in conditions.items())
