"""Comparison of a run's method with the preset of the method.

A preset in ``conf/method`` chooses the parts of the method, such as ``trainer`` and
``aggregator``. The user can replace each part.
"""

from __future__ import annotations

import contextlib
import functools

import yaml

from fedexp.config.folders import conf_dirs
from fedexp.storage.stored_run import StoredRun
from fedexp.storage.yaml_files import defaults_of, read_yaml


def swapped_parts(run: StoredRun) -> list[str]:
    """Return the parts of a run's method that replace parts of the preset.

    Each part is returned as an override, such as ``trainer=NAME``.
    """
    own = _preset_parts(run.choice("method"))
    chosen = {part: run.choices.get(part) for part in own}
    return [
        f"{part}={option}" for part, option in chosen.items() if option not in (None, own[part])
    ]


@functools.cache
def _preset_parts(method: str) -> dict[str, str]:
    """Return the option that a method's preset chooses for each part of the method.

    The result is empty if there is no such preset.
    """
    for folder in conf_dirs():
        with contextlib.suppress(OSError, yaml.YAMLError):
            preset = read_yaml(folder / "method" / f"{method}.yaml") or {}
            return {
                group: option for how, group, option in defaults_of(preset) if how == "override"
            }

    return {}
