"""The blocks of a table of stored runs, as texts, Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedexp.analysis.aggregates import Aggregates, Estimate
from fedexp.analysis.groups import seed_text
from fedexp.analysis.table import RunsTable, mean_and_deviation, mean_text
from fedexp.tables.report.csv import csv_text, inert
from fedexp.tables.report.latex import escape, table_row
from fedexp.tracking.outlet import visible

# If the largest number of a table is smaller or larger, its numbers are scientific.
_SMALL, _LARGE = 0.01, 1e5


@dataclass(frozen=True)
class Block:
    """A part of a table that has one heading.

    Args:
        name: Name of the block, a part of the name of its CSV file.
        head: Heading of each column.
        rows: Texts of each row.
        records: The same rows with all numbers at full precision, for CSV.
        right: Positions of the columns that are aligned to the right.
        notes: Lines below the block.
    """

    name: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    records: tuple[Mapping[str, Any], ...]
    right: frozenset[int] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()


def blocks(table: RunsTable) -> list[Block]:
    """Return the blocks of a table: means, tests, and aggregates if there are any."""
    found = [_means(table)]
    if table.comparisons:
        found.append(_tests(table))
    if table.aggregates is not None:
        found += [_aggregates(table.aggregates, table.spec.cols, _digits(table))]
        found += [_improvements(table.aggregates, table.spec.cols)]
    return found


def notes(table: RunsTable) -> list[str]:
    """Return the lines below all blocks: what is measured, and notes on the runs."""
    measured = f"value: {', '.join(table.measured)}; mean ± sample deviation (runs)"
    if table.better is not None:
        measured += f"; {table.better} is better"
    return [measured, *table.notes]


def markdown(table: RunsTable) -> str:
    """Return the table as Markdown."""
    parts = []
    for block in blocks(table):
        rule = ["---:" if i in block.right else "---" for i in range(len(block.head))]
        lines = [block.head, rule, *block.rows]
        parts.append("".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines))
        parts += [f"{note}\n" for note in block.notes]
    return "\n".join([*parts, *(f"{note}\n" for note in notes(table))])


def latex(table: RunsTable) -> str:
    """Return each block as a ``tabular`` that needs the package booktabs."""
    lines: list[str] = []
    for block in blocks(table):
        columns = "".join("r" if i in block.right else "l" for i in range(len(block.head)))
        lines += [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            _tex_row(block.head),
            r"\midrule",
            *map(_tex_row, block.rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(f"% {visible(note)}" for note in block.notes),
            "",
        ]
    return "\n".join([*lines, *(f"% {visible(note)}" for note in notes(table))]) + "\n"


def csv(block: Block) -> str:
    """Return a block as CSV with all numbers at full precision."""
    names = list(block.records[0])
    return csv_text(
        (inert(visible(name)) for name in names),
        ([record[name] for name in names] for record in block.records),
    )


def _means(table: RunsTable) -> Block:
    spec, digits = table.spec, _digits(table)
    found = {
        (place, column): [*table.cells.get((place, column), {}).values()]
        for place in table.places
        for column in table.columns
    }
    rows = tuple(
        (*place, *(mean_text(found[place, column], digits) for column in table.columns))
        for place in table.places
    )
    records = tuple(
        {
            **dict(zip(spec.rows, place, strict=True)),
            spec.cols: column,
            "mean": mean_and_deviation(values)[0],
            "sd": mean_and_deviation(values)[1],
            "runs": len(values),
            "seeds": ", ".join(map(seed_text, table.cells[place, column])),
        }
        for (place, column), values in found.items()
        if values
    )
    first = len(spec.rows)
    head = (*spec.rows, *(_label(spec.cols, column) for column in table.columns))
    return Block("means", head, rows, records, frozenset(range(first, len(head))))


def _digits(table: RunsTable) -> str:
    """Return the format of the table's numbers.

    It is scientific if four decimals would hide very small numbers, or if the numbers
    would be very long. All numbers of a table have the same format.
    """
    values = [abs(value) for cell in table.cells.values() for value in cell.values()]
    largest = max(filter(math.isfinite, values), default=0.0)
    return ".4f" if largest == 0 or _SMALL <= largest < _LARGE else ".4e"


def _label(cols: str, column: str) -> str:
    """Return the name of a column, with its key unless it is a method or data set."""
    return column if cols in ("method", "dataset") else f"{cols}={column}"


def _tests(table: RunsTable) -> Block:
    keys, cols, digits = table.spec.rows, table.spec.cols, _digits(table)
    # A pair of numbers without their key, such as 0.5 - 0.1, would look like a sum.
    named = [
        (place, replace(c, a=_label(cols, c.a), b=_label(cols, c.b)))
        for place, c in table.comparisons
    ]
    rows = tuple(
        (
            *place,
            f"{c.b} - {c.a}",
            "-" if c.difference is None else f"{c.difference:+{digits}}",
            "-" if c.interval is None else " to ".join(f"{end:+{digits}}" for end in c.interval),
            "-" if c.p is None else f"{c.p:.3g}",
            ", ".join(map(seed_text, c.seeds)) or "none",
            c.verdict,
        )
        for place, c in named
    )
    records = tuple(
        {
            **dict(zip(keys, place, strict=True)),
            "b": c.b,
            "a": c.a,
            "difference": c.difference,
            "low": None if c.interval is None else c.interval[0],
            "high": None if c.interval is None else c.interval[1],
            "p": c.p,
            "seeds": ", ".join(map(seed_text, c.seeds)),
            "verdict": c.verdict,
        }
        for place, c in table.comparisons
    )
    tests = sum(c.p is not None for _, c in table.comparisons)
    several = f"; p adjusted for {tests} tests (Holm), intervals not adjusted" if tests > 1 else ""
    head = (*keys, "pair", "difference", "95 %", "p", "common seeds", "verdict")
    right = frozenset((len(keys) + 1, len(keys) + 3))
    remarks = (f"paired t-tests, two-sided{several}",) if tests else ()
    return Block("tests", head, rows, records, right, remarks)


def _aggregates(found: Aggregates, cols: str, digits: str) -> Block:
    estimates = ("mean", "median", "iqm")
    rows, records = [], []
    for one in found.columns:
        texts = [_interval_text(getattr(one, name), digits) for name in estimates]
        wins = "-" if one.win_rate is None else f"{one.win_rate:.2f}"
        groups = ", ".join(map(str, one.groups))
        rows.append((one.column, *texts, f"{one.rank:.2f}", wins, groups or "-"))
        numbers = {
            name + suffix: value
            for name in estimates
            for suffix, value in _parts(getattr(one, name))
        }
        own = {"rank": one.rank, "win_rate": one.win_rate, "groups": groups}
        records.append({cols: one.column, **numbers, **own})

    remarks = [
        f"over {found.num_rows} rows. The [95 % intervals] describe other seeds, not other rows. "
        "Those of the mean are by Student's t, the others by a stratified bootstrap over seeds, "
        "which is too narrow with few seeds"
    ]
    if found.p is not None and found.critical_difference is not None:
        remarks.append(
            f"Friedman's test of the ranks: p = {found.p:.3g}. Critical difference of average "
            f"ranks (Nemenyi, 5 %): {found.critical_difference:.2f}. The ranks of a group are not "
            "distinguished"
        )
    head = (cols, "mean", "median", "IQM", "rank", "win rate", "group")
    right = frozenset(range(1, 6))
    return Block("aggregates", head, tuple(rows), tuple(records), right, tuple(remarks))


def _improvements(found: Aggregates, cols: str) -> Block:
    rows = tuple(
        (f"{_label(cols, one.b)} over {_label(cols, one.a)}", _interval_text(one.probability))
        for one in found.improvements
    )
    records = tuple(
        {"b": one.b, "a": one.a}
        | {f"probability{suffix}": value for suffix, value in _parts(one.probability)}
        for one in found.improvements
    )
    head = ("pair", "probability of improvement")
    return Block("improvements", head, rows, records, frozenset((1,)))


def _parts(estimate: Estimate) -> Iterator[tuple[str, float | None]]:
    yield from (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high))


def _interval_text(estimate: Estimate, digits: str = ".4f") -> str:
    if estimate.low is None:
        return f"{estimate.value:{digits}}"
    return f"{estimate.value:{digits}} [{estimate.low:{digits}}, {estimate.high:{digits}}]"


def _cell(text: str) -> str:
    return visible(text).replace("|", r"\|")


def _tex_row(texts: Sequence[str]) -> str:
    return table_row(escape(visible(text)) for text in texts)
