"""Run fedexp's side of the benchmarks.

    python scripts/fedexp_rounds.py OVERRIDE ...

The script executes one run in this process, as a user runs it. Everything that the bare
loop (bare_loop.py) does not do is switched off: evaluation, checkpoints, logging and
the client cache. It prints JSON with the seconds (all phases except evaluation) and the
local steps of every round, the engine that computed the run, and the messages to the
user.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

OFF = [
    "eval.every=1000000",
    "checkpoint.every=off",
    "memo.enabled=false",
    "reuse=false",
    "logger=local",
]


def main(overrides: list[str]) -> dict[str, Any]:
    from fedexp.config.compose import compose
    from fedexp.running.execute import execute
    from fedexp.storage.files import read_json, read_jsonl

    notes: list[str] = []
    with tempfile.TemporaryDirectory() as outputs:
        result = execute(compose([*OFF, *overrides, f"output_root={outputs}"]), say=notes.append)
        folder = Path(result["folder"])
        timing = [row["seconds"] for row in read_jsonl(folder / "timing.jsonl")]
        return {
            "seconds": [
                sum(v for phase, v in row.items() if phase != "evaluate") for row in timing
            ],
            "steps": [row["local_steps"] for row in read_jsonl(folder / "metrics.jsonl")],
            "engine": read_json(folder / "numerics.json")["engine"],
            "notes": notes,
        }


# The condition is needed, because worker processes of an engine import this file
if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
