"""The pages of the leaderboards.

The first page says what was found and how methods are compared. Each leaderboard has a
page with sortable tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from fedexp.analysis.leaderboard import Entry, Leaderboard, leaderboard, row_text
from fedexp.analysis.leaderboard_picture import picture
from fedexp.core.errors import ConfigError
from fedexp.site import methods, traffic
from fedexp.site.page import Page
from fedexp.site.results import figure, image_files, site_environment
from fedexp.tables import record
from fedexp.tables.build_report import warnings_of_runs
from fedexp.tables.cells import planned_cells
from fedexp.tables.load import load_table, table_names
from fedexp.tables.report import layout, texts
from fedexp.tables.report.report import Picture
from fedexp.tables.schema import Table, fits
from fedexp.tables.settings import warning_of_settings
from fedexp.tables.sweeps import tried_ranges
from fedexp.tables.verdicts import LEVEL
from fedexp.tracking.terminal import size_text
from fedexp.tuning.space import Choice
from fedexp.tuning.tuned_files import Sweep, Swept, Tuning, load_tuning

# Folder of the records of runs that were made for their times only. It is beside the
# leaderboards' records.
_TIMING = "timing"
# Largest number of methods that a sentence names.
_FEW = 8

# A tuning, and what `tried_ranges` returns for each of its columns with results.
Chosen = tuple[Tuning, Mapping[str, Sequence[tuple[Choice, str]]]]


@dataclass(frozen=True)
class Shown:
    """A leaderboard and what its page shows besides.

    Args:
        table: The table.
        board: The leaderboard. None: there are no runs.
        tunings: How the coefficients of the columns were chosen.
        needs: What each column's method needs and FedAvg does not, by the column's key.
        costs: The picture of accuracies and costs, None if no costs are known.
        command: Command that executes the runs.
        notes: Warnings that the compared runs may not be comparable.
    """

    table: Table
    board: Leaderboard | None
    tunings: Sequence[Tuning]
    needs: Mapping[str, Sequence[str]]
    costs: Picture | None
    command: str
    notes: Sequence[str] = ()

    @property
    def page(self) -> str:
        """Name of the page without folder and suffix."""
        return self.table.name.rpartition("/")[2]

    @cached_property
    def chosen(self) -> list[Chosen]:
        """Each tuning, with the tried ranges and the best values by column."""
        return [
            (tuning, {column: tried_ranges(tuning, column) for column in tuning.results})
            for tuning in self.tunings
        ]


def read(folder: Path) -> list[Shown]:
    """Read the leaderboards.

    Args:
        folder: Folder of the records. The record of ``<paper>/<name>`` is in
            ``<folder>/<paper>/<name>``, and that of its timing in
            ``<folder>/<paper>/timing/<name>``.

    Raises:
        ConfigError: A record has another variant than the full one, or its runs have
            overrides of a user. Or its runs had other settings than the table has now.
    """
    found = []
    for name in sorted(table_names()):
        table = load_table(name)
        if not table.equal_tuning:
            continue
        made, notes = _board(table, folder) or (None, ())
        entries = () if made is None else made.entries
        found.append(
            Shown(
                table,
                made,
                [load_tuning(tuning) for tuning in table.equal_tuning],
                {entry.column: _needs(entry.method) for entry in entries if entry.method},
                None if made is None else picture(made),
                f"fedexp-table run {name}",
                notes,
            )
        )
    return found


def _board(table: Table, folder: Path) -> tuple[Leaderboard, tuple[str, ...]] | None:
    """Read a leaderboard, and warnings that its runs may not be comparable."""
    paper, _, name = table.name.partition("/")
    runs, times = folder / paper / name, folder / paper / _TIMING / name
    if not (runs / record.ABOUT).is_file():
        return None
    found = record.read(table, runs)
    if found.variant != "full" or found.extra:
        raise ConfigError(
            "the record of a leaderboard has all runs, without other overrides",
            where=str(runs),
            expected="the full variant",
            got=" ".join([f"the {found.variant} variant", *found.extra]),
        )
    cells = planned_cells(table, found.variant)
    compared = [run for cell in cells for run in found.runs_of(table, cell)]
    altered = {run.run for run in compared if run.done and run.altered}
    wrong = [*warning_of_settings(table, cells, found)]
    if altered:
        wrong.append(f"{texts.count(len(altered), 'run')} with overrides of a user")
    if wrong:
        raise ConfigError(
            "runs of a leaderboard had other settings than the table",
            where=str(runs / record.RUNS),
            expected="runs with the settings of the table",
            got="; ".join(wrong),
            do=f"run the table again: fedexp-table run {table.name}",
        )

    timing = record.read(table, times) if (times / record.ABOUT).is_file() else None
    board = leaderboard(table, cells, found, timing)
    return board, tuple(warnings_of_runs(compared, found.configs))


def _needs(method: str) -> list[str]:
    """Return what a preset needs and FedAvg does not.

    A preset of a user is not known here, and has an empty list.
    """
    return [
        need
        for preset in methods.presets()
        if preset.name == method
        for need in methods.needs(preset, traffic.first_step(preset.experiment))
        if need != "same architecture"
    ]


def pages(shown: Sequence[Shown], *, with_methods: bool) -> list[Page]:
    """Return the first page, and one page per leaderboard that was run.

    Args:
        shown: The leaderboards.
        with_methods: Whether the site has pages of the methods, to which names link.
    """
    made = [
        Page("leaderboards/index.md", "Leaderboards", _rendered("leaderboards.md", shown=shown))
    ]
    for one in shown:
        if one.board is not None:
            text = _rendered("leaderboard.md", one=one, board=one.board, with_methods=with_methods)
            made.append(Page(f"leaderboards/{one.page}.md", one.page.replace("_", " "), text))
    return made


def files_of(shown: Sequence[Shown]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of each picture that the pages show."""
    for one in shown:
        if one.costs is not None:
            for ending, data in image_files(one.costs).items():
                yield f"leaderboards/{one.page}/{one.costs.name}{ending}", data


