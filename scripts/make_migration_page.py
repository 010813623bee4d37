"""Write `docs/0.1-to-0.2.md`: every name that changed, from `fedexp/core/renames.yaml`.

    python scripts/make_migration_page.py [--check]

With ``--check`` nothing is written, and the exit code is 1 if the file is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from fedexp.core.renames import renames

PAGE = Path(__file__).resolve().parents[1] / "docs" / "0.1-to-0.2.md"
HEAD = """# From 0.1 to 0.2

Version 0.2 gives modules, classes, hooks and config keys other names. It computes the same numbers.
A config or a module that uses an old name is refused before anything runs. The error names the new
name. No old name is an alias.

## Steps

1. Finish unfinished runs with 0.1. The class paths are part of a run's identity, so every
   run of 0.1 has another folder in 0.2. It does not resume there.
2. Install 0.2.
3. List the lines of your files that use an old class path, import or config key:

   <!-- not in CI: reads files of yours -->
   ```bash
   fedexp-runs check-conf ./conf
   ```

   The command reads the YAML files in `conf` and the Python files beside that folder. It writes
   nothing. Its exit code is 1 if a line must change. It does not read shell scripts.
4. Change these lines, and run the command again.
5. Change the hooks, fields and values of your classes by the last two tables below. A run
   refuses a class with an old hook or value, and the error names its place and the new name.

## Stored runs

`fedexp-runs` and `fedexp.load` read the runs of 0.1. `fedexp-runs rerun` refuses them: rerun them
with 0.1. A `result.json` of 0.2 contains `fedexp_version`. A result without this key is of 0.1.

The page is generated from `fedexp/core/renames.yaml` by `scripts/make_migration_page.py`.
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
        "\n## Config keys\n",
        _table(("0.1", "0.2", "options that have the key"), keys, plain={2}),
        "\n## Modules\n\nA class moves with its module unless the next table lists it.\n",
        _table(("0.1", "0.2"), table.modules.items()),
        "\n## Classes, functions and constants\n",
        _table(("0.1", "0.2"), table.names.items()),
        "\n## Hooks, fields and arguments\n\n`job.budget` is the argument `budget` of `job`.\n",
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
