"""Help is printed without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from fedexp.commands.{module} import run_command
try:
    code = run_command({arguments})
except SystemExit as stop:
    code = stop.code
imported = sorted({{"torch", "torchvision", "hydra", "ray"}} & {{*sys.modules}})
assert code in (0, None) and not imported, (code, imported)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "shown"),
    [
        ("run", ["--help"], "Usage: fedexp"),
        ("run", ["--help", "trainer"], "trainer=OPTION"),
        ("run", ["--help", "local"], "local:"),
        ("runs", ["--help"], "usage: fedexp-runs"),
        ("runs", ["list", "--help"], "usage: fedexp-runs list"),
        ("table", ["--help"], "usage: fedexp-table"),
        ("table", ["run", "--help"], "usage: fedexp-table run"),
        ("tune", ["--help"], "usage: fedexp-tune"),
        ("data", ["--help"], "usage: fedexp-data"),
    ],
)
def test_help_imports_no_torch(
    module: str, arguments: list[str], shown: str, tmp_path: Path
) -> None:
    script = SCRIPT.format(module=module, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
