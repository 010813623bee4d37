"""Tests of runs with the reference plug-ins.

Every plug-in runs on the engines serial, vectorized and workers. After kills with
SIGKILL at every step, resumed runs on serial and vectorized give bit-identical results.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedexp.running import execute as running
from tests.reference.kills import PLUGINS, killed, straight


@pytest.mark.parametrize("name", PLUGINS)
def test_runs_on_every_engine_and_survives_kills(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "draw_curve", lambda rows, path, title: None)
    engines = ("serial", "vectorized", "workers")
    runs = {engine: straight(name, engine, tmp_path / engine) for engine in engines}
    assert runs["workers"]["sha256"] == runs["serial"]["sha256"]
    assert runs["vectorized"]["values"] == pytest.approx(
        runs["serial"]["values"], rel=1e-3, abs=1e-3
    )
    for engine in ("serial", "vectorized"):
        folder = tmp_path / f"{engine}-killed"
        folder.mkdir()
        resumed = killed(name, engine, folder, runs[engine]["steps"])
        assert resumed["attempts"] == len(runs[engine]["steps"]) + 1
        assert resumed["sha256"] == runs[engine]["sha256"]
