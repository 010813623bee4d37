"""The text of ``fedexp --help``, read from the folders of configs.

Hydra is not used, because importing it takes longer than the rest of the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from fedexp.config.comments import Key, first_sentence, header, keys_of
from fedexp.config.groups import groups
from fedexp.core.errors import ConfigError, nearest, suggest
from fedexp.storage.yaml_files import defaults_of, read_yaml

_TEXT = """fedexp - federated aggregation methods, compared

Usage: fedexp [key=value ...]      one run
       fedexp -m [key=a,b ...]     a sweep over all combinations
       fedexp --dry-run [-m] ...   what would be run, what is stored, estimated time and disk

Groups (group=option; fedexp --help GROUP explains them, fedexp --help GROUP=OPTION one of them):
{groups}

conf/config.yaml comments every key and its default (fedexp --help KEY).
fedexp --cfg job prints all of them resolved.

Examples:
  fedexp                                                   the defaults, on scikit-learn's digits
  fedexp method=NAME dataset=mnist model=mlp_784_200       another method, data set, model
  fedexp -m method=NAME,NAME seed=0,1,2                    a sweep, resumed by the same command
  fedexp debug=smoke method=NAME                           any experiment in seconds
  fedexp --cfg job method=NAME                             print the config and stop
  fedexp --hydra-help                                      Hydra's own flags
  fedexp --version                                         the version of fedexp
Also: fedexp-data list|show|prepare
      fedexp-runs list|show|diff|rerun|export|table|plot|clean|check-conf
      fedexp-table list|run|report|site
      fedexp-tune                 choose hyper-parameters on held-out data
"""


def help_text(*folders: Path) -> str:
    """Return the help text, with every group of the config folders and its options."""
    return _TEXT.format(
        groups="\n".join(f"{name}: {', '.join(options)}" for name, options in groups(folders))
    )


def topic_text(topic: str, *folders: Path) -> str:
    """Return the help on a group, an option of a group, or a key.

    The help on a group lists its options, each with the first sentence of its comment.
    The help on an option (``GROUP=OPTION``) contains the comment and the keys of the
    option's file. The help on a key is the part of ``config.yaml`` that sets the key.
    The help on a key of a group (``GROUP.KEY``) lists the options whose files set it.

    Raises:
        ConfigError: There is no such group, option or key.
    """
    options = dict(groups(folders))
    group, equals, option = topic.partition("=")
    if equals and group in options:
        if option not in options[group]:
            raise ConfigError(
                f"{group} has no option '{option}'",
                where="--help",
                expected=", ".join(options[group]),
                do=suggest(option, options[group]),
            )
        return _option_text(group, option, folders)
    if topic in options:
        width = max(map(len, options[topic]))
        lines = [
            f"{option:<{width}}  {first_sentence(header(_path(topic, option, folders)))}".rstrip()
            for option in options[topic]
        ]
        about = f"{topic}=OPTION (fedexp --help {topic}=OPTION lists the keys of an option)"
        return "\n".join([about, *(f"  {line}" for line in lines), ""])

    group, dot, name = topic.partition(".")
    if dot and group in options:
        return _group_key_text(group, name, options[group], folders)

    file = folders[0] / "config.yaml"
    keys = dict(_top_level_keys(file))
    if topic in keys:
        return keys[topic]
    if group in keys:
        names = [key.name for key in keys_of(file) if key.top == group]
        if not any(f"{key}.".startswith(f"{topic}.") for key in names):
            raise ConfigError(
                f"there is no key '{topic}'", where="--help", do=suggest(topic, names)
            )
        return keys[group]
    raise ConfigError(
        f"no group or key '{topic}'", where="--help", do=suggest(topic, [*options, *keys])
    )


def _path(group: str, option: str, folders: tuple[Path, ...]) -> Path:
    return next(path for folder in folders if (path := folder / group / f"{option}.yaml").exists())


def _option_text(group: str, option: str, folders: tuple[Path, ...]) -> str:
    """Return the comment of an option, and its keys with their values and comments.

    Some options are presets, for example the options of ``method``. A preset chooses
    options of other groups, called its parts. For a preset, the text also contains the
    keys of the parts. If the preset sets such a key, the preset's value is shown.
    """
    path = _path(group, option, folders)
    parts = [
        (chosen, _path(chosen, name, folders))
        for how, chosen, name in defaults_of(read_yaml(path))
        if how == "override"
    ]
    # A preset sets keys by their full names. In other files, keys are relative to the
    # group.
    prefix = "" if _is_preset(path) else f"{group}."
    shown = {f"{prefix}{key.name}": key for key in _own_keys(path)}
    for chosen, part in parts:
        for key in keys_of(part):
            if key.default is not None:
                name = f"{chosen}.{key.name}"
                shown[name] = replace(key, default=shown.get(name, key).default)

    lines = [f"{group}={option}: {header(path)}"]
    lines += [f"  {chosen}={part.stem}" for chosen, part in parts]
    for name, key in shown.items():
        if not name.endswith("_target_"):
            lines.append(_key_line(name, key))
    return "\n".join([*lines, ""])


def _group_key_text(group: str, name: str, options: list[str], folders: tuple[Path, ...]) -> str:
    """Return a group's key with value and comment, by the options whose files set it.

    If the key contains other keys, these are listed instead.
    """
    lines: list[str] = []
    names: set[str] = set()
    for option in options:
        path = _path(group, option, folders)
        # A run refuses a damaged file. Keys of a preset are not keys of its group.
        if not _is_mapping(path) or _is_preset(path):
            continue
        keys = {f"{group}.{key.name}": key for key in _own_keys(path)}
        names.update(keys)
        found = {key: keys[key] for key in keys if f"{key}.".startswith(f"{group}.{name}.")}
        if found:
            lines.append(f"{group}={option}")
            lines += [_key_line(key, value) for key, value in found.items()]

    if not lines:
        near = nearest(f"{group}.{name}", sorted(names))
        raise ConfigError(
            f"no option of {group} has the key '{name}'",
            where="--help",
            do=f"did you mean '{near}'?"
            if near
            else f"fedexp --help {group}=OPTION lists the keys of an option",
        )
    about = f"{group}.{name} (fedexp --help {group}=OPTION lists all keys of an option)"
    return "\n".join([about, *lines, ""])


def _own_keys(path: Path) -> list[Key]:
    """Return the keys that a file sets, without ``defaults`` and ``_target_``."""
    return [
        key
        for key in keys_of(path)
        if key.default is not None and key.top != "defaults" and not key.name.endswith("_target_")
    ]


def _is_preset(path: Path) -> bool:
    return "# @package _global_" in path.read_text()


def _is_mapping(path: Path) -> bool:
    try:
        return isinstance(read_yaml(path), dict)
    except yaml.YAMLError:
        return False


def _key_line(name: str, key: Key) -> str:
    about = " ".join(filter(None, (key.note, key.comment)))
    return f"  {name}: {key.default}{f'  # {about}' if about else ''}"


def _top_level_keys(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the top-level keys that `path` sets, with their lines.

    If a key's own line has no comment, the comments directly above it are part of its
    lines.
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
