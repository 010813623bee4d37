"""Functions that resolve a config: interpolations are replaced by plain values.

The config comes from overrides, or from Hydra, which composed it for a job.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedexp.config.hydra_composition import compose_with_hydra, use_hydra
from fedexp.config.keys import GROUPS
from fedexp.config.messages import unresolved_error
from fedexp.config.pinning import pin
from fedexp.core.errors import ConfigError
from fedexp.core.paths import user_path
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.identity import NON_SCIENTIFIC
from fedexp.storage.selection import dotted_items
from fedexp.storage.yaml_files import read_yaml


def compose(overrides: list[str]) -> ResolvedConfig:
    """Compose and resolve the config of one job.

    Args:
        overrides: Overrides as on the command line, without a sweep.

    Raises:
        ConfigError: An override is invalid. The message suggests a valid name.
    """
    with use_hydra(overrides):
        return resolve(*compose_with_hydra(overrides), overrides)


def resolve(config: DictConfig, choices: Mapping[str, Any], overrides: list[str]) -> ResolvedConfig:
    """Resolve a composed config into plain values.

    The values of ``architectures`` and ``proxy.dataset`` are names of config-group
    options (models and data sets). The configs of these options are composed, too.

    Args:
        config: Composed config.
        choices: Chosen option of each config group.
        overrides: Overrides from which `config` was composed, with those of Hydra's own
            keys.

    Returns:
        The resolved config, without the choices and overrides of Hydra's own keys.

    Raises:
        ConfigError: A value cannot be resolved, or an option is unknown.
    """
    search_path = [override for override in overrides if override.startswith("hydra.searchpath")]
    config = _with_architecture_models(config, search_path)
    config, choices = _with_proxy_dataset(config, choices, search_path)

    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise unresolved_error(error, config) from error

    assert isinstance(plain, dict)
    if lost := [group for group in sorted(GROUPS) if group not in plain]:
        typed = (one for one in overrides if one.partition("=")[0] == f"~{lost[0]}")
        deletion = next(typed, None)
        raise ConfigError(
            f"a run needs an option of '{lost[0]}'",
            where=lost[0],
            got=deletion,
            do=f"leave out {deletion}" if deletion else f"choose an option: {lost[0]}=NAME",
        )
    values = {str(key): value for key, value in plain.items() if key != "hydra"}
    _check_lengths(values)
    contents = pin(values)
    return ResolvedConfig(
        values=values,
        contents=contents,
        choices={
            str(key): value for key, value in choices.items() if not str(key).startswith("hydra/")
        },
        overrides=[override for override in overrides if not override.startswith("hydra")],
        interpolations=_secret_interpolations(config, values, contents),
    )


def resolve_stored(stored: ResolvedConfig) -> ResolvedConfig:
    """Resolve the interpolations in a stored config.

    The file ``config.yaml`` has an interpolation in place of each value that must not
    be stored.

    Raises:
        ConfigError: An environment variable is not set.
    """
    texts = {
        key: text
        for key, text in dotted_items(stored.values)
        if "${" in str(text) and _is_free(key, stored.contents)
    }
    config = OmegaConf.create(stored.values)
    try:
        for key in texts:
            value = OmegaConf.select(config, key)
            if OmegaConf.is_config(value):  # a list
                value = OmegaConf.to_container(value, resolve=True)
            OmegaConf.update(config, key, value)
    except OmegaConfBaseException as error:
        raise unresolved_error(error, config) from error
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return replace(
        stored, values={str(key): value for key, value in plain.items()}, interpolations=texts
    )


# An interpolation of an environment variable. Variables of fedexp itself are excluded.
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(?!FEDEXP_)(\w+)")


def _secret_interpolations(
    config: DictConfig, values: Mapping[str, Any], contents: Mapping[str, str]
) -> dict[str, Any]:
    """Return the interpolations whose values must not be stored, by dotted key.

    Their values contain the value of an environment variable, which may be a password.
    Values that affect the result of a run are stored nevertheless, because they
    identify the run. If an entry of a list is an interpolation, the whole list is not
    stored.

    Args:
        config: Config with interpolations.
        values: Resolved values.
        contents: Hashes of files, by the dotted key that names the file.
    """
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    texts = {
        key: text
        for key, text in dotted_items({str(key): value for key, value in plain.items()})
        if "${" in str(text)
    }
    names = {name for text in texts.values() for name in _VARIABLE.findall(str(text))}
    secrets = {os.environ[name] for name in names if os.environ.get(name)}
    resolved = dict(dotted_items(values))
    return {
        key: text
        for key, text in texts.items()
        if _is_free(key, contents) and any(secret in str(resolved.get(key)) for secret in secrets)
    }


def _is_free(key: str, contents: Mapping[str, str]) -> bool:
    """Return whether the result of a run is independent of a dotted key's value."""
    return any(key == one or key.startswith(f"{one}.") for one in (*NON_SCIENTIFIC, *contents))


