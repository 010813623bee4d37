"""The generated table of presets and their files is complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
METHODS = ROOT / "fedexp" / "methods"


def test_readme_lists_every_preset_with_its_files() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_methods_readme.py", "--check"], check=False
    )
    assert checked.returncode == 0, "run python scripts/make_methods_readme.py"


def test_readme_links_every_entry() -> None:
    text = (METHODS / "README.md").read_text()
    entries = {path.name for path in METHODS.iterdir() if not path.name.startswith("_")} - {
        "README.md",
        "bases",
    }
    unlinked = {name for name in entries if f"]({name}" not in text}
    assert unlinked == {"bn_frozen_after_epoch1.py"}  # no preset chooses this trainer
