"""What the config folders offer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

NON_GROUP_FOLDERS = (
    "by_dataset",
    "table",
    "tuned",
)  # folders of conf that are no groups of an experiment


def groups(folders: tuple[Path, ...]) -> Iterator[tuple[str, list[str]]]:
    """Every group that a config can choose from, with its options."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            name, _, option = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            found.setdefault(name, set()).add(option)
    for name, options in sorted(found.items()):
        if name not in NON_GROUP_FOLDERS:
            yield name, sorted(options)
