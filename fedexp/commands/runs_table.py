"""The command ``fedexp-runs table``: a table of stored runs.

Rows and columns are values of config keys. Cells are means over seeds. Columns are
compared by paired tests. The table can also be written as a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Column

from fedexp.analysis import blocks
from fedexp.analysis.table import RunsTable, TableSpec, runs_table
from fedexp.core.errors import ConfigError, suggest
from fedexp.storage.files import write_text
from fedexp.storage.stored_run import StoredRun
from fedexp.tracking.outlet import visible
from fedexp.tracking.terminal import console, escaped, ruled_table

_NAMES = ("rows", "cols", "value", "better", "against")
_NEAR = ("row", "col", "columns", "values", "best")
_DIRECTIONS = ("higher", "lower")
SUFFIXES = (".md", ".tex", ".csv")
# Number of characters between two columns of a printed table.
_GAP = 3
# A longer word may be broken. No number is so long.
_LONGEST_WORD = 24


def table(
    runs: Sequence[StoredRun], arguments: Sequence[str], aggregate: bool, out: Path | None
) -> int:
    """Print a table of stored runs, and write it to `out`.

    Args:
        runs: Stored runs, the newest first.
        arguments: ``rows=KEY[,KEY]``, ``cols=KEY``, ``value=METRIC``,
            ``better=higher|lower``, ``against=COLUMN`` and conditions on runs.
        aggregate: Whether the table has aggregates over the rows.
        out: Markdown, LaTeX or CSV file to write, or None. CSV has one file per block.

    Returns:
        The exit code.

    Raises:
        ConfigError: The arguments are invalid, or runs of a cell differ in more than
            their seeds.
    """
    spec, conditions = _parse_arguments(arguments, aggregate)
    if out is not None and out.suffix not in SUFFIXES:
        raise ConfigError(
            f"a table cannot be written as '{out.suffix}'",
            where="--out",
            expected=f"a file that ends in {', '.join(SUFFIXES)}",
            got=str(out),
        )

    found = runs_table(runs, spec, conditions)
    _print(found)
    if out is not None:
        written = _write(found, out)
        console().print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    return 0


def _parse_arguments(arguments: Sequence[str], aggregate: bool) -> tuple[TableSpec, list[str]]:
    given: dict[str, str] = {}
    conditions = []
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name in _NAMES:
            given[name] = text
        elif name in _NEAR:
            raise ConfigError(f"'{name}' is not part of a table", do=suggest(name, _NAMES))
        else:
            conditions.append(argument)

    if not given.get("rows") or not given.get("cols"):
        raise ConfigError(
            "a table needs its rows and its columns",
            expected="rows=KEY[,KEY] cols=KEY, and value=METRIC (default: the headline)",
            got=" ".join(arguments) or "nothing",
            do="e.g. fedexp-runs table rows=partition.alpha cols=method",
        )

    first, *others = given["cols"].split(",")
    if others:
        raise ConfigError(
            "a table has one key for its columns",
            where="cols",
            got=given["cols"],
            do=f"rows={','.join([given['rows'], *others])} cols={first}",
        )

    value = given.get("value", "headline")
    better = given.get("better")
    if better not in (None, *_DIRECTIONS):
        raise ConfigError(
            "the direction of a table is not known",
            where="better",
            expected="higher or lower",
            got=better,
            do=suggest(str(better), _DIRECTIONS),
        )
    rows = tuple(given["rows"].split(","))
    spec = TableSpec(rows, given["cols"], value, aggregate, better, given.get("against"))
    return spec, conditions


def _print(found: RunsTable) -> None:
    out = console()
    for block in blocks.blocks(found):
        widths = _widths([block.head, *block.rows], out.width)
        columns = [
            Column(
                escaped(text),
                justify="right" if i in block.right else "left",
                overflow="fold",
                width=width,
            )
            for i, (text, width) in enumerate(zip(block.head, widths, strict=True))
        ]
        shown = ruled_table(*columns)
        # A table that is wider than the terminal is printed in full.
        total = sum(widths) + _GAP * len(widths)
        shown.width = total if total > out.width else None
        for row in block.rows:
            shown.add_row(*map(escaped, row))
        out.print(shown, crop=False)
        for note in block.notes:
            out.print(note, markup=False, soft_wrap=True)
    for note in blocks.notes(found):
        out.print(note, markup=False, soft_wrap=True)


def _widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return widths of columns, with which lines break only between words.

    Thereby no number is cut. A name of more than `_LONGEST_WORD` characters may be
    broken. The widths may need more characters than are available.

    Args:
        rows: Texts of the heading and of each row.
        available: Number of characters per line.
    """
    columns = [[visible(text) for text in column] for column in zip(*rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    least = [
        min(max(cell_len(word) for text in column for word in text.split() or [""]), _LONGEST_WORD)
        for column in columns
    ]
    while sum(widths) + _GAP * len(widths) > available:
        spare = [width if width > own else 0 for width, own in zip(widths, least, strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def _write(found: RunsTable, out: Path) -> list[Path]:
    """Write the table and return the paths of the written files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix != ".csv":
        write_text(out, blocks.markdown(found) if out.suffix == ".md" else blocks.latex(found))
        return [out]

    paths = []
    for number, block in enumerate(blocks.blocks(found)):
        path = out if number == 0 else out.with_name(f"{out.stem}-{block.name}.csv")
        write_text(path, blocks.csv(block))
        paths.append(path)
    return paths
