"""YAML files that are not part of a run's config, which Hydra reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import ConfigError

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


def read_yaml_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a file whose content is a mapping.

    Args:
        path: File to read.
        what: The file in messages, such as "a table's file".

    Raises:
        ConfigError: If the file is not YAML, or if its content is not a mapping.
    """
    try:
        node = read_yaml(path)
    except yaml.YAMLError as error:
        why = " ".join(str(error).replace("<unicode string>", path.name).split())
        raise ConfigError(
            f"{what} is not YAML", where=str(path), got=why, do="mend the file"
        ) from None
    if not isinstance(node, dict):
        raise ConfigError(f"{what} must be a mapping", where=str(path), got=type(node).__name__)
    return node


def defaults_of(preset: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Of the defaults list of a preset's file: how (``override``, ``optional`` or nothing), the group and its option."""
    for entry in preset.get("defaults") or []:
        if isinstance(entry, dict):
            for key, option in entry.items():
                *how, group = str(key).split() or [""]
                yield "".join(how), group.removeprefix("/"), option
