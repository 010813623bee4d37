"""Runs of the reference plug-ins.

Some run in this process. Others run in forked processes that are killed after every
step, and are resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from fedexp.config.compose import compose
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.running import execute as running
from fedexp.storage.files import read_jsonl
from fedexp.storage.run_folder import Journal
from tests.fork_server import Forked

SMALL = [
    "clients=4",
    "partition=iid",
    "limit.train=160",
    "limit.test=80",
    "threads=1",
    "device=cpu",
    "checkpoint.every=1",
]
TRAINED = ["method=fedavg", "rounds=3", "clients_per_round=3", "local.momentum=0"]
TARGET = "tests.reference."
# By name: the overrides, and the plug-ins that replace those of the composed config.
PLUGINS: dict[str, tuple[list[str], dict[str, dict[str, Any]]]] = {
    "layerwise": (
        [*TRAINED, "rounds=2", "model.hidden=[6,5]"],
        {"aggregator": {"_target_": f"{TARGET}layerwise.Layerwise"}},
    ),
    "distiller": (
        [
            "method=local",
            "rounds=1",
            "architectures.clients=[mlp,mlp_nafi_100]",
            "limit.server_steps=3",
        ],
        {"aggregator": {"_target_": f"{TARGET}distiller.Distiller"}},
    ),
    "keeper": (
        [*TRAINED, "state.memory_gb=0"],
        {"aggregator": {"_target_": f"{TARGET}keeper.KeepLast"}},
    ),
    "sam": (TRAINED, {"trainer": {"_target_": f"{TARGET}sam.Sam", "rho": 0.05}}),
    "moon_like": (TRAINED, {"trainer": {"_target_": f"{TARGET}moon_like.MoonLike"}}),
    "server_momentum": (
        TRAINED,
        {"trainer": {"_target_": f"{TARGET}server_momentum.ServerMomentum"}},
    ),
}


def config_of(name: str, engine: str, folder: Path) -> ResolvedConfig:
    overrides, plugins = PLUGINS[name]
    config = compose([*SMALL, *overrides, f"engine={engine}", f"output_root={folder}"])
    return config.with_values(**plugins)


def straight(name: str, engine: str, folder: Path) -> dict[str, Any]:
    """Return `facts` of an uninterrupted run."""
    running.execute(config_of(name, engine, folder), say=None)
    return facts(folder)


def killed(name: str, engine: str, folder: Path, steps: list[int]) -> dict[str, Any]:
    """Return `facts` of a run that was killed after each of its `steps` and resumed."""
    config = config_of(name, engine, folder)
    for step in [*steps, None]:
        process = Forked(folder, _execute, config, step)
        told = process.communicate(timeout=120)
        assert process.returncode == (0 if step is None else -signal.SIGKILL), told
    return facts(folder)


def _execute(config: ResolvedConfig, kill_at: int | None) -> None:
    """Run in a separate process, which kills itself.

    The kill comes when step `kill_at` is in the journal, and not yet in a checkpoint.
    """
    append = Journal.append

    def die(self: Journal, row: dict[str, Any]) -> None:
        append(self, row)
        if row["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.append = die  # type: ignore[method-assign]
    running.draw_curve = lambda rows, path, title: None
    running.execute(config, say=None)


def facts(folder: Path) -> dict[str, Any]:
    (run,) = [path.parent for path in folder.glob("runs/*/*/result.json")]
    names = ("metrics.jsonl", "model.safetensors")
    return {
        "steps": [row["step"] for row in read_jsonl(run / "metrics.jsonl")],
        "attempts": json.loads((run / "result.json").read_text())["attempts"],
        "sha256": [hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names],
        "values": {
            k: v for k, v in read_jsonl(run / "metrics.jsonl")[-1].items() if isinstance(v, float)
        },
    }
