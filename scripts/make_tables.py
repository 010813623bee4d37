"""Write the printed numbers of published tables into ``conf/table``.

    python scripts/make_tables.py DIR
    python scripts/make_tables.py DIR --check

The numbers are copied by this script, so that no digit is typed by hand. A table's file
in ``conf/table`` has an entry `published: {file, table}`. DIR contains the file
<file>.yaml, which has the rows of the published table. With `only: {key: value}` beside
`table`, the other rows are left out.

In the table's file, everything from the line MARK to the end is generated. A published
row belongs to the column whose `published` values it has (default: ``{method:
<key>}``). The row's values of the table's `keys` are its conditions. Digits stay as
printed. With ``--check``, nothing is changed, and the exit code is 1 if a file would
change.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import FedexpError

MARK = "# The paper's numbers. scripts/make_tables.py writes this block."
HOME = Path(__file__).resolve().parents[1] / "conf" / "table"


def reference(table: dict[str, Any], rows: list[dict[str, str]], name: str) -> str:
    """Return the YAML of `reference` for a table's file.

    Args:
        table: The part of the file that was written by hand.
        rows: Rows of the published table, with all values as text.
        name: Name of the file in error messages.

    Raises:
        FedexpError: A row belongs to no column or to several columns, or a row has no
            value for one of the table's `keys`.
    """
    lines = ["reference:"]

    for row in rows:
        fitting = [column["key"] for column in table["methods"] if _fits(column, row)]
        if len(fitting) != 1:
            raise FedexpError(
                "a published row must belong to one column",
                where=name,
                got=f"{row} belongs to {fitting or 'none'}",
            )

        absent = [key for key in table["keys"] if key not in row]
        if absent:
            raise FedexpError(
                f"a published row has no {', '.join(absent)}", where=name, got=str(row)
            )

        cell = {key: row[key] for key in table["keys"]} | {
            "method": fitting[0],
            "value": row["value"],
        }
        if "std" in row:
            cell["sd"] = row["std"]
        lines.append("  - {" + ", ".join(f"{key}: {value}" for key, value in cell.items()) + "}")
    return "\n".join(lines) + "\n"


def _fits(column: dict[str, Any], row: dict[str, str]) -> bool:
    if column.get("reads"):
        # The column reads a printed column in a different way, so it has no numbers of
        # its own.
        return False
    wanted = column.get("published") or {"method": column["key"]}
    return all(row.get(key) == str(value) for key, value in wanted.items())


def generate(path: Path, published: Path) -> str | None:
    """Return the complete new text of a table's file.

    The result is None if the file has no entry `published`.
    """
    head = path.read_text().partition(MARK)[0].rstrip("\n") + "\n"
    table = yaml.safe_load(head)

    source = table.get("published")
    if source is None:
        return None
    file = published / f"{source['file']}.yaml"
    if not file.is_file():
        raise FedexpError(
            "the file of published numbers does not exist",
            where=str(file),
            do="give the folder that contains it",
        )

    tables = {t["id"]: t for t in yaml.load(file.read_text(), yaml.BaseLoader)["tables"]}
    if source["table"] not in tables:
        raise FedexpError(
            f"unknown table '{source['table']}'", where=str(file), expected=", ".join(tables)
        )
    only = source.get("only", {}).items()
    rows = [
        row
        for row in tables[source["table"]]["rows"]
        if all(row.get(key) == str(value) for key, value in only)
    ]
    return f"{head}{MARK}\n{reference(table, rows, str(path))}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("published", type=Path, help="folder of the published files")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if a file would change"
    )

    options = parser.parse_args()

    changed = 0
    for path in sorted(HOME.rglob("[!_]*.yaml")):
        try:
            text = generate(path, options.published)
        except FedexpError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if text is None or text == path.read_text():
            continue
        changed += 1
        print(f"{'differs' if options.check else 'written'}: {path}")
        if not options.check:
            path.write_text(text)
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
