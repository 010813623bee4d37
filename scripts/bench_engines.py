"""Seconds a round of every engine that could compute a workload, and what engine=auto takes of them.

    python scripts/bench_engines.py [W1 W1u W2 W3 small resnet] [--methods fedavg scaffold] [--repeats 3] [--write FILE]

Every candidate runs in a process of its own; the candidates take turns, each repeat in another order, so that a drift of the
machine hits all alike. A process counts with the median of its rounds but the first, a candidate with the median of its
processes. The last column is the ratio to the fastest candidate; it shows whether auto is within 10 %. auto is
given as many rounds as make it a long run, for it starts workers for those alone. "others" is what other programs computed
meanwhile, in cores: where it is not about 0, measure again.

Workloads: those of bench_rounds.py; small: 50 clients of 100 samples, a CNN of 55 thousand parameters, batch 10; resnet:
ResNet-18 on CIFAR-10, 4 clients of 40 samples, batch 20.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import alternate
import bench_rounds

SMALL = ["model=cnn_mcmahan", "model.channels=[8,16]", "model.hidden=[64]", "clients=50", "local.batch_size=10"]
RESNET = ["dataset=cifar10_jpeg", "model=resnet18_gn_cifar", "clients=4", "local.batch_size=20"]
WORKLOADS = {
    **bench_rounds.WORKLOADS,
    "small": [*SMALL, "partition=iid", "limit.train=5000"],
    "resnet": [*RESNET, "partition=iid", "limit.train=160"],
}
ROUNDS = {"W1": 15, "W1u": 15, "W2": 3, "W3": 4, "small": 3, "resnet": 3}
LONG = {"W1": 30, "W1u": 30, "W2": 12, "W3": 24, "small": 24, "resnet": 6}  # for auto
LINEAR = {"W1": (2, 4, 8, 16, 20), "W1u": (2, 4, 8, 16, 20), "W2": (2, 4, 8, 10)}
VMAP = {"W3": (2, 4), "small": (4, 8), "resnet": (2, 4)}


def candidates(workload: str) -> dict[str, list[str]]:
    """Engines by name, as overrides: every one whose choices are made."""
    made = {"serial": ["engine=serial"], "workers": ["engine=workers"]}
    kernel, stacks = ("linear", LINEAR[workload]) if workload in LINEAR else ("vmap", VMAP[workload])
    for stack in stacks:
        made[f"{kernel} {stack}"] = ["engine=vectorized", f"engine.stack={stack}", f"engine.kernel={kernel}"]
    for stack in stacks:
        if (kernel == "linear" and stack <= 8) or (workload == "small" and stack == 4):
            inner = ["engine@engine.inner=vectorized", f"engine.inner.stack={stack}", f"engine.inner.kernel={kernel}"]
            made[f"workers, {kernel} {stack}"] = ["engine=workers", *inner]
    return made


def taken(said: dict[str, Any], threads: int, workload: str) -> str:
    """The candidate that computed a run of auto."""
    engine = said["engine"]
    kind = engine["_target_"].rpartition(".")[2].lower()
    beside = said["threads"] < threads
    if kind != "vectorized":
        return "workers" if beside else kind
    kernel = engine["kernel"] if engine["kernel"] != "auto" else "linear" if workload in LINEAR else "vmap"
    return ("workers, " if beside else "") + f"{kernel} {engine['stack']}"


def elsewhere() -> float:
    """Seconds of processor time so far that were not our own processes'; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system = (int(ticks) for ticks in stat.read_text().split()[1:4])
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="|".join(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=["fedavg"], choices=bench_rounds.METHODS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="CANDIDATE", help="as the table names them; default: all")
    parser.add_argument("--no-auto", action="store_true", help="the candidates alone")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}")
    facts = f"{options.threads} threads, {options.repeats} processes a candidate, interleaved, medians"
    columns = ["workload", "method", "candidate", "s/round", "min", "max"]
    columns += ["ratio to the best", "others", "taken by auto"]
    table = alternate.Table(options.write, alternate.heading(facts), columns)
    for workload in options.workloads:
        for method in options.methods:
            compare(workload, method, options, table)


def compare(workload: str, method: str, options: Any, table: alternate.Table) -> None:
    """One workload's rows, the fastest candidate first."""
    fixed = [*WORKLOADS[workload], *bench_rounds.METHODS[method]]
    all_of_them = {n: c for n, c in candidates(workload).items() if not options.only or n in options.only}
    if not options.no_auto:
        all_of_them["auto"] = ["engine=auto"]
    seconds: dict[str, list[float]] = {name: [] for name in all_of_them}
    others: dict[str, list[float]] = {name: [] for name in all_of_them}
    took: list[str] = []
    for repeat in range(options.repeats):
        names = list(all_of_them)
        random.Random(repeat).shuffle(names)
        for name in names:
            rounds = (LONG if name == "auto" else ROUNDS)[workload]
            before, began = elsewhere(), time.perf_counter()
            said = alternate.fedexp(options.data, options.threads, rounds, *fixed, *all_of_them[name])
            others[name].append((elsewhere() - before) / (time.perf_counter() - began))
            seconds[name].append(statistics.median(said["seconds"][1:]))
            if name == "auto":
                took.append(taken(said, options.threads, workload))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in medians.items() if name != "auto")
    for name in sorted(medians, key=lambda name: medians[name]):
        row = [f"{value:.4f}" for value in (medians[name], min(seconds[name]), max(seconds[name]))]
        mark = "; ".join(took) if name == "auto" else "x" * took.count(name)
        busy = f"{statistics.median(others[name]):.2f}"
        table.row([workload, method, name, *row, f"{medians[name] / best:.2f}", busy, mark])


if __name__ == "__main__":
    main()
