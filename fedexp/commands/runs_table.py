"""The command ``fedexp-runs table``: a table of stored runs.

Rows and columns are values of config keys. Cells are means over seeds. Columns are
compared by paired tests.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Column

from fedexp.commands.presets import swapped_parts
from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.identity import SEEDS, scientific
from fedexp.storage.selection import ABSENT, check_keys, dotted_items, select, text_of, value_of
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.seeds import Comparison, Seeds, adjusted, compare
from fedexp.tracking.terminal import console, escaped, ruled_table

# For a row or column key, all keys that change together with it. A method's preset
# chooses the method's parts, so these keys change with ``method``. Their differences
# are not reported.
_PAIRS = {"method": ("method", "trainer", "aggregator", "server_optimizer")}
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
    done = select(
        [run for run in runs if run.status == "done" and run.config and not run.is_aside],
        conditions,
    )
    if not done:
        raise ConfigError(
            "no finished run meets the conditions", got=" ".join(conditions) or "no runs"
        )

    check_keys(done, [*rows, cols, value])
    latest = _newest_by_config(done)
    cells = _group_by_cell(latest, rows, cols)
    found = {
        cell: _values_by_seed(cell, members, rows, cols, value) for cell, members in cells.items()
    }

    columns = sorted({col for _, col in found}, key=_sort_key)
    places = sorted(
        {place for place, _ in found}, key=lambda place: [_sort_key(text) for text in place]
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


def _newest_by_config(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return the newest run of each config.

    There may be several runs of one config, made by different versions of the code.
    """
    newest: dict[str, StoredRun] = {}
    for run in runs:  # newest first
        newest.setdefault(run.path.parent.name, run)
    return list(newest.values())


def _group_by_cell(
    runs: Iterable[StoredRun], rows: Sequence[str], cols: str
) -> dict[Cell, list[StoredRun]]:
    cells: dict[Cell, list[StoredRun]] = {}
    for run in runs:
        cell = tuple(_shown_value(run, key) for key in rows), _shown_value(run, cols)
        cells.setdefault(cell, []).append(run)
    return cells


def _shown_value(run: StoredRun, key: str) -> str:
    """Return the value of a key as a table shows it.

    The value of ``method`` also names each part that replaces a part of the method's
    preset, as in ``METHOD aggregator=OPTION``.
    """
    text = text_of(value_of(run, key))
    if key != "method":
        return text
    groups = _PAIRS["method"][1:]
    parts = [part for part in swapped_parts(run) if part.partition("=")[0] in groups]
    return " ".join([text, *parts])


def _values_by_seed(
    cell: Cell, runs: Sequence[StoredRun], rows: Sequence[str], cols: str, value: str
) -> dict[Seeds, float]:
    """Return the values of a cell by seed.

    Raises:
        ConfigError: The runs of the cell differ in more than their seeds.
    """
    differing = _differing_keys(runs)
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
        found.setdefault(tuple(value_of(run, key) for key in SEEDS), float(number))

    return dict(
        sorted(found.items(), key=lambda item: [_sort_key(text_of(seed)) for seed in item[0]])
    )


def _differing_keys(runs: Sequence[StoredRun], implied: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the keys that affect results and that differ between runs.

    Args:
        runs: Stored runs.
        implied: Keys that are left out, together with all keys below them. Seeds are
            always left out.

    Returns:
        For each of these keys, its different values.
    """
    sides = [dict(dotted_items(scientific(run.resolved_config))) for run in runs]
    keys = dict.fromkeys(key for side in sides for key in side)
    values = {
        key: sorted({text_of(side.get(key, ABSENT)) for side in sides}, key=_sort_key)
        for key in keys
    }

    return {
        key: texts
        for key, texts in values.items()
        if len(texts) > 1
        and key not in SEEDS
        and not any(key == one or key.startswith(f"{one}.") for one in implied)
    }


def _sort_key(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


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
            ", ".join(map(_seed_text, c.seeds)) or "none",
            escaped(c.verdict),
        )

    out = console()
    out.print(table)
    tests = sum(c.p is not None for _, c in comparisons)
    if tests:
        several = f"; p by Holm for {tests} tests, intervals each by itself" if tests > 1 else ""
        out.print(f"paired t-tests, two-sided{several}", soft_wrap=True)


def _seed_text(seeds: Seeds) -> str:
    """Return the seed as text. The seed of the data is added if it differs."""
    return str(seeds[0]) if seeds[0] == seeds[1] else f"{seeds[0]}/{seeds[1]}"


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

    if len({run.path.name for run in latest}) > 1 and cols not in _PAIRS:
        out.print(
            "note: not all of these runs were made by the same code", markup=False, soft_wrap=True
        )

    implied = [part for key in (*rows, cols) for part in _PAIRS.get(key, (key,))]
    differing = _differing_keys([members[0] for members in cells.values()], implied)
    if differing:
        names = ", ".join([*differing][:_SHOWN]) + (
            f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        )
        out.print(f"note: cells differ also in {names}", markup=False, soft_wrap=True)
