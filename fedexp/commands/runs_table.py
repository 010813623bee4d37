"""The command ``fedexp-runs table``: a table of stored runs.

Rows and columns are values of config keys. Cells are means over seeds. Columns are
compared by paired tests.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Column

from fedexp.analysis.groups import (
    changes_method,
    differing_keys,
    finished,
    implied_keys,
    newest_by_config,
    seed_text,
    seeds_of,
    shown_value,
    sort_key,
)
from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.selection import check_keys, select, text_of, value_of
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Comparison, Seeds, adjusted, compare
from fedexp.tracking.terminal import console, escaped, ruled_table

# Largest number of keys or values in one message.
_SHOWN = 4

# A cell of the table: the values of the row keys, and the value of the column key.
Cell = tuple[tuple[str, ...], str]


def print_table(runs: Sequence[StoredRun], arguments: Sequence[str]) -> int:
    """Print a table of stored runs.

    Args:
        runs: Stored runs, the newest first.
        arguments: ``rows=KEY[,KEY]``, ``cols=KEY``, ``value=METRIC`` and conditions on
            runs.

    Returns:
        The exit code.

    Raises:
        ConfigError: The arguments are invalid, or runs of a cell differ in more than
            their seeds.
    """
    rows, cols, value, conditions = _parse_arguments(arguments)
    done = select(finished(runs), conditions)
    if not done:
        raise ConfigError(
            "no finished run meets the conditions", got=" ".join(conditions) or "no runs"
        )

    check_keys(done, [*rows, cols, value])
    latest = newest_by_config(done)
    cells = _group_by_cell(latest, rows, cols)
    found = {
        cell: _values_by_seed(cell, members, rows, cols, value) for cell, members in cells.items()
    }

    columns = sorted({col for _, col in found}, key=sort_key)
    places = sorted(
        {place for place, _ in found}, key=lambda place: [sort_key(text) for text in place]
    )
    comparisons = [
        (place, compare(a, b, found.get((place, a), {}), found.get((place, b), {})))
        for place in places
        for a, b in itertools.combinations(columns, 2)
        if (place, a) in found and (place, b) in found
    ]

    judged = adjusted([comparison for _, comparison in comparisons])
    _print_means(found, rows, cols, places, columns)
    _print_tests([(place, c) for (place, _), c in zip(comparisons, judged, strict=True)], rows)
    _print_notes(done, latest, cells, rows, cols, value)

    return 0


def _parse_arguments(arguments: Sequence[str]) -> tuple[tuple[str, ...], str, str, list[str]]:
    given: dict[str, str] = {}
    rest = []
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name in ("rows", "cols", "value"):
            given[name] = text
        elif name in ("row", "col", "columns", "values"):
            raise ConfigError(
                f"'{name}' is not part of a table", do=suggest(name, ["rows", "cols", "value"])
            )
        else:
            rest.append(argument)

    if not given.get("rows") or not given.get("cols"):
        raise ConfigError(
            "a table needs its rows and its columns",
            expected="rows=KEY[,KEY] cols=KEY, and value=METRIC (default: the headline)",
            got=" ".join(arguments) or "nothing",
            do="e.g. fedexp-runs table rows=partition.alpha cols=method",
        )

    return tuple(given["rows"].split(",")), given["cols"], given.get("value", "headline"), rest


def _group_by_cell(
    runs: Iterable[StoredRun], rows: Sequence[str], cols: str
) -> dict[Cell, list[StoredRun]]:
    cells: dict[Cell, list[StoredRun]] = {}
    for run in runs:
        cell = tuple(shown_value(run, key) for key in rows), shown_value(run, cols)
        cells.setdefault(cell, []).append(run)
    return cells


def _values_by_seed(
    cell: Cell, runs: Sequence[StoredRun], rows: Sequence[str], cols: str, value: str
) -> dict[Seeds, float]:
    """Return the values of a cell by seed.

    Raises:
        ConfigError: The runs of the cell differ in more than their seeds.
    """
    differing = differing_keys(runs)
    if differing:
        place = " ".join(
            f"{key}={text}" for key, text in zip((*rows, cols), (*cell[0], cell[1]), strict=True)
        )
        first, texts = next(iter(differing.items()))
        raise ConfigError(
            f"runs of one cell differ in more than their seeds: {', '.join([*differing][:_SHOWN])}",
            where=place,
            got=f"{first}: {', '.join(texts[:_SHOWN])}",
            do=f"add a condition ({first}={texts[0]}), or rows={','.join([*rows, first])}",
        )

    found: dict[Seeds, float] = {}
    for run in runs:  # newest first
        number = value_of(run, value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(
                f"'{value}' of a run is not a number", where=run.name, got=text_of(number)
            )
        found.setdefault(seeds_of(run), float(number))

    return dict(
        sorted(found.items(), key=lambda item: [sort_key(text_of(seed)) for seed in item[0]])
    )


def _print_means(
    found: Mapping[Cell, Mapping[Seeds, float]],
    rows: Sequence[str],
    cols: str,
    places: Sequence[tuple[str, ...]],
    columns: Sequence[str],
) -> None:
    prefix = "" if cols in ("method", "dataset") else f"{cols}="
    numbers = [Column(escaped(prefix + column), justify="right") for column in columns]
    table = ruled_table(*map(escaped, rows), *numbers)
    for place in places:
        cells = [_mean_text(list(found.get((place, column), {}).values())) for column in columns]
        table.add_row(*map(escaped, place), *cells)
    console().print(table)


def _mean_text(values: Sequence[float]) -> str:
    """Return ``mean ± deviation (n)``. A single run has no deviation."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread} ({len(values)})"


