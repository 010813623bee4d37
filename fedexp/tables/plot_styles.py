"""How a paper's pictures draw each method: ``conf/table/<paper>/_looks.yaml``, one for all of its tables and figures."""

from __future__ import annotations

from pathlib import Path

import yaml

from fedexp.config.yaml_files import read_yaml
from fedexp.core.build import convert
from fedexp.core.errors import ConfigError
from fedexp.tables.report.report import Look

FILE = "_looks.yaml"


def read_looks(folder: Path) -> dict[str, Look]:
    """By a column's key; empty where the paper's folder has no such file.

    Raises:
        ConfigError: it is not a mapping of looks, or two methods cannot be told apart without colours.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        looks: dict[str, Look] = convert(read_yaml(path), dict[str, Look], "")
    except yaml.YAMLError as error:
        raise ConfigError(
            "a paper's looks are not YAML", where=" ".join(str(error).split())
        ) from None
    except ConfigError as error:
        error.facts["where"] = f"{path} {error.facts.get('where', '')}".strip()
        raise
    seen: dict[tuple[str, str], str] = {}
    for key, look in looks.items():
        other = seen.setdefault((look.marker, look.dash), key)
        if other != key:
            raise ConfigError(
                f"'{other}' and '{key}' have one marker and dash: in grey they are one method",
                where=str(path),
                do="give one of them another marker or dash",
            )
    return looks
