"""Everything that touches Hydra's composition: search path, sweeps, and errors in a user's words."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import (
    CompactHydraException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.folders import conf_dir, user_conf_dir
from fedexp.config.groups import NOT_CHOSEN
from fedexp.config.pinning import pin
from fedexp.config.yaml_files import read_yaml
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.renames import renamed_key, renames


class JobFailedError(CompactHydraException):
    """A job of a sweep failed; its error was printed and stored already, so Hydra need not trace it."""


class UserConf(SearchPathPlugin):
    """Adds the user's own ``./conf`` behind the built-in configs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        mine = user_conf_dir()
        if mine is not None:
            search_path.append("fedexp-user", f"file://{mine}")


def register() -> None:
    """Make `UserConf` known to Hydra in this process; put the working directory on the path for the user's modules."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # installed scripts do not have it, `python -m` does
    if UserConf not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(UserConf)
    _refuse_shadowed()


def _refuse_shadowed() -> None:
    """A user's file with a built-in's name would be ignored silently by Hydra."""
    mine, ours = user_conf_dir(), conf_dir()
    if mine is None:
        return
    for path in sorted(mine.rglob("*.yaml")):
        twin = ours / path.relative_to(mine)
        if twin.exists():
            raise ConfigError(
                f"'{path.relative_to(mine)}' exists twice: Hydra would ignore yours",
                where=str(path),
                expected=f"a name that {ours} does not use",
                do="rename your file",
            )


def resolve(config: DictConfig, choices: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A composed config as plain values.

    With the nodes that ``architectures`` and ``proxy.dataset`` name, the hash of every file that counts by its content
    (``contents``), what was chosen for each group and the overrides that led to it.
    """
    search = [override for override in overrides if override.startswith("hydra.searchpath")]
    config = _with_models(config, search)
    config, choices = _with_proxy(config, choices, search)
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error, config) from error
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    kept = {str(key): value for key, value in choices.items() if not str(key).startswith("hydra/")}
    mine = [override for override in overrides if not override.startswith("hydra")]
    named = {str(k): v for k, v in plain.items()}
    return named | {"contents": pin(named), "choices": kept, "overrides": mine}


def _with_models(config: DictConfig, search: list[str]) -> DictConfig:
    """`config`, changed: a model node for every name under ``architectures``, and in place of a file of names what is in it."""
    clients, server = config.architectures.clients, config.architectures.server
    if clients is None and server is None:
        return config
    OmegaConf.set_struct(config, False)
    if isinstance(clients, str):
        config.architectures.clients = _read_names(clients, config.clients)
        clients = config.architectures.clients
    models, names = config.architectures.models, [*clients] if OmegaConf.is_config(clients) else []
    for name in dict.fromkeys(map(str, names if server is None else [*names, server])):
        own = models.get(name) or {}
        models[name] = (
            own
            if "_target_" in own
            else OmegaConf.merge(group_option("model", name, "architectures", search), own)
        )
    return config


def _with_proxy(
    config: DictConfig, choices: Mapping[str, Any], search: list[str]
) -> tuple[DictConfig, Mapping[str, Any]]:
    """`config` with a data set's node in place of its name at ``proxy.dataset``; the name is a choice like any other."""
    name = config.proxy.dataset
    if not isinstance(name, str):
        return config, choices
    config = copy.deepcopy(config)
    with open_dict(config):
        config.proxy.dataset = group_option("dataset", name, "proxy.dataset", search)
    return config, {**choices, "proxy.dataset": name}


def group_option(group: str, name: str, where: str, search: list[str]) -> DictConfig:
    """The node of option `name` of `group`, as its file has it.

    Args:
        where: the key that names the option, for messages.
        search: the ``hydra.searchpath`` override, if any.
    """
    overrides = [*search, f"{group}={name}"]
    try:
        with hydra_in_use(overrides):
            node: DictConfig = _composed(overrides)[0][group]
    except ConfigError as error:
        error.facts["where"] = where
        raise
    OmegaConf.set_struct(node, False)
    return node


def _read_names(path: str, clients: int) -> Any:
    """What stands in place of ``architectures.clients``: a file's names, one a client, or its ranges."""
    try:
        names = read_yaml(Path(path).expanduser())
        problem = (
            f"{len(names)} names" if isinstance(names, list) and len(names) != clients else None
        )
    except (OSError, yaml.YAMLError) as error:
        names, problem = None, str(error).splitlines()[0]
    if problem or not isinstance(names, list | dict):
        raise ConfigError(
            "this does not say every client's architecture",
            where="architectures.clients",
            expected=f"[lenet, mlp], {{lenet: 0-4, mlp: 5}}, or a JSON or YAML file: {clients} names (clients={clients})",
            got=f"{path}: {problem or 'neither a list nor ranges'}",
        )
    return names


