"""Tests that the names of methods occur only in the methods' own files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedexp
from fedexp.config.folders import conf_dir

ROOT = Path(fedexp.__file__).parent
GENERIC = {  # common terms of the field, and the name of the package
    "aggregator", "average", "dense", "ensemble", "fedexp", "local", "mean", "sgd", "trainer",
}  # fmt: skip


def names() -> tuple[set[str], set[str]]:
    """Return the names of method files and presets, and the names of method classes."""
    files = {path.stem for path in (conf_dir() / "method").glob("*.yaml")}
    classes: set[str] = set()
    for path in (ROOT / "methods").rglob("[!_]*.py"):
        entry = path.relative_to(ROOT / "methods").parts[0].removesuffix(".py")
        if entry == "bases":
            continue
        files |= {entry, path.stem}
        if entry not in GENERIC - {"fedexp"}:
            classes |= set(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    return files - GENERIC, classes - {"Mean"}  # a common term


def test_method_names_list_is_not_empty() -> None:
    files, classes = names()
    assert {"fedavg", "scaffold", "ma_echo", "null_space"} <= files
    assert {"FedExP", "Scaffold", "FedNova", "FedAdam"} <= classes


@pytest.mark.parametrize("folder", ["core", "engines", "running", "commands"])
def test_method_agnostic_packages_name_no_method(folder: str) -> None:
    """No method is named in a package that must work for every method.

    The search ignores case for file names and respects it for class names.
    """
    files, classes = (re.compile(rf"\b({'|'.join(group)})\b") for group in names())
    for path in sorted((ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            hit = files.search(line.lower()) or classes.search(line)
            assert not hit, f"{path}:{number}: {line.strip()}"
