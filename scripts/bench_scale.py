"""Measure peak memory and seconds as the number of clients grows.

    python scripts/bench_scale.py [rounds partitions million] [--threads 2]
        [--data DIR] [--write FILE]

Every line of the tables is measured in a separate process. The parts are:

- rounds: W1 of bench_rounds.py (Fashion-MNIST) with 100, 1,000 and 60,000 clients, 20
  per round.
- partitions: a partition of 10,000,000 labels among 1,000,000 clients. It is built and
  saved, and 1,000 clients are sampled 10 times.
- million: 10 rounds on the synthetic data, with 1,000 of 1,000,000 clients per round.

Memory is the peak that the operating system reports when the process ends (ru_maxrss).
The script prints Markdown tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import alternate
from bench_rounds import WORKLOADS

N, SAMPLES, COHORT = 1_000_000, 10_000_000, 1_000
W1 = [
    "dataset=fashion_mnist",
    "local.lr=0.05",
    *(o for o in WORKLOADS["W1"] if not o.startswith("clients=")),
]
MILLION = [
    "dataset=synthetic", f"dataset.samples={SAMPLES}", "partition=iid",
    f"clients={N}", f"clients_per_round={COHORT}",
    "rounds=10", "model=mlp", "local.batch_size=10", "memo.enabled=false",
]  # fmt: skip


# On Linux, the peak memory of a new process starts at the peak of its parent process.
# This code is therefore run as a small parent process, which starts the measured
# process
MEASURED = """import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(f"\\n{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
sys.exit(code != 0)"""


def child(arguments: list[str]) -> tuple[str, float, float]:
    """Run ``python *arguments``.

    Returns:
        Output of the process, seconds, and peak memory in MB.
    """
    began = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, sys.executable, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )

    seconds = time.perf_counter() - began
    text, _, peak = done.stdout.rstrip("\n").rpartition("\n")
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}\n{text}")
    return text, seconds, int(peak) * (1 if sys.platform == "darwin" else 1024) / 1e6


def run(overrides: list[str]) -> tuple[dict[str, float], float, float]:
    """Run fedexp in a separate process.

    Returns:
        Seconds by phase (`round` is the median over rounds, without evaluation),
        seconds of the whole process, and peak memory of the process in MB.
    """
    with tempfile.TemporaryDirectory() as outputs:
        _, seconds, peak = child(["-m", "fedexp", *overrides, f"output_root={outputs}"])
        (folder,) = Path(outputs).glob("runs/*/*")
        phases = json.loads((folder / "result.json").read_text())["seconds"]
        rows = [
            json.loads(line)["seconds"]
            for line in (folder / "timing.jsonl").read_text().splitlines()
        ]
    phases["round"] = statistics.median(sum(row.values()) - row["evaluate"] for row in rows)
    return phases, seconds, peak


def rounds(threads: int, data: str) -> Iterator[str]:
    yield "| W1, 20 clients per round | clients | s/round | peak MB | against 100 clients |"
    yield "|---|---|---|---|---|"

    for method, more in (("fedavg", []), ("scaffold", ["state.memory_gb=0.05"])):
        first = None
        for clients in (100, 1_000, 60_000):
            off = ["rounds=30", "eval.every=1000000", "checkpoint.every=off", "memo.enabled=false"]
            overrides = [*W1, *off, *more, f"method={method}", f"clients={clients}"]

            phases, _, peak = run([*overrides, f"threads={threads}", f"data_root={data}"])
            first = first or peak
            yield (
                f"| {' '.join([method, *more])} | {clients:,} | {phases['round']:.3f} "
                f"| {peak:.0f} | {peak / first:.2f} |"
            )


def partitions(threads: int, data: str) -> Iterator[str]:
    yield (
        f"| {N:,} clients, {SAMPLES:,} labels | build s | save s | 10 x sample {COHORT:,} s "
        "| peak MB |"
    )
    yield "|---|---|---|---|---|"
    for name in ("iid", "dirichlet_per_client"):
        text, _, peak = child([__file__, "--worker", name])
        build, save, draw = json.loads(text.splitlines()[-1])
        yield f"| {name} | {build:.1f} | {save:.1f} | {draw:.3f} | {peak:.0f} |"


def partition_seconds(name: str) -> list[float]:
    """Return the seconds of building a partition, saving it, and sampling clients."""
    import numpy as np

    from fedexp.config.compose import compose
    from fedexp.core.build import build
    from fedexp.core.env import Sampling
    from fedexp.data.partition import Partitioner, save_partition

    partitioner = build(Partitioner, compose([f"partition={name}"])["partition"], "partition")  # type: ignore[type-abstract]
    labels = np.arange(SAMPLES) % 10
    times = [time.perf_counter()]
    partition = partitioner.split(labels, 10, N, np.random.RandomState(0))
    times.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        save_partition(partition, Path(folder) / "partition.safetensors")

    times.append(time.perf_counter())
    for round in range(10):
        Sampling("fixed", COHORT).draw(N, 0, round)
    times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def million(threads: int, data: str) -> Iterator[str]:
    yield (
        f"| 10 rounds, {COHORT:,} of {N:,} clients | set-up s | s/round | whole process s "
        "| peak MB |"
    )
    yield "|---|---|---|---|---|"

    for more in (
        ["method=fedavg"],
        ["method=scaffold"],
        ["method=scaffold", "state.memory_gb=0.01"],
    ):
        phases, seconds, peak = run([*MILLION, *more, f"threads={threads}"])
        yield (
            f"| {' '.join(more)} | {phases['setup']:.1f} | {phases['round']:.2f} "
            f"| {seconds:.1f} | {peak:.0f} |"
        )


PARTS = {"rounds": rounds, "partitions": partitions, "million": million}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="|".join(PARTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default=os.environ.get("FEDEXP_DATA", "data"))
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    parser.add_argument("--worker", metavar="PARTITION", help=argparse.SUPPRESS)

    options = parser.parse_args()
    if options.worker:
        print(json.dumps(partition_seconds(options.worker)))
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")

    facts = (
        f"{options.threads} threads, load average {os.getloadavg()[0]:.1f} before; "
        "every line is a separate process"
    )
    document = alternate.Document(options.write, alternate.heading(facts))
    for part in options.parts:
        document.line("")
        for line in PARTS[part](options.threads, options.data):
            document.line(line)


if __name__ == "__main__":
    main()
