"""An estimate of the cost of planned runs.

The estimate uses stored runs with the same configs as the planned runs. Only seeds may
differ.
"""

from __future__ import annotations

import glob
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from fedexp.core.paths import user_path
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.identity import SEEDS, scientific
from fedexp.storage.run_folder import RunFolder
from fedexp.storage.stored_run import StoredRun
from fedexp.tables.report.layout import duration
from fedexp.tracking.terminal import size_text

Cost = tuple[float, float]  # seconds, bytes


def print_forecast(configs: Sequence[ResolvedConfig]) -> None:
    """Print the time and disk space that runs would take, estimated from stored runs.

    Args:
        configs: Resolved configs of the runs.
    """
    if not configs:
        return
    known_costs: dict[Path, dict[str, list[Cost]]] = {}
    costs = [_mean_cost(config, known_costs) for config in configs]
    known = [cost for cost in costs if cost is not None]
    time = disk = "not known: no run of the same config with another seed is stored"

    if known:
        basis = "by stored runs of the same config with other seeds"
        if len(known) < len(costs):
            basis = (
                f"for {len(known)} of them {basis}, "
                f"and not known for the other {len(costs) - len(known)}"
            )
        seconds = sum(seconds for seconds, _ in known)
        time = f"about {duration(seconds)}, one run after the other, {basis}"
        disk = f"about {size_text(sum(size for _, size in known))}"

    root = user_path(configs[0]["output_root"], "output_root").resolve()
    existing_folder = next(folder for folder in (root, *root.parents) if folder.is_dir())
    print(f"time: {time}")
    print(
        f"disk: {disk}; {size_text(shutil.disk_usage(existing_folder).free)} are free under {root}"
    )


def _mean_cost(
    config: ResolvedConfig, known_costs: dict[Path, dict[str, list[Cost]]]
) -> Cost | None:
    """Return the mean cost of finished runs with the same config, except for seeds.

    Runs of every version of the code count. The result is None if there are no such
    runs.

    Args:
        config: Resolved config.
        known_costs: Costs that earlier calls have read. The outer key is a path with
            method and data set. The inner key is the config without seeds. This call
            adds the costs that it reads.
    """
    folder = RunFolder.of(config).path.parent
    # The name of the folder without the hash: method and data set of the run.
    prefix = folder.with_name(folder.name.rpartition("-")[0])
    if prefix not in known_costs:
        known_costs[prefix] = _costs_by_config(prefix)
    found = known_costs[prefix].get(_config_without_seeds(config), [])
    if not found:
        return None
    seconds, sizes = zip(*found, strict=True)

    return statistics.fmean(seconds), statistics.fmean(sizes)


def _costs_by_config(prefix: Path) -> dict[str, list[Cost]]:
    """Read the costs of runs whose folder names begin with `prefix`.

    Returns:
        The costs, by the runs' configs without seeds.
    """
    found: dict[str, list[Cost]] = {}
    for path in prefix.parent.glob(f"{glob.escape(prefix.name)}-*/*/result.json"):
        run = StoredRun(path.parent)
        if run.status == "done" and run.config and "seconds" in run.result:
            found.setdefault(_config_without_seeds(run.resolved_config), []).append(
                (float(run.result["seconds"]["total"]), float(run.size))
            )

    return found


def _config_without_seeds(config: ResolvedConfig) -> str:
    return json.dumps(
        {key: value for key, value in scientific(config).items() if key not in SEEDS},
        sort_keys=True,
    )
