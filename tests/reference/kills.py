"""Runs of the reference plug-ins, each in a forked process: straight, and killed after every step and resumed.

    python -m tests.reference.kills NAME FOLDER

Prints one JSON object: by run, the steps in metrics.jsonl, attempts, and hashes of metrics.jsonl and model.safetensors. A fork
after the imports costs nothing, a process of its own seconds each.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from fedexp.config.compose import compose
from fedexp.engines.workers import Workers  # noqa: F401 - imported before the first fork
from fedexp.running import execute as running
from fedexp.storage.files import read_jsonl
from fedexp.storage.run_folder import Journal

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
# name: overrides, and the plug-ins that are put in place of the composed ones
PLUGINS: dict[str, tuple[list[str], dict[str, dict[str, Any]]]] = {
    "layerwise": (
        [*TRAINED, "rounds=2", "model.hidden=[6,5]"],
        {"aggregator": {"_target_": f"{TARGET}layerwise.Layerwise"}},
    ),
    "distiller": (
        ["method=local", "rounds=1", "architectures.clients=[mlp,mlp_nafi_100]", "limit.server_steps=3"],
        {"aggregator": {"_target_": f"{TARGET}distiller.Distiller"}},
    ),
    "keeper": ([*TRAINED, "state.memory_gb=0"], {"aggregator": {"_target_": f"{TARGET}keeper.KeepLast"}}),
    "sam": (TRAINED, {"trainer": {"_target_": f"{TARGET}sam.Sam", "rho": 0.05}}),
    "moon_like": (TRAINED, {"trainer": {"_target_": f"{TARGET}moon_like.MoonLike"}}),
    "server_momentum": (TRAINED, {"trainer": {"_target_": f"{TARGET}server_momentum.ServerMomentum"}}),
}


def config_of(name: str, engine: str, folder: Path) -> dict[str, Any]:
    overrides, plugins = PLUGINS[name]
    config = compose([*SMALL, *overrides, f"engine={engine}", f"output_root={folder}"])
    return {**config, **plugins}


def forked(config: dict[str, Any], kill_at: int | None = None) -> None:
    """Execute `config` in a child; it kills itself once step `kill_at` is journalled and not yet in a checkpoint."""
    child = os.fork()
    if not child:
        try:
            running.draw_curve = lambda rows, path, title: None
            if kill_at is not None:
                append = Journal.append

                def die(self: Journal, row: dict[str, Any]) -> None:
                    append(self, row)
                    if row["step"] == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)

                Journal.append = die  # type: ignore[method-assign]
            running.execute(config, say=None)
        except BaseException:  # noqa: BLE001 - a child must not come back into the parent's code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code != (0 if kill_at is None else -signal.SIGKILL):
        sys.exit(f"a run ended with {code}")


def facts(folder: Path) -> dict[str, Any]:
    (run,) = [path.parent for path in folder.glob("runs/*/*/result.json")]
    names = ("metrics.jsonl", "model.safetensors")
    return {
        "steps": [row["step"] for row in read_jsonl(run / "metrics.jsonl")],
        "attempts": json.loads((run / "result.json").read_text())["attempts"],
        "sha256": [hashlib.sha256((run / name).read_bytes()).hexdigest() for name in names],
        "values": {k: v for k, v in read_jsonl(run / "metrics.jsonl")[-1].items() if isinstance(v, float)},
    }


def main(name: str, root: Path) -> dict[str, Any]:
    runs = {}
    for engine in ("serial", "vectorized", "workers"):
        straight = root / engine
        forked(config_of(name, engine, straight))
        runs[engine] = facts(straight)
    for engine in ("serial", "vectorized"):
        killed = root / f"{engine}-killed"
        for step in runs[engine]["steps"]:
            forked(config_of(name, engine, killed), kill_at=step)
        forked(config_of(name, engine, killed))
        runs[f"{engine}-killed"] = facts(killed)
    return runs


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
