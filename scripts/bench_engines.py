"""Check that engine=auto is within 10 % of the fastest engine.

    python scripts/bench_engines.py [W1 W1u W1s W2 W3 small resnet] [--repeats 5]
        [--threads 2] [--device cpu|cuda] [--ray] [--write FILE]

The candidates are every engine with every stack size (number of clients that are
trained together), and the engine that auto chooses. Workers have stacks of at most
eight clients, and no stacks on the workload resnet. With --ray, engine=ray on a local
cluster is a candidate, too. The option is off by default, because the idle processes of
the cluster use some processor time. The script prints the seconds per round of each
candidate. Everything is controlled from one process. The candidates take turns. The
order differs between repeats, so that slow changes of the machine's speed affect all
candidates equally.

A turn repeats the first round of a run for half a second (at least once), with training
and aggregation and without evaluation. The time of a turn is the median of its rounds.
The time of a candidate is the median of its turns. If other programs used more than a
tenth of a core during a turn, the turn is rejected and repeated. A candidate has at
most three times as many turns as repeats. It is marked ``!`` if it has too few clean
turns. auto is measured as a separate candidate, although its engine is also one of the
other candidates. On a GPU, no candidate has workers, because `auto` never chooses them
there. The exit code is 1 if auto is more than 10 % slower than the fastest
candidate, and 2 if a candidate has too few clean turns.

The workloads are those of bench_rounds.py and the following, all on Fashion-MNIST:

- W1s: W1 with SCAFFOLD.
- small: 50 clients with 100 samples each, a CNN with 55 thousand parameters, batch size
  10.
- resnet: ResNet-18, 4 clients with 40 samples each, batch size 20.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import alternate
import bench_rounds

SECONDS = 0.5  # shortest duration of a turn
DISTURBED = 0.1  # cores that other programs may use during a turn
MOST_BEHIND = 1.1
LONG = 1000  # auto chooses an engine for a run with this number of rounds
SMALL = [
    "model=cnn_mcmahan",
    "model.channels=[8,16]",
    "model.hidden=[64]",
    "clients=50",
    "local.batch_size=10",
]
RESNET = ["model=resnet18_gn_cifar", "clients=4", "local.batch_size=20"]
WORKLOADS = {
    "W1": [*bench_rounds.WORKLOADS["W1"], "method=fedavg"],
    "W1u": [*bench_rounds.WORKLOADS["W1u"], "method=fedavg"],
    "W1s": [*bench_rounds.WORKLOADS["W1"], *bench_rounds.METHODS["scaffold"]],
    "W2": [*bench_rounds.WORKLOADS["W2"], "method=fedavg"],
    "W3": [*bench_rounds.WORKLOADS["W3"], "method=fedavg"],
    "small": [*SMALL, "partition=iid", "limit.train=5000", "method=fedavg"],
    "resnet": [*RESNET, "partition=iid", "limit.train=160", "method=fedavg"],
}
STACKS = {
    "W1": (2, 4, 8, 16, 20),
    "W1u": (2, 4, 8, 16, 20),
    "W1s": (2, 4, 8, 16, 20),
    "W2": (2, 4, 8, 10),
    "W3": (2, 4),
    "small": (2, 4, 8),
    "resnet": (2, 4),
}


@dataclass
class Candidate:
    """An engine, its threads per process, and the seconds of its turns."""

    engine: Any
    threads: int
    turns: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.turns or self.rejected)


def candidates(workload: str, options: Any) -> dict[str, Candidate]:
    """Return every engine with all its options set, by name."""
    from fedexp.core.engine import describe
    from fedexp.engines.ray import Ray
    from fedexp.engines.serial import Serial
    from fedexp.engines.vectorized import Vectorized
    from fedexp.engines.workers import Workers

    threads = options.threads
    kernel: Any = "linear" if workload[:2] in ("W1", "W2") else "vmap"
    stacked = {f"{kernel} {stack}": Vectorized(stack, kernel) for stack in STACKS[workload]}
    made = {
        name: Candidate(engine, threads) for name, engine in {"serial": Serial(), **stacked}.items()
    }

    if threads > 1 and options.device == "cpu":
        beside = {
            name: engine
            for name, engine in stacked.items()
            if engine.jobs_at_once <= 8 and workload != "resnet"
        }
        inner = {
            "workers": Serial(),
            **{f"workers, {name}": engine for name, engine in beside.items()},
        }
        made |= {
            name: Candidate(Workers(inner=describe(engine)), 1) for name, engine in inner.items()
        }
    if options.ray:
        made["ray"] = Candidate(Ray(address="local", actors=threads), 1)
    return made


def busy() -> tuple[float, float]:
    """Return the seconds of processor time that were used so far.

    Returns:
        The seconds of the whole machine, including stolen time, and the seconds of this
        process and its descendants. Both are 0 if the system has no /proc.
    """
    if not Path("/proc/stat").exists():
        return 0.0, 0.0
    from fedexp.running.peak_memory import descendants

    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )

    ours = 0
    for pid in ("self", *descendants(str(os.getpid()))):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
    return (user + nice + system + irq + softirq + steal) / tick, ours / tick


def others(since: tuple[float, float], seconds: float) -> float:
    """Return the mean number of cores that other programs used since a call of `busy`.

    Args:
        since: Result of the earlier call.
        seconds: Elapsed seconds since then.
    """
    now = busy()
    return (now[0] - since[0] - (now[1] - since[1])) / seconds


@contextlib.contextmanager
def world(workload: str, options: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yield a function that executes a first round, and auto's `EngineContext`."""
    import torch

    from fedexp.config.compose import compose
    from fedexp.core.device import synchronise
    from fedexp.core.engine import EngineContext
    from fedexp.core.runner import Snapshot, next_jobs, run
    from fedexp.running.experiment import Experiment, choose_numerics
    from fedexp.runtime.numerics import use_numerics

    fixed = [
        f"data_root={options.data}",
        f"threads={options.threads}",
        f"device={options.device}",
        "dataset=fashion_mnist",
    ]

    experiment = Experiment.of(compose([*fixed, "local.lr=0.05", *WORKLOADS[workload]]))
    numerics = choose_numerics(experiment.config)
    with use_numerics(numerics):
        device = torch.device(options.device)
        data = experiment.load(device)
        env = experiment.env(data, device)
        start = Snapshot(0, experiment.aggregator.init(env))

        def one_round(engine: Any) -> None:
            next(run(experiment.aggregator, env, engine, data, start))
            synchronise(device)

        jobs = next_jobs(experiment.aggregator, env, start)
        yield one_round, EngineContext(jobs, data, LONG, options.threads, numerics)


