"""The version in the package is that of the project file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import fedexp


def test_package_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert fedexp.__version__ == project["project"]["version"]
