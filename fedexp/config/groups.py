"""Groups of options that the folders of configs contain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Folders of conf that are not groups of an experiment.
NON_GROUP_FOLDERS = ("by_dataset", "table", "tuned")


def groups(folders: tuple[Path, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield every group that a config can choose from, with its options.

    Args:
        folders: Folders of configs, e.g. `conf_dirs`.

    Yields:
        Pairs of a group's name and its sorted options, sorted by name.
    """
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            name, _, option = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            found.setdefault(name, set()).add(option)

    for name, options in sorted(found.items()):
        if name not in NON_GROUP_FOLDERS:
            yield name, sorted(options)
