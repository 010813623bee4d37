"""Write `docs/0.1-to-0.2.md`: every name that changed, from `fedexp/core/renames.yaml`.

    python scripts/make_migration_page.py [--check]

With ``--check``, nothing is written, and the exit code is 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedexp.core.renames import renames

PAGE = Path(__file__).resolve().parents[1] / "docs" / "0.1-to-0.2.md"
HEAD = """# From 0.1 to 0.2

In version 0.2, modules, classes, hooks and configuration keys have new names. The old names do not
work any more. If a configuration or a module uses an old name, fedexp refuses it before anything
runs, and the error message gives the new name. The new names change no computed number.

## Steps

1. Finish unfinished runs with 0.1. Version 0.2 does not continue them, because it uses another
   folder for every run. The name of the folder depends on the paths of the classes, which changed.
2. Install 0.2.
3. List the lines of your files that use an old class path, import or configuration key:

   <!-- not in CI: reads files of yours -->
   ```bash
   fedexp-runs check-conf ./conf
   ```

   The command reads the YAML files in `conf`, and the Python files in the folder that contains
   `conf`. It does not read shell scripts. It writes nothing. Its exit code is 1 if a line must
   change.
4. Change these lines, and run the command again.
5. Change the hooks, fields and values of your classes. The last two tables of this page list
   them. If a class has an old hook or value, fedexp refuses to run it. The error message gives the
   place and the new name.

## Stored runs

`fedexp-runs` and `fedexp.load` can read the runs of 0.1. `fedexp-runs rerun` cannot repeat them.
Use 0.1 to repeat a run of 0.1. A `result.json` of 0.2 contains the key `fedexp_version`. A result
without this key is of 0.1.

The following tables are generated from `fedexp/core/renames.yaml` by
`scripts/make_migration_page.py`.
"""


def page() -> str:
    """Return the text of the page."""
    table = renames()
    members = [
        (kind, old, new) for kind, members in table.members.items() for old, new in members.items()
    ]
    values = [
        (f"{kind}.{name}", old, new)
        for kind, attributes in table.values.items()
        for name, values in attributes.items()
        for old, new in values.items()
    ]
    keys = [
        (old, key.new, ", ".join(f"`{old.partition('.')[0]}={one}`" for one in key.options) or "-")
        for old, key in table.keys.items()
    ]
    parts = [
        HEAD,
        "\n## Configuration keys\n",
        _table(("0.1", "0.2", "options that have this key"), keys, plain={2}),
        "\n## Modules\n\n"
        "If a module moved, its classes moved with it, unless the next table lists them.\n",
        _table(("0.1", "0.2"), table.modules.items()),
        "\n## Classes, functions and constants\n",
        _table(("0.1", "0.2"), table.names.items()),
        "\n## Hooks, fields and arguments\n\n"
        "In this table, `job.budget` stands for the argument `budget` of the method `job`.\n",
        _table(("class", "0.1", "0.2"), members),
        "\n## Values\n",
        _table(("attribute", "0.1", "0.2"), values),
    ]
    return "".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], plain: Collection[int] = ()) -> str:
    """Return a Markdown table. Cells are code, except those of the columns `plain`."""
    lines = [head, ["---"] * len(head)]
    lines += [
        [cell if number in plain else f"`{cell}`" for number, cell in enumerate(row)]
        for row in rows
    ]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        sys.exit(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
