"""YAML files that are not part of a run's config, which Hydra reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml, where PyYAML has it, takes a tenth of the time


def read_yaml(path: Path) -> Any:
    """Raises `yaml.YAMLError`, also where the file is no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise yaml.YAMLError(f"{path} is not text in UTF-8") from error
    return yaml.load(text, _LOADER)


def defaults_of(preset: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of the defaults list of a preset's file: how (``override``, ``optional`` or nothing), the group and its option."""
    for entry in preset.get("defaults") or []:
        if isinstance(entry, dict):
            for key, option in entry.items():
                *how, group = str(key).split() or [""]
                yield "".join(how), group.removeprefix("/"), option
