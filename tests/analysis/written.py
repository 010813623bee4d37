"""Functions with which tests write run folders that have rows per round and times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import write_json, write_text
from fedexp.storage.identity import config_hash

ACC = "test/global/acc"


def write_run(
    root: Path,
    method: str,
    seed: int,
    values: Sequence[float],
    *,
    status: str = "done",
    code: str = "89abcdef",
    updated: str = "2026-01-01T00:00:00+00:00",
    bytes_up: int = 10,
    seconds: float = 2.0,
    choices: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """Write a run that has one row per value.

    `keys` are keys of the config, in which two underscores stand for a dot.
    """
    config: dict[str, Any] = {"method": method, "seed": seed, "seed_data": seed, "clients": 4}
    config |= {"rounds": len(values), "local": {"lr": 0.1, "betas": [0.9, 0.5]}}
    config |= {"partition": {"alpha": 0.1}, "trainer": {"_target_": f"x.{method}"}}
    for key, value in keys.items():
        *path, last = key.split("__")
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    picked = {"method": method, "dataset": "digits", "partition": "dirichlet", **(choices or {})}
    stored = config | {"choices": picked, "overrides": [f"seed={seed}"]}
    name = config_hash(ResolvedConfig.from_stored(stored))[:16]
    folder = root / "runs" / f"{method}-digits-{name}" / code
    folder.mkdir(parents=True)
    write_text(folder / "config.yaml", json.dumps(stored))
    facts = {"status": status, "updated": updated, "round": len(values), "rounds": len(values)}
    write_json(folder / "status.json", facts)
    rows = [
        {"round": at, "step": at, "local_steps": 3, "bytes/up": bytes_up, "bytes/down": 1,
         "clients": 2, ACC: value}
        for at, value in enumerate(values, start=1)
    ]  # fmt: skip
    write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    phases = {"train": seconds, "aggregate": 0.5, "evaluate": 7.0, "log": 7.0}
    times = [
        {"round": at, "step": at, "attempt": attempt, "seconds": phases if attempt == 2 else {"train": 99}}
        for at in range(1, len(values) + 1)
        for attempt in (1, 2)
    ]  # fmt: skip
    write_text(folder / "timing.jsonl", "".join(json.dumps(row) + "\n" for row in times))
    if status == "done":
        headline = {"metric": ACC, "rule": "last", "value": values[-1]}
        result = {"status": "done", "choices": picked, "headline": headline, "rounds": len(values)}
        result |= {"metrics": {ACC: values[-1], "clients": 2}, "mean_last_10": {ACC: 0.25}}
        result |= {"hashes": {"config": "c" * 32, "code": "d" * 32}, "local_steps": 3 * len(values)}
        result |= {"bytes": {"up": bytes_up * len(values), "down": len(values)}}
        write_json(folder / "result.json", result)
    return folder