def refuse_flags(overrides: list[str], flags: Sequence[str] = ()) -> None:
    """Refuse what begins with a dash: `flags` were taken out, and keys have none."""
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
        do = more if "=" in value and not equals else f"keys have no dashes: {key}={value}; {more}"
        raise ConfigError(
            f"unknown flag '{flag}'",
            expected=", ".join(flags) or "key=value",
            do=f"did you mean '{near}'?" if near else do,
        )


def compose(overrides: list[str]) -> dict[str, Any]:
    """The resolved config of one job; raises `ConfigError` with the nearest valid name."""
    with hydra_in_use(overrides):
        return resolve(*_composed(overrides), overrides)


def _composed(overrides: list[str]) -> tuple[DictConfig, Mapping[str, Any]]:
    """What Hydra composes, its own node left out, and what was chosen for each group.

    A choice of groups is composed once in a process (80 ms), unless ``hydra.searchpath`` adds to them; Hydra sets single keys
    in a copy.
    """
    parsed = [override for text in overrides for override in _parsed(text)]
    for override in parsed:
        several = override.value()
        if isinstance(several, list) and _is_group(override.key_or_group, _users_files()):
            raise ConfigError(
                f"a run has one {override.key_or_group}, not several",
                where=override.input_line,
                expected=f"one option: {override.key_or_group}={several[0] if several else 'NAME'}",
                do=f"several runs with one each: -m {override.key_or_group}={','.join(map(str, several))}",
            )
    if any(override.key_or_group == "hydra.searchpath" for override in parsed):
        return _of_groups.__wrapped__(tuple(overrides), "")
    files = _users_files()
    keys = [override for override in parsed if _sets_key(override, files)]
    groups = tuple(str(override.input_line) for override in parsed if override not in keys)
    config, choices = _of_groups(groups, files)
    config = copy.deepcopy(config)
    ConfigLoaderImpl._apply_overrides_to_config(keys, config)
    return config, choices


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Override]:
    """Not to be changed. A sweep's jobs differ in a word or two, and parsing all of them takes a seventh of composing."""
    return OverridesParser.create().parse_overrides([text])


def _sets_key(override: Override, users_files: str) -> bool:
    """Neither a choice of a group nor Hydra's own; not several values, which Hydra refuses."""
    if override.is_hydra_override() or override.is_sweep_override():
        return False
    return isinstance(override.value(), dict) or not _is_group(override.key_or_group, users_files)


@functools.lru_cache(maxsize=1024)
def _is_group(name: str, users_files: str) -> bool:
    return bool(GlobalHydra.instance().config_loader().get_group_options(name, results_filter=None))


def _users_files() -> str:
    """A hash of what is in ``./conf``; the built-in configs stay as they are while a process runs."""
    state = hashlib.blake2b(digest_size=16)
    if (mine := user_conf_dir()) is not None:
        for path in sorted(mine.rglob("*.yaml")):
            text = path.read_bytes()
            state.update(f"{path.relative_to(mine)}\0{len(text)}\0".encode() + text)
    return state.hexdigest()


