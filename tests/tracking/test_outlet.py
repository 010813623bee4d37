"""A reader that leaves, or was never there, ends no run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedexp.commands.run import run_command
from fedexp.tracking.outlet import lasting_output

QUICK = ["rounds=1", "clients=2", "model.hidden=[4]", "limit.train=40", "limit.test=20"]


@pytest.mark.parametrize("kind", ["pipe", "closed", "none"])
def test_a_run_goes_on_without_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    elif kind == "closed":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        sys.stdout.close()
    else:
        monkeypatch.setattr(sys, "stdout", None)
    assert run_command(QUICK) == 0
    (status,) = tmp_path.glob("outputs/runs/*/*/status.json")
    assert '"done"' in status.read_text()
    if kind == "pipe":
        sys.stdout.close()


def test_what_can_be_read_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with lasting_output():
        print("said")
        print("told", file=sys.stderr)
    assert sys.stdout is before and capsys.readouterr() == ("said\n", "told\n")


def test_closed_descriptors_are_no_files_numbers() -> None:
    """Else what a library prints would land in a run's files."""
    code = (
        "import os, sys\nfrom fedexp.tracking.outlet import lasting_output\n"
        "with lasting_output():\n    sys.exit(os.open(os.devnull, os.O_RDONLY) <= 2)"
    )
    command = f"{sys.executable} -c '{code}' >&- 2>&-"
    assert subprocess.run(command, shell=True, check=False).returncode == 0