def compare(workload: str, options: Any, table: alternate.Table) -> tuple[float, bool]:
    """Measure one workload and write its rows, the fastest candidate first.

    Returns:
        Ratio of auto's time to the fastest candidate's, and whether a candidate has too
        few clean turns.
    """
    import torch

    from fedexp.core.engine import describe
    from fedexp.engines.auto import Auto
    from fedexp.engines.workers import Workers

    with world(workload, options) as (one_round, context), contextlib.ExitStack() as stack:
        chosen = Auto().choose(context)
        made = candidates(workload, options)
        made["auto"] = Candidate(chosen, chosen.threads_each(options.threads))
        for candidate in made.values():
            torch.set_num_threads(candidate.threads)
            stack.callback(candidate.engine.close)
            candidate.engine.open(
                replace(context.numerics, threads=candidate.threads), options.threads
            )
            one_round(candidate.engine)  # builds networks and starts processes

        for turn in range(3 * options.repeats):
            waiting = [
                candidate for candidate in made.values() if len(candidate.turns) < options.repeats
            ]
            random.Random(turn).shuffle(waiting)
            for candidate in waiting:
                torch.set_num_threads(candidate.threads)
                since, began, rounds = busy(), time.perf_counter(), []
                while not rounds or sum(rounds) < SECONDS:
                    before = time.perf_counter()
                    one_round(candidate.engine)
                    rounds.append(time.perf_counter() - before)
                clean = others(since, time.perf_counter() - began) <= DISTURBED
                (candidate.turns if clean else candidate.rejected).append(statistics.median(rounds))
    beside = f"{options.threads} workers, " if isinstance(chosen, Workers) else ""
    took_by_auto = beside + bench_rounds.computing(describe(chosen.computing))
    disturbed = False
    best = min(candidate.seconds for candidate in made.values())

    for name, candidate in sorted(made.items(), key=lambda item: item[1].seconds):
        used = candidate.turns or candidate.rejected
        disturbed |= len(candidate.turns) < options.repeats
        mark = "" if len(candidate.turns) == options.repeats else "!"
        took = took_by_auto if name == "auto" else ""
        numbers = [f"{value:.4f}" for value in (candidate.seconds, min(used), max(used))]
        counts = f"{len(candidate.turns)} of {len(candidate.turns) + len(candidate.rejected)}{mark}"
        table.row([workload, name, *numbers, counts, f"{candidate.seconds / best:.2f}", took])
    return made["auto"].seconds / best, disturbed


def main() -> int:
    parser = alternate.parser(__doc__)
    parser.add_argument(
        "workloads", nargs="*", default=list(WORKLOADS), metavar="|".join(WORKLOADS)
    )
    parser.add_argument("--repeats", type=int, default=5)
    alternate.add_device(parser)
    parser.add_argument("--ray", action="store_true", help="also measure engine=ray")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(
            f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}"
        )
    from fedexp.runtime.allocator import keep_freed_memory

    keep_freed_memory()

    facts = (
        f"{options.threads} threads, {options.repeats} turns per candidate, interleaved, medians"
    )
    columns = [
        "workload",
        "candidate",
        "s/round",
        "min",
        "max",
        "clean turns",
        "ratio to the best",
        "auto's engine",
    ]
    table = alternate.Table(options.write, alternate.heading(facts, options.device), columns)

    found = {workload: compare(workload, options, table) for workload in options.workloads}
    table.line("")
    table.line(
        "auto, ratio to the best: "
        + ", ".join(f"{name} {ratio:.2f}" for name, (ratio, _) in found.items())
    )
    if any(disturbed for _, disturbed in found.values()):
        table.line("Other programs were computing: measure the rows marked ! again.")
        return 2
    return int(any(ratio > MOST_BEHIND for ratio, _ in found.values()))


# The condition is needed, because worker processes import this file
if __name__ == "__main__":
    sys.exit(main())