# --- sentences


def finding(board: Leaderboard, with_numbers: bool = True) -> str:
    """Return in plain words what a leaderboard found.

    Args:
        board: The leaderboard.
        with_numbers: Whether the text has accuracies, ranks and differences, with
            intervals.
    """
    ranked = [entry for entry in board.entries if entry.aggregate is not None]
    if len(ranked) < 2:
        return "Fewer than two methods have results in all rows that count."

    best, reference = ranked[0], board.reference
    seeds = max(row.n for entry in ranked for at in board.counted if (row := entry.rows[at]))
    rows = [board.rows[at] for at in board.counted]
    missing_rows = board.missing_counted
    settings = texts.count(len(rows) + len(missing_rows), "setting")
    if missing_rows:
        # The shorter list is named
        if len(missing_rows) < len(rows):
            named = f"all except {', '.join(map(row_text, missing_rows))}"
        else:
            named = ", ".join(map(row_text, rows))
        settings = f"{len(rows)} of {settings} ({named})"
    parts = [
        f"{len(ranked)} methods were compared in {settings} with {texts.count(seeds, 'seed')} each."
    ]
    if with_numbers:
        parts.append(
            f"{best.label} is the best with {_mean(board, best)}."
            if len(rows) == 1
            else f"{best.label} has the best average rank, {_rank(best)}. "
            f"Its mean over the settings is {_mean(board, best)}.",
        )
    if reference.aggregate is None:
        return " ".join(parts)
    if with_numbers and best is not reference:
        parts.append(
            f"{reference.label} has rank {_rank(reference)} and {_mean(board, reference)}."
        )

    lacking = [entry.label for entry in board.entries if entry.aggregate is None and entry.method]
    missing = f"Not counted, because runs are missing: {', '.join(lacking)}." if lacking else ""
    compared = [entry for entry in ranked if entry.difference and entry.difference.p is not None]
    equal = [entry for entry in ranked if _is_equal(entry)]
    same = ""
    if equal:
        verb = "method does" if len(equal) == 1 else "methods do"
        same = f"{len(equal)} {verb} not differ from {reference.label} in any of these runs."
    if not compared:
        return " ".join(filter(None, [*parts, same, missing]))
    above, below, undecided = (
        [entry for entry in compared if _side(board, entry) == side] for side in (1, -1, 0)
    )
    parts.append(
        f"By a paired t-test over seeds, adjusted for the number of methods, "
        f"{_named(above, board, with_numbers)} better than {reference.label}, and "
        f"{_named(below, board, with_numbers)} worse."
    )
    if undecided:
        parts.append(f"For {texts.count(len(undecided), 'method')}, the difference is undecided.")
    return " ".join(filter(None, [*parts, same, missing]))


def _is_equal(entry: Entry) -> bool:
    """Return whether a method has the numbers of the reference, so there is no test."""
    found = entry.difference
    return found is not None and found.p is None and found.difference == 0


def _side(board: Leaderboard, entry: Entry) -> int:
    """Return whether a method is better than the reference.

    Returns:
        1 if it is significantly better, -1 if it is significantly worse, else 0.
    """
    found = entry.difference
    if found is None or found.difference is None or found.p is None or found.p >= LEVEL:
        return 0
    return 1 if (found.difference > 0) == board.table.higher_is_better else -1


def _named(entries: Sequence[Entry], board: Leaderboard, with_numbers: bool) -> str:
    """Return the names of methods, with their differences from the reference."""
    if not entries:
        return "no method is"
    verb = "is" if len(entries) == 1 else "are"
    if len(entries) > _FEW:
        return f"{len(entries)} methods {verb}"
    named = [
        f"{entry.label} ({difference(board, entry)})" if with_numbers else entry.label
        for entry in entries
    ]
    return f"{', '.join(named[:-1])} and {named[-1]} are" if named[1:] else f"{named[0]} is"


