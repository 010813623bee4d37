"""Composition of one job's config by Hydra, with a cache and readable errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from fedexp.config.folders import conf_dir
from fedexp.config.hydra_private import apply_overrides
from fedexp.config.messages import dataset_in_method_error, translated_errors
from fedexp.config.search_path import is_group, option_keys, register, user_conf_hash
from fedexp.core.errors import ConfigError


@contextmanager
def use_hydra(overrides: list[str]) -> Iterator[None]:
    """Initialise Hydra's global state for a ``with`` block.

    The previous state, for example that of a running Hydra job, is restored afterwards.
    Errors of Hydra in the block are raised as `ConfigError`.

    Args:
        overrides: Overrides that error messages refer to.
    """
    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()

    try:
        with (
            initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fedexp"),
            translated_errors(overrides, lambda groups: compose_with_hydra(groups)[0]),
        ):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def compose_with_hydra(overrides: list[str]) -> tuple[DictConfig, Mapping[str, Any]]:
    """Compose a config inside `use_hydra`.

    Composing the chosen options of all config groups takes 80 ms. Therefore each
    combination of options is composed once per process and cached. Overrides of single
    keys are set in a copy of the cached config. The cache is not used if
    ``hydra.searchpath`` adds folders.

    Args:
        overrides: Overrides of one job.

    Returns:
        The config without Hydra's own keys, and the chosen option of each config group.

    Raises:
        ConfigError: An override chooses several options of one group.
    """
    parsed = [override for text in overrides for override in parse_override(text)]
    user_files = user_conf_hash()
    for override in parsed:
        options = override.value()
        group = override.key_or_group
        if isinstance(options, list) and is_group(group, user_files):
            raise ConfigError(
                f"a run has one {group}, not several",
                where=override.input_line,
                expected=f"one option: {group}={options[0] if options else 'NAME'}",
                do=f"several runs with one each: -m {group}={','.join(map(str, options))}",
            )

    if any(override.key_or_group == "hydra.searchpath" for override in parsed):
        return _composed_groups.__wrapped__(tuple(overrides), "")

    keys = [override for override in parsed if _sets_key(override, user_files)]
    groups = tuple(str(override.input_line) for override in parsed if override not in keys)
    config, choices = _composed_groups(groups, user_files)
    config = copy.deepcopy(config)
    apply_overrides(keys, config)

    return config, choices


@functools.lru_cache(maxsize=4096)
def parse_override(text: str) -> list[Override]:
    """Parse one override. The returned list is cached and must not be changed.

    The jobs of a sweep share most overrides, so most calls are served from the cache.
    Without the cache, parsing takes a seventh of the time that composing takes.
    """
    return OverridesParser.create().parse_overrides([text])


def _sets_key(override: Override, user_files: str) -> bool:
    """Return whether an override sets a single key to a single value.

    The result is False for three kinds of overrides: those that choose an option of a
    config group, those of Hydra's own keys, and those with several values. Hydra
    refuses overrides with several values later.
    """
    if override.is_hydra_override() or override.is_sweep_override():
        return False
    return isinstance(override.value(), dict) or not is_group(override.key_or_group, user_files)


# One cache entry takes 0.2 MB. A results table needs about a hundred entries.
@functools.lru_cache(maxsize=256)
def _composed_groups(
    groups: tuple[str, ...], user_files: str
) -> tuple[DictConfig, Mapping[str, Any]]:
    """Compose a config, and return what `compose_with_hydra` returns.

    The returned config is cached and must not be changed.

    Args:
        groups: Overrides that the config is composed with. If the result is cached,
            they do not set single keys, so that jobs can share it.
        user_files: Result of `user_conf_hash`. It is part of the cache's key, because
            the result depends on the user's files.
    """
    config = hydra_compose("config", overrides=list(groups), return_hydra_config=True)
    choices = dict(config.hydra.runtime.choices)
    # Data sets are composed after methods, so the keys of a data set would replace
    # `dataset` keys that a method sets.
    if "dataset" in option_keys("method", str(choices.get("method"))):
        raise dataset_in_method_error(f"method/{choices['method']}")

    with open_dict(config):
        config.pop("hydra")
    return config, choices
