"""Config groups and their options, as the folders of config files define them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Folders in `conf` that are not config groups of an experiment.
NON_GROUP_FOLDERS = ("by_dataset", "table", "tuned")


def groups(folders: tuple[Path, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield every config group of an experiment with its options.

    Args:
        folders: Folders of config files, for example the result of `conf_dirs`.

    Yields:
        Pairs of a group's name and the sorted names of its options. The pairs are
        sorted by the name of the group.
    """
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            name, _, option = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            found.setdefault(name, set()).add(option)

    for name, options in sorted(found.items()):
        if name not in NON_GROUP_FOLDERS:
            yield name, sorted(options)
