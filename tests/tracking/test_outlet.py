"""A reader of the output that leaves, or never existed, does not end a run."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedexp.commands.run import run_command
from fedexp.commands.runs import run_command as runs_command
from fedexp.commands.table import run_command as table_command
from fedexp.commands.tune import run_command as tune_command
from fedexp.tracking.outlet import lasting_output

RECORD = Path(__file__).resolve().parents[2] / "scripts/results/nafi/fig2b-reduced"
QUICK = ["rounds=1", "clients=2", "model.hidden=[4]", "limit.train=40", "limit.test=20"]


@pytest.mark.parametrize("kind", ["pipe", "closed", "none"])
def test_a_run_goes_on_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
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
        # The file still contains unwritten text, so closing it may fail. In a real
        # process, its stdout is no longer used by then
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()


@pytest.mark.parametrize(("command", "arguments"), [
    (table_command, ["list"]),
    (table_command, ["report", "nafi/fig2b", "--from", str(RECORD)]),
    (table_command, ["run", "demo/digits", "--dry-run"]),
    (run_command, [*QUICK, "--dry-run"]),
    (run_command, [*QUICK, "--cfg", "job"]),
    (tune_command, ["local.lr=0.1,0.2", *QUICK, "--dry-run"]),
])  # fmt: skip
def test_command_that_only_prints_fails_if_the_output_cannot_be_written(
    command: Callable[[list[str]], int],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(OSError), Path("/dev/full").open("w") as out:  # closing it fails, too
        monkeypatch.setattr(sys, "stdout", out)
        assert command(arguments) == 1
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["full", "pipe", "closed"])
def test_export_fails_if_the_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "full":
        out = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    elif kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        out = os.fdopen(writer, "w")
    else:
        out = io.StringIO()
        out.close()
    monkeypatch.setattr(sys, "stdout", out)
    code = runs_command(["export", "--root", str(tmp_path)])
    assert code == (1 if kind == "full" else 0)
    assert ("No space left" in capsys.readouterr().err) == (kind == "full")
    with contextlib.suppress(OSError):
        out.close()


def test_what_can_be_read_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with lasting_output():
        print("said")
        print("told", file=sys.stderr)
    assert sys.stdout is before and capsys.readouterr() == ("said\n", "told\n")


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    with lasting_output():
        print("before")
        print("\u2020")
        print("after")
    assert raw.getvalue() == b"before\n\\u2020\nafter\n"


def test_overlapping_uses_end_with_the_last() -> None:
    before = sys.stdout
    first, second = lasting_output(), lasting_output()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.stdout is not before
    second.__exit__(None, None, None)
    assert sys.stdout is before


def test_closed_descriptors_are_no_files_numbers(tmp_path: Path) -> None:
    """Otherwise a library's output would get into a run's files.

    It could also get to a child process.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from fedexp.tracking.outlet import lasting_output\n"
        "first = 'import os; os._exit(os.open(os.devnull, os.O_RDONLY))'\n"
        "with lasting_output():\n"
        "    child = subprocess.run([sys.executable, '-c', first]).returncode\n"
        "    sys.exit(min(os.open(os.devnull, os.O_RDONLY), child) <= 2)\n"
    )
    assert (
        subprocess.run(f"{sys.executable} {script} >&- 2>&-", shell=True, check=False).returncode
        == 0
    )
