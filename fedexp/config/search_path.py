"""Hydra's search path, which includes the user's folder ``./conf``.

Functions that list the config groups and options on this path are here, too.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from contextlib import suppress
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from fedexp.config.folders import conf_dir, conf_dirs, user_conf_dir
from fedexp.core.errors import ConfigError
from fedexp.storage.yaml_files import read_yaml


class UserConf(SearchPathPlugin):
    """A Hydra plug-in that appends the user's ``./conf`` to the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = user_conf_dir()
        if folder is not None:
            search_path.append("fedexp-user", f"file://{folder}")


def register() -> None:
    """Register `UserConf` with Hydra and make the user's modules importable.

    Raises:
        ConfigError: A file in ``./conf`` has the name of a built-in file.
    """
    # `python -m` adds the working directory to `sys.path`. Installed scripts do not.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if UserConf not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(UserConf)

    _refuse_shadowed_files()


def _refuse_shadowed_files() -> None:
    """Refuse a user's config file that has the name of a built-in file.

    Hydra would ignore the user's file. Files in the folder ``tuned`` are an exception,
    because Hydra does not read them. There the user's file takes precedence.
    """
    folder, built_in = user_conf_dir(), conf_dir()
    if folder is None:
        return

    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder)
        if name.parts[0] != "tuned" and (built_in / name).exists():
            raise ConfigError(
                f"'{name}' exists twice: Hydra would ignore yours",
                where=str(path),
                expected=f"a name that {built_in} does not use",
                do="rename your file",
            )


def group_names() -> list[str]:
    """Return the names of the folders in ``conf``, with ``method`` first."""
    names = {path.name for folder in conf_dirs() for path in folder.iterdir() if path.is_dir()}
    return sorted(names, key=lambda name: (name != "method", name))


def option_names(group: str) -> list[str]:
    """Return the names of all options of `group`.

    The name of an option in a subfolder has the form ``folder/option``.
    """
    return sorted(
        {
            path.relative_to(folder / group).with_suffix("").as_posix()
            for folder in conf_dirs()
            for path in (folder / group).rglob("*.yaml")
        }
    )


def option_keys(group: str, option: str) -> list[str]:
    """Return the keys that the file of an option sets.

    The keys ``_target_`` and ``defaults`` are left out.
    """
    for folder in conf_dirs():
        with suppress(OSError, yaml.YAMLError):
            node = read_yaml(folder / group / f"{option}.yaml")
            if not isinstance(node, dict):
                return []
            return [str(key) for key in node if key not in ("_target_", "defaults")]
    return []


@functools.lru_cache(maxsize=1024)
def is_group(name: str, user_files: str) -> bool:
    """Return whether `name` is a config group, with options on Hydra's search path.

    Args:
        name: Name that may be a config group.
        user_files: Result of `user_conf_hash`. It is part of the cache's key, because
            the result depends on the user's files.
    """
    return bool(GlobalHydra.instance().config_loader().get_group_options(name, results_filter=None))


def names_group(override: str) -> bool:
    """Return whether an override chooses a group's option or sets ``hydra.searchpath``.

    These overrides decide which keys the config has.
    """
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return key.startswith("hydra.searchpath") or is_group(key, user_conf_hash())


def user_conf_hash() -> str:
    """Return a hash of the user's files in ``./conf``.

    The built-in config files are not hashed, because they do not change while a process
    runs.
    """
    state = hashlib.blake2b(digest_size=16)
    folder = user_conf_dir()
    if folder is not None:
        for path in sorted(folder.rglob("*.yaml")):
            text = path.read_bytes()
            state.update(f"{path.relative_to(folder)}\0{len(text)}\0".encode() + text)
    return state.hexdigest()
