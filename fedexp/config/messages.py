"""Translation of Hydra's errors into `ConfigError`, and a check for flags.

The messages suggest a valid name if the user misspelled a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.folders import conf_dirs
from fedexp.config.groups import NON_GROUP_FOLDERS
from fedexp.config.search_path import (
    group_names,
    is_group,
    names_group,
    option_keys,
    option_names,
    user_conf_hash,
)
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.renames import renamed_key, renames
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.yaml_files import read_yaml

# A function that composes the config. Its argument is the list of those overrides that
# choose options of config groups. It is called inside `use_hydra`.
ComposeGroups = Callable[[list[str]], DictConfig]


def refuse_flags(overrides: list[str], flags: Sequence[str] = ()) -> None:
    """Refuse overrides that begin with a dash.

    Args:
        overrides: Arguments of the command without its known flags.
        flags: Known flags of the command. The message suggests the most similar flag.
            Empty for the Python function `run`.

    Raises:
        ConfigError: An override begins with a dash.
    """
    for number, flag in enumerate(overrides):
        if not flag.startswith("-"):
            continue
        key, equals, value = flag.lstrip("-").partition("=")
        if not equals:
            value = next(iter(overrides[number + 1 : number + 2]), "VALUE")
        near = nearest(flag.partition("=")[0], [known for known in flags if known.startswith("--")])
        more = (
            "a folder of configs is ./conf, or hydra.searchpath=[file:///path/to/conf]"
            if flags
            else "a sweep is not one run"
        )

        do = (
            more
            if "=" in value and not equals
            else f"keys have no dashes: {key}={value}. Also, {more}"
        )
        raise ConfigError(
            f"unknown flag '{flag}'",
            expected=", ".join(flags) or "key=value",
            do=f"did you mean '{near}'?" if near else do,
        )


@contextmanager
def translated_errors(overrides: list[str], compose_groups: ComposeGroups) -> Iterator[None]:
    """Translate Hydra's errors in a ``with`` block into `ConfigError`.

    If the environment variable HYDRA_FULL_ERROR is 1, the errors are not translated.

    Args:
        overrides: Overrides that the messages refer to.
        compose_groups: Function that composes the chosen options. The messages suggest
            keys of these options.
    """
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        yield
        return

    try:
        yield
    except OverrideParseException as error:
        raise _parse_error(str(error.override), overrides) from None
    except MissingConfigException as error:
        raise _missing_option_error(error) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            "a config file is not YAML", where=" ".join(str(error).split()), do="correct the file"
        ) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise _key_error(error, overrides, compose_groups) from None
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        parsed = OverridesParser.create().parse_overrides([o for o in overrides if names_group(o)])
        odd = next(
            one for one in parsed if not one.is_delete() and not isinstance(one.value(), str | list)
        )
        group, name = odd.key_or_group, (odd.input_line or "").partition("=")[2]
        raise _unknown_option_error(group, name, option_names(group), group) from None


def dataset_in_method_error(file: str) -> ConfigError:
    """Return the error about a method preset that sets keys of ``dataset``.

    Args:
        file: Path of the preset's file in ``conf``, without suffix: ``method/NAME``.
    """
    name = file.removeprefix("method/")
    return ConfigError(
        "a method's preset cannot set keys of the data set, which is composed after it",
        where=f"{file}.yaml",
        expected="keys and options of other groups",
        got="dataset",
        do=f"put it into conf/experiment/{name}.yaml, "
        f"with '- override /method: {name}' in its defaults",
    )


def unresolved_error(error: Exception, config: DictConfig) -> ConfigError:
    """Return the error about a value that cannot be resolved.

    The message contains the key of the value and the value as it is written. If an
    interpolation names an unknown key, the message suggests a known key.

    Args:
        error: Error of OmegaConf.
        config: Composed config.
    """
    text = str(error).splitlines()[0]
    found = re.search(r"full_key: (\S+)", str(error))
    key = found.group(1) if found else None
    missing = re.search(r"Interpolation key '([^']+)' not found", text)
    known = _known_keys(config)

    do = None
    if missing:
        near = nearest(missing.group(1), known)
        others = {name: value for name, value in known.items() if name != key}
        do = f"did you mean '{near}'?" if near else _nearest_key_hint(missing.group(1), others)

    return ConfigError(
        f"the config cannot be resolved: {text}",
        where=key,
        got=None if key is None else known.get(key),
        do=do,
    )


def key_of_file_error(error: ConfigError, config: ResolvedConfig) -> ConfigError | None:
    """Return the error about a key that a config file sets, but an option lacks.

    The file of an experiment or a method may choose an option in a config group and set
    keys of this option. If the user overrides the choice, the user's option may not
    have these keys.

    Args:
        error: Error about an unknown key.
        config: Config that contains the unknown key.

    Returns:
        An error that names the config file. None if no such file is the reason, for
        example because the user set the key.
    """
    key = str(error.facts.get("where"))
    group = key.partition(".")[0]
    given = [override.lstrip("+").partition("=")[0] for override in config.overrides]
    if not error.what.startswith("unknown key") or key in given or group not in given:
        return None

    for kind in ("experiment", "method"):
        chosen = config.choices.get(kind)
        if chosen is None or not _sets_key(kind, str(chosen), key):
            continue
        option = f"{group}={config.choices.get(group)}"
        return ConfigError(
            f"{kind}={chosen} sets '{key}', a key that {option} does not have",
            where=f"conf/{kind}/{chosen}.yaml, {key}",
            expected=error.facts.get("expected"),
            got=option,
            do=f"add '~{key}' to the command (with quotes), or leave out {option}",
        )
    return None


def _sets_key(kind: str, option: str, key: str) -> bool:
    """Return whether a config file sets a dotted key.

    Args:
        kind: Config group of the file, such as ``experiment``.
        option: Name of the file without its suffix.
        key: The dotted key.
    """
    for folder in conf_dirs():
        path = folder / kind / f"{option}.yaml"
        node: Any = read_yaml(path) if path.is_file() else None
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            return True
    return False


def _parse_error(override: str, overrides: list[str]) -> ConfigError:
    """Return the error about an argument that is not a valid override."""
    meant = [f"{group}={override}" for group in group_names() if override in option_names(group)]
    meant = meant or _as_key_and_value(override, overrides)
    quote = (
        "quote other characters too: key='\"value\"', "
        "see https://hydra.cc/docs/advanced/override_grammar/basic/"
    )

    return ConfigError(
        f"'{override}' is not an override",
        expected="key=value (lists: key=[a,b], sweeps: key=a,b with -m, "
        "text with commas or spaces: key='\"a b\"')",
        do=" or ".join(f"did you mean '{one}'?" for one in meant) or quote,
    )


def _as_key_and_value(override: str, overrides: list[str]) -> list[str]:
    """Rewrite ``rounds 5``, ``rounds = 5`` and ``rounds:5`` as ``rounds=5``.

    Args:
        override: The argument that is not a valid override.
        overrides: All arguments of the command.

    Returns:
        A list with the corrected override, or an empty list for other mistakes.
    """
    if found := re.fullmatch(r"([\w.]+):([\w.]+)", override):
        return [f"{found[1]}={found[2]}"]
    if override not in overrides:
        return []
    after = [one for one in overrides[overrides.index(override) + 1 :] if one != "="]
    if after and re.fullmatch(r"[\w.]+", override) and "=" not in after[0]:
        return [f"{override}={after[0]}"]
    return []


def _missing_option_error(error: MissingConfigException) -> ConfigError:
    """Return the error about an option for which there is no config file.

    For config groups of fedexp, the message lists all options of the group, including
    those in subfolders.
    """
    file = (error.missing_cfg_file or "?").removesuffix(".yaml")
    # If the defaults list of a config file chose the option, Hydra's message names this
    # file.
    inside = re.match(r"In '([^']+)'", str(error))
    where = f"{inside.group(1)}.yaml, defaults" if inside and inside.group(1) != "config" else None
    found = [str(option) for option in error.options or ()]

    group, _, name = file.partition("/")
    if group not in group_names():
        if not name:
            return ConfigError(str(error).splitlines()[0], where=where or "config search path")
        group, _, name = file.rpartition("/")
        return _unknown_option_error(group, name, found, where or group)

    # Names in defaults are relative to the folder of their file.
    head, _, rest = name.partition("/")
    if where and rest and head in group_names():
        return ConfigError(
            f"there is no {group} '{name}'",
            where=where,
            expected=f"options of other groups, as 'override /{head}: {rest}'",
            got=f"{head}: {rest}",
            do=f"write '- override /{head}: {rest}'",
        )

    # `found` also has the options in folders that `hydra.searchpath` adds.
    options = {*option_names(group), *([] if rest else found)}
    return _unknown_option_error(group, name, sorted(options), where or group)


def _unknown_option_error(group: str, name: str, options: list[str], where: str) -> ConfigError:
    """Return the error about an unknown option. It suggests a similar option."""
    near = nearest(name, options)
    own = f", or write your own: conf/{group}/{name}.yaml in the folder of the command"
    return ConfigError(
        f"unknown {group} '{name}'",
        where=where,
        expected=", ".join(options) or "a config file in that group",
        do=f"did you mean '{near}'?" if near else f"choose one of these{own if name else ''}",
    )


def _key_error(
    error: Exception, overrides: list[str], compose_groups: ComposeGroups
) -> ConfigError:
    """Return the error about an override whose key or value does not fit the config.

    The message suggests a similar key of the options that the command line chose.
    """
    text = str(error)
    if "Ambiguous value" in text:
        return _several_values_error(overrides, compose_groups)
    match = re.search(
        r"Could not (override|append to config|delete from config)[^']*'([^'=]+)", text
    )
    if match is None:
        cause = error.__cause__
        why = f": {str(cause).splitlines()[0]}" if isinstance(cause, OmegaConfBaseException) else ""
        return ConfigError(text.splitlines()[0] + why, got=" ".join(overrides) or None)

    written = match.group(2)
    key, at, _ = written.partition("@")
    where = next((o for o in overrides if o.lstrip("+~").startswith(written)), None)

    # Here a config file overrides a config group in its defaults list, but the group
    # does not exist where the file is included.
    if (file := re.match(r"In '([^']+)'", text)) is not None:
        if key == "dataset" and file.group(1).startswith("method/"):
            return dataset_in_method_error(file.group(1))
        return ConfigError(
            f"config file '{file.group(1)}.yaml' overrides '{key}', which is not there",
            where=f"{file.group(1)}.yaml, defaults",
            expected="a preset of several groups begins with the line "
            "'# @package _global_', and names groups as /trainer",
            got=written,
            do="add the line '# @package _global_' at the top, or correct the name",
        )

    if at and key in group_names():
        return ConfigError(
            f"'{written}' is not part of an experiment",
            where=where,
            expected="a group of conf/config.yaml, without '@'",
            do=f"write {key}={(where or '').partition('=')[2] or 'NAME'}",
        )

    group, _, inside = key.partition("/")
    if group in group_names() and "defaults list" in text:
        name = "/".join(filter(None, (inside, (where or "").partition("=")[2])))
        do = f"fedexp-table run {name}" if group == "table" else "remove it"
        if group not in NON_GROUP_FOLDERS and name in option_names(group):
            do = f"did you mean '{group}={name}'?"
        return ConfigError(
            f"'{key}' is not part of an experiment",
            where=where,
            expected="a group of conf/config.yaml",
            do=do,
        )

    known = _known_keys(compose_groups(_group_choices(overrides)))
    renamed = renamed_key(key, where)
    if key in known and "append" in match.group(1):
        what = f"key '{key}' exists already"
        do = f"set it without '+': {(where or key).lstrip('+')}"
    elif key in known:
        what = text.splitlines()[0].rstrip(".")
        do = f"its value is {known[key]}: leave the value out, ~{key}"
    elif renamed is not None and renames().keys[key].new in known:
        return renamed
    else:
        what = f"unknown key '{key}'"
        do = (
            _hydra_key_hint(key, overrides)
            if key.startswith("hydra.")
            else _nearest_key_hint(key, known)
        )

    return ConfigError(
        what, where=where, expected="a key of conf/config.yaml or of a chosen group", do=do
    )


def _several_values_error(overrides: list[str], compose_groups: ComposeGroups) -> ConfigError:
    """Return the error about several values of one key in a command without ``-m``."""
    several = next(
        (
            override.input_line or ""
            for override in OverridesParser.create().parse_overrides(overrides)
            if override.is_sweep_override()
        ),
        "key=a,b",
    )
    name, _, values = several.partition("=")
    rest = [o for o in overrides if o.partition("=")[0] != name]
    current = _known_keys(compose_groups(_group_choices(rest))).get(name)

    listed = f". A list is written {name}=[{values}]" if isinstance(current, list) else ""
    point = ". A decimal number has a point" if isinstance(current, float) else ""
    return ConfigError(
        "several values for one key",
        where=several,
        got=" ".join(overrides),
        do=f"sweep over them with -m{listed}{point}",
    )


def _hydra_key_hint(key: str, overrides: list[str]) -> str:
    """Return a suggestion for an unknown key of Hydra itself (``hydra.*``)."""
    own = [override for override in overrides if override.startswith("hydra/")]
    node = hydra_compose("config", own, return_hydra_config=True).hydra
    near = nearest(key, [f"hydra.{name}" for name in _known_keys(node)])
    if key.startswith("hydra.launcher.") and not own:
        return "choose a launcher that has it: hydra/launcher=joblib"
    return f"did you mean '{near}'?" if near and near != key else "hydra's own keys: --cfg hydra"


def _group_choices(overrides: list[str]) -> list[str]:
    """Return the overrides that choose an option of a config group.

    If an override names several options (a sweep), only the first option is kept.
    """
    choices = []
    groups = [override for override in overrides if names_group(override)]
    for override in OverridesParser.create().parse_overrides(groups):
        line = override.input_line or ""
        if override.is_discrete_sweep():
            line = f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        choices.append(line)
    return choices


def _nearest_key_hint(key: str, known: Mapping[str, Any]) -> str:
    """Return a suggestion for an unknown key.

    Let the name of a key be its part after the last dot, and let its node be the part
    before. Suggestions are tried in this order:

    1. if `key` has no dot: a key with this name in any node
    2. a key with a similar name in the same node
    3. a key with a similar name of another option, if the node is a config group
    4. a key with an equal or similar name in another node

    Args:
        key: Unknown key, dotted.
        known: Values of the known keys, by dotted key.
    """
    above, _, name = key.rpartition(".")
    beside = [
        other
        for other in known
        if other.rpartition(".")[0] == above and not other.endswith("._target_")
    ]
    others = [other for other in known if not f"{key}.".startswith(f"{other}.")]
    leaves = {other.rpartition(".")[2]: other for other in reversed(others) if known[other] != {}}
    if not above and name in leaves:
        return f"did you mean '{leaves[name]}'?"
    if (near := nearest(name, (other.rpartition(".")[2] for other in beside))) is not None:
        return f"did you mean '{above}.{near}'?" if above else f"did you mean '{near}'?"

    if above and is_group(above, user_conf_hash()):
        options = GlobalHydra.instance().config_loader().get_group_options(above)
        keys = {option: option_keys(above, option) for option in options}
        has = f"the chosen option has {', '.join(beside) or 'no keys'}"
        if (near := nearest(name, {key for own in keys.values() for key in own})) is not None:
            elsewhere = f"did you mean '{leaves[name]}'? Or: " if name in leaves else ""
            holders = "|".join(option for option in options if near in keys[option])
            return f"{elsewhere}'{above}.{near}' belongs to {above}={holders}, and {has}"
    elif above in known and not beside:
        return f"'{above}' is a value and has no keys: remove '.{name}'"
    elif beside:
        has = f"use one of: {', '.join(sorted(beside))}"
    else:
        has = f"'{above}' is not a group of keys"

    found = (
        (above not in known and nearest(key, others))
        or leaves.get(name)
        or leaves.get(nearest(name, leaves) or "")
    )

    return f"did you mean '{found}'?" if found else has


def _known_keys(config: DictConfig) -> dict[str, Any]:
    """Return the values of a config by dotted key, with unresolved interpolations."""
    return dict(_dotted(OmegaConf.to_container(config, resolve=False)))


def _dotted(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of nested mappings with its value.

    This includes keys whose values are mappings themselves.
    """
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}", value
            yield from _dotted(value, f"{prefix}{key}.")