# A valid value is shorter than this. Paths are the longest values, and Linux accepts
# only shorter paths.
_LONGEST_TEXT = 4096


def _check_lengths(node: Any, where: str = "") -> None:
    """Refuse a text that is too long for a path or a name.

    Raises:
        ConfigError: A text is too long.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            _check_lengths(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, str) and len(node) >= _LONGEST_TEXT:
        raise ConfigError(
            f"the value of '{where}' is too long",
            where=where,
            expected=f"fewer than {_LONGEST_TEXT} characters",
            got=f"{len(node)} characters: {node[:80]} ...",
            do="use a shorter path or name",
        )


def group_option(group: str, name: str, where: str, search_path: list[str]) -> DictConfig:
    """Compose the config of one option, without overrides of its keys.

    Args:
        group: Config group of the option.
        name: Name of the option.
        where: Config key whose value is the option's name, for messages.
        search_path: List with the ``hydra.searchpath`` override, or empty.

    Raises:
        ConfigError: There is no such option.
    """
    overrides = [*search_path, f"{group}={name}"]
    try:
        with use_hydra(overrides):
            node: DictConfig = compose_with_hydra(overrides)[0][group]
    except ConfigError as error:
        error.facts["where"] = where
        raise

    OmegaConf.set_struct(node, False)
    return node


def _with_architecture_models(config: DictConfig, search_path: list[str]) -> DictConfig:
    """Add the configs of the models that ``architectures`` names, in place.

    They are added under ``architectures.models``. If ``architectures.clients`` is the
    path of a file, the content of the file replaces the path.
    """
    # The keys may have wrong types here. `fedexp.config.keys.Config.of` reports them.
    clients = OmegaConf.select(config, "architectures.clients")
    server = OmegaConf.select(config, "architectures.server")
    if clients is None and server is None:
        return config

    OmegaConf.set_struct(config, False)
    if isinstance(clients, str):
        config.architectures.clients = _read_client_names(clients, config.clients)
        clients = config.architectures.clients

    models = config.architectures.models
    if not OmegaConf.is_dict(models):
        return config
    names = [*clients] if OmegaConf.is_config(clients) else []
    for name in dict.fromkeys(map(str, names if server is None else [*names, server])):
        own = models.get(name) or {}
        if "_target_" not in own:
            own = OmegaConf.merge(group_option("model", name, "architectures", search_path), own)
        models[name] = own

    return config


def _with_proxy_dataset(
    config: DictConfig, choices: Mapping[str, Any], search_path: list[str]
) -> tuple[DictConfig, Mapping[str, Any]]:
    """Replace the data set's name in ``proxy.dataset`` by the config of the data set.

    Returns:
        A changed copy of the config, and the choices with the data set's name added. If
        ``proxy.dataset`` is not a name, the arguments are returned unchanged.
    """
    name = OmegaConf.select(config, "proxy.dataset")
    if not isinstance(name, str):
        return config, choices
    config = copy.deepcopy(config)
    with open_dict(config):
        config.proxy.dataset = group_option("dataset", name, "proxy.dataset", search_path)
    return config, {**choices, "proxy.dataset": name}


def _read_client_names(path: str, clients: int) -> Any:
    """Read the value of ``architectures.clients`` from a file.

    Args:
        path: JSON or YAML file.
        clients: Number of clients.

    Returns:
        A list with one name per client, or a mapping from names to ranges of clients.

    Raises:
        ConfigError: The file cannot be read or has another content.
    """
    file = user_path(path, "architectures.clients")
    try:
        if file.exists() and not file.is_file():  # reading a named pipe would wait
            raise OSError("not a regular file")
        names = read_yaml(file)
        problem = (
            f"{len(names)} names" if isinstance(names, list) and len(names) != clients else None
        )
    except (OSError, yaml.YAMLError) as error:
        names, problem = None, str(error).splitlines()[0]

    if problem or not isinstance(names, list | dict):
        raise ConfigError(
            "not every client has an architecture here",
            where="architectures.clients",
            expected="[lenet, mlp], {lenet: 0-4, mlp: 5}, or a JSON or YAML file: "
            f"{clients} names (clients={clients})",
            got=f"{path}: {problem or 'neither a list nor ranges'}",
        )

    return names
