"""YAML files that are not part of a run's config, which Hydra reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML has it, takes a tenth of the time


def read_yaml(path: Path) -> Any:
    """Raises `yaml.YAMLError`."""
    return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