def _print_tests(
    comparisons: Sequence[tuple[tuple[str, ...], Comparison]], rows: Sequence[str]
) -> None:
    if not comparisons:
        return
    table = ruled_table(
        *map(escaped, rows),
        "pair",
        Column("difference", justify="right"),
        "95 %",
        Column("p", justify="right"),
        "common seeds",
        "verdict",
    )
    for place, c in comparisons:
        table.add_row(
            *map(escaped, place),
            escaped(f"{c.b} - {c.a}"),
            "-" if c.difference is None else f"{c.difference:+.4f}",
            "-" if c.interval is None else f"{c.interval[0]:+.4f} to {c.interval[1]:+.4f}",
            "-" if c.p is None else f"{c.p:.3g}",
            ", ".join(map(seed_text, c.seeds)) or "none",
            escaped(c.verdict),
        )

    out = console()
    out.print(table)
    tests = sum(c.p is not None for _, c in comparisons)
    if tests:
        several = f"; p by Holm for {tests} tests, intervals each by itself" if tests > 1 else ""
        out.print(f"paired t-tests, two-sided{several}", soft_wrap=True)


def _print_notes(
    runs: Sequence[StoredRun],
    latest: Sequence[StoredRun],
    cells: Mapping[Cell, Sequence[StoredRun]],
    rows: Sequence[str],
    cols: str,
    value: str,
) -> None:
    """Print the name of the measured value, and notes on the comparison of cells.

    The notes are about runs that are left out, different code, and other keys that
    differ between cells.
    """
    out = console()
    measured = sorted(
        {" ".join((run.headline or {})[k] for k in ("metric", "rule")) for run in latest}
    )
    name = value if value != "headline" else ", ".join(measured)
    out.print(f"value: {name}; mean ± sample deviation (runs)", markup=False, soft_wrap=True)
    if value == "headline" and len(measured) > 1:
        out.print(
            "note: the runs' headlines are different metrics or rules", markup=False, soft_wrap=True
        )

    if len(runs) > len(latest):
        out.print(
            f"note: {len(runs) - len(latest)} results that other code made earlier are left out",
            soft_wrap=True,
        )

    if len({run.path.name for run in latest}) > 1 and not changes_method([cols]):
        out.print(
            "note: not all of these runs were made by the same code", markup=False, soft_wrap=True
        )

    implied = implied_keys([*rows, cols])
    differing = differing_keys([members[0] for members in cells.values()], implied)
    if differing:
        names = ", ".join([*differing][:_SHOWN]) + (
            f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        )
        out.print(f"note: cells differ also in {names}", markup=False, soft_wrap=True)