@functools.lru_cache(maxsize=256)  # 0.2 MB each; a table has a hundred
def _of_groups(groups: tuple[str, ...], users_files: str) -> tuple[DictConfig, Mapping[str, Any]]:
    """As `_composed`; not to be changed."""
    config = hydra_compose("config", overrides=list(groups), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    _refuse_keys_of_data(choices.get("method"))
    with open_dict(config):
        config.pop("hydra")
    return config, choices


def _refuse_keys_of_data(method: str | None) -> None:
    """A user's method preset cannot set keys of ``dataset``: that group is composed after it and would win silently."""
    file = (user_conf_dir() or Path()) / "method" / f"{method}.yaml"
    if user_conf_dir() is None or not file.is_file():
        return
    node = read_yaml(file)
    if isinstance(node, dict) and "dataset" in node:
        raise _data_in_method(f"method/{method}")


def _data_in_method(file: str) -> ConfigError:
    name = file.removeprefix("method/")
    return ConfigError(
        "a method's preset cannot say anything of the data set, which is composed after it",
        where=f"{file}.yaml",
        expected="keys and options of other groups",
        got="dataset",
        do=f"put it into conf/experiment/{name}.yaml, whose defaults say '- override /method: {name}'",
    )


def expand(overrides: list[str]) -> list[list[str]]:
    """The jobs of a sweep as Hydra's basic sweeper makes them, in its order; ``hydra.*`` overrides are left out.

    Ranges that only a sweeper plug-in understands (distributions) contribute their first value, if they have one.
    """
    with hydra_in_use(overrides):
        axes = _axes(overrides)
        config = _with_hydra(overrides, axes)
        check_launcher(config)
        params = (
            config.hydra.sweeper.get("params") or {}
        )  # a sweep that a config file defines; the command line wins
        given = _axes([f"{key}={value}" for key, value in params.items()])
        return [list(job) for job in itertools.product(*(given | axes).values())]


def check_launcher(config: DictConfig) -> None:
    """Refuse what a launcher would only refuse once it starts jobs."""
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ConfigError(
            "no job would ever run",
            where="hydra.launcher.n_jobs",
            expected="how many jobs run at once: 1 or more, or -1: as many as there are cores",
            got=0,
        )


def is_grid(overrides: list[str]) -> bool:
    """Whether the sweep is Hydra's basic sweeper's: its jobs are all that `expand` says, known beforehand."""
    with hydra_in_use(overrides):
        sweeper = _with_hydra(overrides, _axes(overrides)).hydra.sweeper
    return str(sweeper.get("_target_")) == "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def _with_hydra(overrides: list[str], axes: Mapping[str, list[str]]) -> DictConfig:
    """The first job's groups with Hydra's own node; single keys are each job's own, and checked with it."""
    chosen = [axis[0] for axis in axes.values() if _names_group(axis[0])]
    own = [
        override
        for override in overrides
        if override.startswith("hydra") and "searchpath" not in override
    ]
    return hydra_compose("config", overrides=[*chosen, *own], return_hydra_config=True)


def _axes(overrides: list[str]) -> dict[str, list[str]]:
    """The values of every override, as single overrides, by key."""
    axes: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.get_key_element()
        if (
            override.key_or_group.startswith("hydra")
            and override.key_or_group != "hydra.searchpath"
        ):
            continue
        if override.is_discrete_sweep():
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif not override.is_sweep_override():
            assert override.input_line is not None
            axes[key] = [override.input_line]
    return axes


@contextmanager
def hydra_in_use(overrides: list[str]) -> Iterator[None]:
    """Hydra's global state for one piece of work, its errors about `overrides` as ours; an outer one (a running job) is kept."""
    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with (
            initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fedexp"),
            _translated(overrides),
        ):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


@contextmanager
def _translated(overrides: list[str]) -> Iterator[None]:
    """Hydra's errors, as ours."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        yield
        return
    try:
        yield
    except OverrideParseException as error:
        meant = [
            f"{group}={error.override}"
            for group in _groups()
            if str(error.override) in _options(group)
        ]
        meant = meant or _key_and_value(str(error.override), overrides)
        quote = "quote other characters too: key='\"value\"'; https://hydra.cc/docs/advanced/override_grammar/basic/"
        raise ConfigError(
            f"'{error.override}' is not an override",
            expected="key=value (lists: key=[a,b]; sweeps: key=a,b with -m; text with commas or spaces: key='\"a b\"')",
            do=" or ".join(f"did you mean '{one}'?" for one in meant) or quote,
        ) from None
    except MissingConfigException as error:
        raise _unknown_option(error) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            "a config file is not YAML", where=" ".join(str(error).split()), do="mend the file"
        ) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise _key_error(error, overrides) from None
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        parsed = OverridesParser.create().parse_overrides([o for o in overrides if _names_group(o)])
        odd = next(one for one in parsed if not isinstance(one.value(), str | list | None))
        group, name = odd.key_or_group, (odd.input_line or "").partition("=")[2]
        raise _no_option(group, name, _options(group), group) from None


def _key_and_value(override: str, overrides: list[str]) -> list[str]:
    """``rounds 5``, ``rounds = 5`` and ``rounds:5``, as they are written."""
    if found := re.fullmatch(r"([\w.]+):([\w.]+)", override):
        return [f"{found[1]}={found[2]}"]
    after = (
        [one for one in overrides[overrides.index(override) + 1 :] if one != "="]
        if override in overrides
        else []
    )
    return (
        [f"{override}={after[0]}"]
        if after and re.fullmatch(r"[\w.]+", override) and "=" not in after[0]
        else []
    )


def _unknown_option(error: MissingConfigException) -> ConfigError:
    """A name in a group that has no such file; of our groups all options count, those in its folders, too."""
    file = (error.missing_cfg_file or "?").removesuffix(".yaml")
    inside = re.match(r"In '([^']+)'", str(error))  # it is a file's defaults that name it
    where = f"{inside.group(1)}.yaml, defaults" if inside and inside.group(1) != "config" else None
    group, _, name = file.partition("/")
    if group not in _groups():
        if not name:
            return ConfigError(str(error).splitlines()[0], where=where or "config search path")
        group, _, name = file.rpartition("/")
        return _no_option(
            group, name, [str(option) for option in error.options or ()], where or group
        )
    head, _, rest = name.partition("/")
    if where and rest and head in _groups():  # names in defaults begin where their file lies
        return ConfigError(
            f"there is no {group} '{name}'",
            where=where,
            expected=f"options of other groups, as 'override /{head}: {rest}'",
            got=f"{head}: {rest}",
            do=f"write '- override /{head}: {rest}'",
        )
    found = (
        [] if rest else [str(option) for option in error.options or ()]
    )  # those of hydra.searchpath, too
    return _no_option(group, name, sorted({*_options(group), *found}), where or group)


def _no_option(group: str, name: str, options: list[str], where: str) -> ConfigError:
    near = nearest(name, options)
    own = f"conf/{group}/{name}.yaml in the folder of the command"
    return ConfigError(
        f"unknown {group} '{name}'",
        where=where,
        expected=", ".join(options) or "a config file in that group",
        do=f"did you mean '{near}'?"
        if near
        else "choose one of these" + (f"; one of your own is {own}" if name else ""),
    )


def _groups() -> list[str]:
    """The folders of configs, those of methods first."""
    folders = [
        path for folder in filter(None, (conf_dir(), user_conf_dir())) for path in folder.iterdir()
    ]
    return sorted(
        {path.name for path in folders if path.is_dir()}, key=lambda name: (name != "method", name)
    )


def _options(group: str) -> list[str]:
    """Every option of a group, with the folders below it that it lies in."""
    homes = [folder / group for folder in filter(None, (conf_dir(), user_conf_dir()))]
    files = {
        path.relative_to(home).with_suffix("") for home in homes for path in home.rglob("*.yaml")
    }
    return sorted(file.as_posix() for file in files)


def _key_error(error: Exception, overrides: list[str]) -> ConfigError:
    """'Could not override ...' with the nearest key of what the command line chose."""
    text = str(error)
    if "Ambiguous value" in text:
        parsed = OverridesParser.create().parse_overrides(overrides)
        several = next((o.input_line or "" for o in parsed if o.is_sweep_override()), "key=a,b")
        name, _, values = several.partition("=")
        rest = [o for o in overrides if o.partition("=")[0] != name]
        now = dict(
            _dotted(OmegaConf.to_container(_composed(_chosen_firsts(rest))[0], resolve=False))
        ).get(name)
        listed = f"; a list is written {name}=[{values}]" if isinstance(now, list) else ""
        point = "; a decimal number has a point" if isinstance(now, float) else ""
        do = f"sweep over them with -m{listed}{point}"
        return ConfigError(
            "several values for one key", where=several, got=" ".join(overrides), do=do
        )
    match = re.search(
        r"Could not (override|append to config|delete from config)[^']*'([^'=]+)", text
    )
    if match is None:
        why = (
            f": {str(error.__cause__).splitlines()[0]}"
            if isinstance(error.__cause__, OmegaConfBaseException)
            else ""
        )
        return ConfigError(text.splitlines()[0] + why, got=" ".join(overrides) or None)
    key = match.group(2).partition("@")[0]
    where = next((o for o in overrides if o.lstrip("+~").startswith(key)), None)
    if (
        file := re.match(r"In '([^']+)'", text)
    ) is not None:  # a default of a file's that is none from where it stands
        if key == "dataset" and file.group(1).startswith("method/"):
            return _data_in_method(file.group(1))
        return ConfigError(
            f"config file '{file.group(1)}.yaml' overrides '{key}', which is not there",
            where=f"{file.group(1)}.yaml, defaults",
            expected="a preset of several groups begins with the line '# @package _global_', and names groups as /trainer",
            got=match.group(2),
            do="add the line '# @package _global_' at the top, or correct the name",
        )
    group, _, inside = key.partition("/")
    if group in _groups() and "defaults list" in text:
        name = "/".join(filter(None, (inside, (where or "").partition("=")[2])))
        do = f"fedexp-table run {name}" if group == "table" else "remove it"
        if group not in NOT_CHOSEN and name in _options(group):
            do = f"did you mean '{group}={name}'?"
        return ConfigError(
            f"'{key}' is no part of an experiment",
            where=where,
            expected="a group of conf/config.yaml",
            do=do,
        )
    chosen = _chosen_firsts(overrides)
    known = dict(_dotted(OmegaConf.to_container(_composed(chosen)[0], resolve=False)))
    if key in known and "append" in match.group(1):
        what, do = (
            f"key '{key}' is there already",
            f"set it without '+': {(where or key).lstrip('+')}",
        )
    elif key in known:
        what, do = (
            text.splitlines()[0].rstrip("."),
            f"its value is {known[key]}: leave the value out, ~{key}",
        )
    elif key in renames().keys and renames().keys[key].new in known:
        renamed = renamed_key(key, where)
        assert renamed is not None
        return renamed
    else:
        what = f"unknown key '{key}'"
        if not key.startswith("hydra."):
            do = _nearest(key, known)
        else:
            own = [override for override in overrides if override.startswith("hydra/")]
            node = OmegaConf.to_container(
                hydra_compose("config", own, return_hydra_config=True).hydra, resolve=False
            )
            near = nearest(key, [f"hydra.{name}" for name, _ in _dotted(node)])
            do = (
                f"did you mean '{near}'?"
                if near and near != key
                else "hydra's own keys: --cfg hydra"
            )
            if key.startswith("hydra.launcher.") and not own:
                do = "choose a launcher that has it: hydra/launcher=joblib"
    return ConfigError(
        what, where=where, expected="a key of conf/config.yaml or of a chosen group", do=do
    )


def _chosen_firsts(overrides: list[str]) -> list[str]:
    """The groups' options among `overrides`; of a sweep over options the first."""
    chosen = []
    for override in OverridesParser.create().parse_overrides(
        [o for o in overrides if _names_group(o)]
    ):
        line = override.input_line or ""
        if override.is_discrete_sweep():
            line = f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        chosen.append(line)
    return chosen


def _names_group(override: str) -> bool:
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return key.startswith("hydra.searchpath") or _is_group(key, _users_files())


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    """What was meant by `key`: a key beside it, one of another option of its group, or one of that name elsewhere."""
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
    if above and _is_group(above, _users_files()):
        options = GlobalHydra.instance().config_loader().get_group_options(above)
        keys = {option: _keys_of(above, option) for option in options}
        has = f"the chosen option has {', '.join(beside) or 'no keys'}"
        if (near := nearest(name, {key for own in keys.values() for key in own})) is not None:
            elsewhere = f"did you mean '{leaves[name]}'? Or: " if name in leaves else ""
            return f"{elsewhere}'{above}.{near}' is of {above}={'|'.join(o for o in options if near in keys[o])}; {has}"
    elif above in known and not beside:
        return f"'{above}' is a value and has no keys: remove '.{name}'"
    else:
        has = (
            f"use one of: {', '.join(sorted(beside))}"
            if beside
            else f"'{above}' is no group of keys"
        )
    found = (
        (above not in known and nearest(key, others))
        or leaves.get(name)
        or leaves.get(nearest(name, leaves) or "")
    )
    return f"did you mean '{found}'?" if found else has


def _keys_of(group: str, option: str) -> list[str]:
    """The keys that an option's own file sets."""
    for folder in filter(None, (conf_dir(), user_conf_dir())):
        with suppress(OSError, yaml.YAMLError):
            node = read_yaml(folder / group / f"{option}.yaml")
            return (
                [str(key) for key in node if key not in ("_target_", "defaults")]
                if isinstance(node, dict)
                else []
            )
    return []


def _unresolved(error: Exception, config: DictConfig) -> ConfigError:
    """A value that cannot be had, by its key, with what stands there and the nearest key."""
    text = str(error).splitlines()[0]
    found = re.search(r"full_key: (\S+)", str(error))
    key = found.group(1) if found else None
    missing = re.search(r"Interpolation key '([^']+)' not found", text)
    raw = OmegaConf.to_container(config, resolve=False)
    known = dict(_dotted(raw))
    do = None
    if missing:
        near = nearest(missing.group(1), known)
        others = {name: value for name, value in known.items() if name != key}
        do = f"did you mean '{near}'?" if near else _nearest(missing.group(1), others)
    return ConfigError(
        f"the config cannot be resolved: {text}",
        where=key,
        got=None if key is None else known.get(key),
        do=do,
    )


def _dotted(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}", value
            yield from _dotted(value, f"{prefix}{key}.")
