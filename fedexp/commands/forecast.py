"""What a sweep or a table would take, by stored runs that differ in their seeds alone."""

from __future__ import annotations

import glob
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.identity import SEEDS, scientific
from fedexp.storage.run_folder import RunFolder
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.report.layout import duration
from fedexp.tracking.terminal import size_text

Cost = tuple[float, float]  # seconds, bytes


def print_forecast(configs: Sequence[ResolvedConfig]) -> None:
    """Print the time and the disk that runs of these resolved configs would take, as far as stored runs tell."""
    if not configs:
        return
    peers: dict[Path, dict[str, list[Cost]]] = {}
    costs = [_cost(config, peers) for config in configs]
    known = [cost for cost in costs if cost is not None]
    time = disk = "not known: no run of the same config with another seed is stored"
    if known:
        basis = "by stored runs of the same config with other seeds"
        if len(known) < len(costs):
            basis = f"for {len(known)} of them {basis}; nothing is known of the other {len(costs) - len(known)}"
        time = f"about {duration(sum(seconds for seconds, _ in known))}, one run after the other, {basis}"
        disk = f"about {size_text(sum(size for _, size in known))}"
    root = Path(configs[0]["output_root"]).expanduser().resolve()
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    print(f"time: {time}")
    print(f"disk: {disk}; {size_text(shutil.disk_usage(there).free)} are free under {root}")


def _cost(config: ResolvedConfig, peers: dict[Path, dict[str, list[Cost]]]) -> Cost | None:
    """Means over the finished runs of `config` but for its seeds, whatever code made them; None without any.

    `peers` is filled with what is read.
    """
    folder = RunFolder.of(config).path.parent
    alike = folder.with_name(folder.name.rpartition("-")[0])  # method and data set
    if alike not in peers:
        peers[alike] = _finished(alike)
    found = peers[alike].get(_unseeded(config), [])
    if not found:
        return None
    seconds, sizes = zip(*found, strict=True)
    return statistics.fmean(seconds), statistics.fmean(sizes)


def _finished(alike: Path) -> dict[str, list[Cost]]:
    """What runs cost whose folders' names begin as `alike`, by their configs without seeds."""
    found: dict[str, list[Cost]] = {}
    for path in alike.parent.glob(f"{glob.escape(alike.name)}-*/*/result.json"):
        run = StoredRun(path.parent)
        if run.status == "done" and run.config and "seconds" in run.result:
            found.setdefault(_unseeded(run.resolved_config), []).append(
                (float(run.result["seconds"]["total"]), float(run.size))
            )
    return found


def _unseeded(config: ResolvedConfig) -> str:
    left = {key: value for key, value in scientific(config).items() if key not in SEEDS}
    return json.dumps(left, sort_keys=True)
