"""Functions that read YAML files without Hydra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedexp.core.errors import ConfigError
from fedexp.storage.files import parse_yaml


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        yaml.YAMLError: The file is not YAML or not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise yaml.YAMLError(f"{path} is not text in UTF-8") from error
    return parse_yaml(text)


def read_yaml_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a file whose content is a mapping.

    Args:
        path: File to read.
        what: Name of the file in messages, such as "a table's file".

    Raises:
        ConfigError: If the file is not YAML, or if its content is not a mapping.
    """
    try:
        node = read_yaml(path)
    except yaml.YAMLError as error:
        why = " ".join(str(error).replace("<unicode string>", path.name).split())
        raise ConfigError(
            f"{what} is not YAML", where=str(path), got=why, do="correct the file"
        ) from None
    if not isinstance(node, dict):
        raise ConfigError(f"{what} must be a mapping", where=str(path), got=type(node).__name__)
    return node


def defaults_of(preset: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the entries of the defaults list of a preset.

    Args:
        preset: Content of the file.

    Yields:
        Triples of the keyword (``override``, ``optional`` or an empty string), the
        group and the option.
    """
    for entry in preset.get("defaults") or []:
        if isinstance(entry, dict):
            for key, option in entry.items():
                *how, group = str(key).split() or [""]
                yield "".join(how), group.removeprefix("/"), option
