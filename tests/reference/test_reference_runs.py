"""Every reference plug-in runs on serial, vectorized and workers, and resumes to the same bits after a kill -9 at any step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.kills import PLUGINS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PLUGINS)
def test_runs_on_every_engine_and_survives_kills(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.reference.kills", name, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])
    assert runs["workers"]["sha256"] == runs["serial"]["sha256"]
    assert runs["vectorized"]["values"] == pytest.approx(runs["serial"]["values"], rel=1e-3, abs=1e-3)
    for engine in ("serial", "vectorized"):
        killed = runs[f"{engine}-killed"]
        assert killed["attempts"] == len(runs[engine]["steps"]) + 1
        assert killed["sha256"] == runs[engine]["sha256"]
