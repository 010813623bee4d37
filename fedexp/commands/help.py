"""What ``fedexp --help`` prints, read off the config folders without Hydra, which takes longer than the rest of the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TEXT = """fedexp - federated aggregation methods, compared

Usage: fedexp [key=value ...]      one run
       fedexp -m [key=a,b ...]     a sweep over all combinations

Groups (group=option):
{groups}

Keys and their defaults are commented in conf/config.yaml; fedexp --cfg job prints them resolved.

Examples:
  fedexp                                                   the defaults, on the embedded digits
  fedexp method=NAME dataset=mnist model=mlp_784_200       another method, data set, model
  fedexp -m method=NAME,NAME seed=0,1,2                    a sweep; launch it again and it resumes
  fedexp debug=smoke method=NAME                           any experiment in seconds
  fedexp --cfg job method=NAME                             print the config and stop
  fedexp --hydra-help                                      Hydra's own flags
Also: fedexp-data list|show|prepare, fedexp-runs list|show|diff|clean, fedexp-table list|run|report
"""


def help_text(*folders: Path) -> str:
    """The text, with every group of the config folders and its options."""
    return _TEXT.format(groups="\n".join(f"{name}: {', '.join(options)}" for name, options in _groups(folders)))


def _groups(folders: tuple[Path, ...]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            name, _, option = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            found.setdefault(name, set()).add(option)
    for name, options in sorted(found.items()):
        if name not in ("table", "tuned"):  # never part of a config
            yield name, sorted(options)
