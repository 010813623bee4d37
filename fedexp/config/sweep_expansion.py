"""Expansion of a sweep into its jobs, as Hydra's basic sweeper does it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fedexp.config.hydra_composition import use_hydra
from fedexp.config.hydra_private import uses_basic_sweeper
from fedexp.config.search_path import names_group
from fedexp.core.errors import ConfigError
from fedexp.storage.identity import NON_SCIENTIFIC

_TITLE = 100  # maximum characters of the overrides in the name of a sweep


def expand(overrides: list[str]) -> list[list[str]]:
    """Expand a sweep into the overrides of its jobs.

    The jobs have the order of Hydra's basic sweeper. Overrides of Hydra's own keys
    (``hydra.*``), except ``hydra.searchpath``, are left out. Overrides with an interval
    of values are left out, too, because only sweepers from plug-ins understand them.
    Such a key then has its value from the config files.

    Raises:
        ConfigError: An override is invalid, or the launcher would run no job.
    """
    with use_hydra(overrides):
        axes = _axes(overrides)
        config = _compose_with_hydra_node(overrides, axes)
        check_launcher(config)

        # A config file may define a sweep, too. The command line takes precedence.
        params = config.hydra.sweeper.get("params") or {}
        given = _axes([f"{key}={value}" for key, value in params.items()])
        return [list(job) for job in itertools.product(*(given | axes).values())]


def sweeper_plugin(overrides: list[str]) -> dict[str, Any] | None:
    """Return the node ``hydra.sweeper`` of a sweeper that chooses the jobs itself.

    The result is None for Hydra's basic sweeper, which runs a grid. `expand` then
    returns all jobs of the sweep.
    """
    with use_hydra(overrides):
        node = _compose_with_hydra_node(overrides, _axes(overrides)).hydra.sweeper
        if uses_basic_sweeper(node):
            return None
        plain = OmegaConf.to_container(node, resolve=False)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}


def sweep_title(overrides: list[str], number: str) -> str:
    """Return a readable name of a sweep, under which trackers group its runs.

    Overrides with several values come first. Overrides that do not change results are
    left out, and the text is cut to the length that trackers allow.

    Args:
        overrides: Overrides of the sweep.
        number: Hash of the sweep, which keeps the names of different sweeps apart.
    """
    neutral = ("hydra", *NON_SCIENTIFIC)
    shown = [one for one in overrides if re.split("[=./]", one)[0] not in neutral]
    with use_hydra(overrides):
        swept = [any(len(values) > 1 for values in _axes([one]).values()) for one in shown]
    words = [one for one, is_swept in zip(shown, swept, strict=True) if is_swept]
    words += [one for one, is_swept in zip(shown, swept, strict=True) if not is_swept]
    text = " ".join(words)
    if len(text) > _TITLE:
        text = f"{text[:_TITLE]} ..."
    return f"{text} ({number})".strip()


def check_launcher(config: DictConfig) -> None:
    """Refuse settings with which no job would run, or results would not be found.

    ``hydra.launcher.n_jobs`` is the number of jobs that run in parallel. joblib itself
    refuses 0 only when it starts the jobs. With ``hydra.job.chdir=true``, a relative
    ``output_root`` would be below each job's own folder.

    Args:
        config: Config that contains Hydra's own keys.

    Raises:
        ConfigError: A setting is refused.
    """
    if config.hydra.job.chdir:
        raise ConfigError(
            "the jobs would store their runs in folders where no command finds them",
            where="hydra.job.chdir",
            expected="false",
            got="true",
            do="leave out hydra.job.chdir=true",
        )
    if config.hydra.launcher is None:
        raise ConfigError(
            "a sweep needs a launcher, which starts its jobs",
            where="hydra.launcher",
            expected="the config of a launcher",
            got=None,
            do="leave out hydra.launcher=null, or choose hydra/launcher=basic",
        )
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ConfigError(
            "no job would ever run",
            where="hydra.launcher.n_jobs",
            expected="the number of jobs at once: 1 or more, or -1 for one per core",
            got=0,
        )


def _compose_with_hydra_node(overrides: list[str], axes: Mapping[str, list[str]]) -> DictConfig:
    """Compose the config of the first job together with Hydra's own keys.

    Only overrides that choose options of config groups and overrides of Hydra's own
    keys are used. Overrides of single keys are checked later, for each job.
    """
    chosen = [axis[0] for axis in axes.values() if names_group(axis[0])]
    own = [
        override
        for override in overrides
        if override.startswith("hydra") and "searchpath" not in override
    ]
    return hydra_compose("config", overrides=[*chosen, *own], return_hydra_config=True)


def _axes(overrides: list[str]) -> dict[str, list[str]]:
    """Return the swept values of each key, as a list with one override per value.

    A key with a single value has a list of one override. Overrides of Hydra's own keys,
    except ``hydra.searchpath``, and overrides with an interval are left out.
    """
    axes: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        name = override.key_or_group
        if name.startswith("hydra") and name != "hydra.searchpath":
            continue
        key = override.get_key_element()
        if override.is_discrete_sweep():
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif not override.is_sweep_override():
            assert override.input_line is not None
            axes[key] = [override.input_line]

    return axes