def difference(board: Leaderboard, entry: Entry) -> str:
    """Return the difference of a method from the reference, with its interval."""
    found = entry.difference
    if found is None or found.difference is None:
        return ""
    places = _places(board)
    text = layout.signed(found.difference, places)
    if found.interval is not None:
        low, high = (layout.signed(end, places) for end in found.interval)
        text = f"{text}, {low} to {high}"
    return layout.minus(text)


def interval_text(value: float, low: float | None, high: float | None, places: int) -> str:
    """Return a number with its interval, as ``85.20 (84.90 to 85.50)``."""
    if low is None or high is None:
        return layout.minus(layout.number(value, places))
    value_text, *ends = (layout.number(x, places) for x in (value, low, high))
    return layout.minus(f"{value_text} ({' to '.join(ends)})")


def _mean(board: Leaderboard, entry: Entry) -> str:
    assert entry.aggregate is not None
    mean, places = entry.aggregate.mean, _places(board)
    text = f"{layout.number(mean.value, places)} {_unit(board)}"
    if mean.low is not None and mean.high is not None:
        low, high = (layout.number(end, places) for end in (mean.low, mean.high))
        text = f"{text} (95 % interval {low} to {high})"
    return layout.minus(text)


def _rank(entry: Entry) -> str:
    assert entry.aggregate is not None
    return f"{entry.aggregate.rank:.1f}"


def _places(board: Leaderboard) -> int:
    return 2 if board.table.unit == "percent" else 4


def _unit(board: Leaderboard) -> str:
    return "%" if board.table.unit == "percent" else board.table.unit


def rounds_text(value: float | None) -> str:
    """Return a number of rounds, which is infinite if the target was not reached."""
    if value is None:
        return ""
    return "not reached" if math.isinf(value) else f"{value:.0f}"


def bytes_text(value: float | None) -> str:
    """Return a number of bytes, which is infinite if the target was not reached."""
    if value is None:
        return ""
    return "not reached" if math.isinf(value) else size_text(value)


def seconds_text(value: float | None) -> str:
    """Return seconds with three significant digits, "" for None."""
    return "" if value is None else f"{value:.3g}"


def sort_value(value: float | None) -> str:
    """Return a number as JavaScript reads it, "" for None."""
    if value is None:
        return ""
    return "Infinity" if math.isinf(value) else repr(float(value))


def points(tuning: Tuning) -> int:
    """Return the number of points that a method tries. All methods have as many."""
    sweeps = next(iter(tuning.sweeps.values()))
    return sum(len(sweep.points) for sweep in sweeps)


def tried(tuning: Tuning, column: str) -> str:
    """Return the points of a column, each with its number once it was measured."""
    sweeps = tuning.results.get(column) or tuning.sweeps[column]
    return "; ".join(f"{sweep.over}: {', '.join(_tried(sweep))}" for sweep in sweeps)


def _tried(sweep: Sweep | Swept) -> list[str]:
    if isinstance(sweep, Sweep):
        return [str(point) for point in sweep.points]
    return [
        f"{point} ({'failed' if value is None else f'{value:.4f}'})"
        for point, value in zip(sweep.points, sweep.values, strict=True)
    ]


def best_values(ranges: Sequence[tuple[Choice, str]] | None) -> str:
    """Return the best values of a column, and mark those at the edge of a range.

    Args:
        ranges: Range and best value of each key. None: nothing was chosen yet.
    """
    if ranges is None:
        return "not chosen yet"
    values = []
    for space, value in ranges:
        edge = space.edge(value)
        values.append(f"{space.key}={value}" + (f" ({edge} edge)" if edge else ""))
    return ", ".join(values)


def edge_note(board: Leaderboard, chosen: Sequence[Chosen]) -> str:
    """Return how many ranked methods have a best value at the edge of its range.

    Tunings for rows that are not shown yet are left out.
    """
    ranked = {entry.column for entry in board.entries if entry.aggregate is not None}
    at_edge = {
        column
        for tuning, ranges in chosen
        if any(fits(tuning.where, row, "") for row in board.rows)
        for column in ranked & ranges.keys()
        if any(space.edge(value) for space, value in ranges[column])
    }
    if not at_edge:
        return ""
    subject = "1 method has" if len(at_edge) == 1 else f"{len(at_edge)} methods have"
    return (
        f"{subject} a hyper-parameter whose best value is the lowest or the highest that was "
        "tried. A value beyond it may be better."
    )


def _rendered(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(values)


@cache
def _environment() -> Environment:
    environment = site_environment()
    environment.globals |= {
        "finding": finding,
        "figure": lambda one: Markup(figure(one.costs, one.page)),
        "difference": difference,
        "row_text": row_text,
        "rounds_text": rounds_text,
        "bytes_text": bytes_text,
        "seconds_text": seconds_text,
        "sort_value": sort_value,
        "points": points,
        "tried": tried,
        "best_values": best_values,
        "edge_note": edge_note,
        "places": _places,
        "unit": _unit,
        "number": lambda value, places: layout.minus(layout.number(value, places)),
        "interval": interval_text,
    }
    return environment
