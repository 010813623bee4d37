"""The text of ``fedexp --help``, read from the folders of configs.

Hydra is not used, because importing it takes longer than the rest of the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedexp.config.groups import groups
from fedexp.core.errors import ConfigError, suggest

_TEXT = """fedexp - federated aggregation methods, compared

Usage: fedexp [key=value ...]      one run
       fedexp -m [key=a,b ...]     a sweep over all combinations
       fedexp --dry-run [-m] ...   what would be run, what is stored, estimated time and disk

Groups (group=option; fedexp --help GROUP explains each of them):
{groups}

conf/config.yaml comments every key and its default (fedexp --help KEY).
fedexp --cfg job prints all of them resolved.

Examples:
  fedexp                                                   the defaults, on the embedded digits
  fedexp method=NAME dataset=mnist model=mlp_784_200       another method, data set, model
  fedexp -m method=NAME,NAME seed=0,1,2                    a sweep, resumed by the same command
  fedexp debug=smoke method=NAME                           any experiment in seconds
  fedexp --cfg job method=NAME                             print the config and stop
  fedexp --hydra-help                                      Hydra's own flags
Also: fedexp-data list|show|prepare
      fedexp-runs list|show|diff|rerun|export|table|clean
      fedexp-table list|run|report
"""


def help_text(*folders: Path) -> str:
    """Return the help text, with every group of the config folders and its options."""
    return _TEXT.format(
        groups="\n".join(f"{name}: {', '.join(options)}" for name, options in groups(folders))
    )


def topic_text(topic: str, *folders: Path) -> str:
    """Return the help on a group or a key.

    The help on a group lists its options, each with the first comment line of its file.
    The help on a key is the part of ``config.yaml`` that sets it.

    Raises:
        ConfigError: There is no such group or key.
    """
    options = dict(groups(folders))
    if topic in options:
        width = max(map(len, options[topic]))
        lines = [
            f"{option:<{width}}  {_first_comment(topic, option, folders)}".rstrip()
            for option in options[topic]
        ]
        return "\n".join([f"{topic}=OPTION", *(f"  {line}" for line in lines), ""])

    keys = dict(_top_level_keys(folders[0] / "config.yaml"))
    if (key := topic.partition(".")[0]) in keys:
        return keys[key]
    raise ConfigError(
        f"no group or key '{topic}'", where="--help", do=suggest(topic, [*options, *keys])
    )


def _first_comment(group: str, option: str, folders: tuple[Path, ...]) -> str:
    """Return the first line of the comment at the top of an option's file.

    A ``# @package`` line is skipped. The result is empty if there is no such comment.
    """
    path = next(path for folder in folders if (path := folder / group / f"{option}.yaml").exists())
    lines = (line for line in path.read_text().splitlines() if not line.startswith("# @package"))
    first = next(lines, "")
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _top_level_keys(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the top-level keys that `path` sets, with their lines.

    The comments directly above a key belong to the key if its own line has no comment.
    """
    key, part, above = "", "", ""
    for line in path.read_text().splitlines(keepends=True):
        if not line.strip():
            above = ""
        elif line.startswith("#"):
            above += line
        elif line[0].isspace():
            part += line
        else:
            if key:
                yield key, part
            key = line.partition(":")[0]
            part = line if " # " in line else above + line
            above = ""

    if key:
        yield key, part
