"""Tests of the Makefile and of the CI script.

The Makefile names the checkout whose environment it changes, and uses only the
environment VENV. CI fails if one of its steps fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# This script replaces the environment's Python. It records its arguments, and runs
# only commands that start with -I.
PYTHON = """#!/bin/sh
echo "$@" >> calls
if [ "$1" = -I ]; then shift; PYTHONPATH=OTHER exec REAL "$@"; fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone that shares the environment of another checkout."""
    other, clone = tmp_path / "other", tmp_path / "clone"
    for folder in (other / "fedexp", clone / ".venv/bin"):
        folder.mkdir(parents=True)
    (other / "fedexp/__init__.py").touch()
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    python = clone / ".venv/bin/python"
    python.write_text(PYTHON.replace("OTHER", str(other)).replace("REAL", sys.executable))
    python.chmod(0o755)
    return clone


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", f"PYTHON={sys.executable}", *arguments],
        cwd=clone,
        check=False,
        capture_output=True,
        text=True,
    )


def test_setup_names_the_checkout_that_loses_its_environment(clone: Path) -> None:
    done = make(clone, "setup")
    assert done.returncode == 0, done.stderr
    assert f"its fedexp is the checkout {clone.parent / 'other'}, and becomes {clone}" in (
        done.stdout
    )
    assert "make VENV=.venv-own setup" in done.stdout
    assert "pip install" in (clone / "calls").read_text()


def test_setup_of_the_same_checkout_names_none(clone: Path) -> None:
    python = clone / ".venv/bin/python"
    python.write_text(python.read_text().replace(str(clone.parent / "other"), str(clone)))
    (clone / "fedexp").mkdir()
    (clone / "fedexp/__init__.py").touch()
    assert "shared" not in make(clone, "setup").stdout


def test_site_installs_nothing(clone: Path) -> None:
    assert make(clone, "site").returncode == 0
    assert (clone / "calls").read_text() == "-m mkdocs build --strict\n"

    (clone / ".venv/bin/python").unlink()
    missing = make(clone, "site")
    assert missing.returncode != 0 and "run make setup" in missing.stdout


def test_the_module_of_make_site_is_a_command() -> None:
    called = [sys.executable, "-m", "fedexp.commands.table", "site", "--help"]
    done = subprocess.run(called, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "folder of records" in done.stdout


def test_wheel_is_built_by_the_environment_venv(clone: Path) -> None:
    (clone / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test_wheel.sh", clone / "scripts")
    # This Python fails, so that the script ends after the first command.
    python = clone / ".venv-own/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> own_calls\nexit 1\n')
    python.chmod(0o755)
    (clone / ".venv-own/.ready").touch()

    assert make(clone, "VENV=.venv-own", "wheel").returncode != 0
    assert "-m build --wheel" in (clone / "own_calls").read_text()
    assert not (clone / "calls").exists()


def test_git_ignores_the_environment_that_setup_proposes() -> None:
    ignored = ["git", "check-ignore", "-q", ".venv-own/bin/python"]
    assert subprocess.run(ignored, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("failing", [
    "none", "setup", "check", "wheel", "demo", "test", "corpus", "site", "scripts/check_site.py",
    "ma_echo/table1", "tests.simulated_cuda.matrix", "tests.faults.campaign",
])  # fmt: skip
def test_ci_fails_exactly_if_a_step_fails(tmp_path: Path, failing: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    # A step is named by the first or the second argument of its command.
    body = f'test "$1" != {failing} && test "$2" != {failing}'
    commands = ("make", "chromium", "chromedriver")
    scripts = ("python", "fedexp-table")
    for name in (*(f"bin/{one}" for one in commands), *(f".venv/bin/{one}" for one in scripts)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([tmp_path / ".ci/run"], env={**os.environ, "PATH": path}, check=False)
    assert (done.returncode == 0) == (failing == "none")
