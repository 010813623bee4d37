"""Seconds a round of fedexp against the bare loop, in strictly alternating processes, on Fashion-MNIST.

    python scripts/bench_rounds.py [W1 W2 W3] [--repeats 5] [--threads 2] [--data DIR] [--write FILE]

fedexp runs as a user runs it (`fedexp.run.execute`), with evaluation, checkpoint, logging and memo off; a round is what its
timing.jsonl says, all phases but evaluation. The first round of every process is left out. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROUNDS = {"W1": 30, "W2": 5, "W3": 7}
COMMON = ["method=fedavg", "dataset=fashion_mnist", "partition=iid", "local.lr=0.05"]
WORKLOADS = {
    "W1": ["model=mlp_784_200", "clients=1000", "clients_per_round=20", "local.batch_size=20"],
    "W2": ["model=mlp_784_400_200_100", "model.bias=true", "clients=10", "local.batch_size=64", "local.momentum=0.5"],
    "W3": ["model=cnn_mcmahan", "limit.train=10000", "clients=100", "clients_per_round=10", "local.batch_size=10"],
}
OFF = ["eval.every=1000000", "checkpoint.every=off", "memo.enabled=false", "reuse=false"]


def fedexp_seconds(overrides: list[str], rounds: int) -> list[float]:
    """Seconds of every round of one run in this process."""
    from fedexp.compose import compose
    from fedexp.run import execute
    from fedexp.storage.files import read_jsonl

    with tempfile.TemporaryDirectory() as outputs:
        result = execute(
            compose([*overrides, *OFF, f"rounds={rounds}", f"output_root={outputs}"]), say=lambda text: None
        )
        rows = read_jsonl(Path(result["folder"]) / "timing.jsonl")
    return [sum(v for phase, v in row["seconds"].items() if phase != "evaluate") for row in rows]


def in_process(arguments: list[str]) -> float:
    """Median seconds a round of one process, its first round left out."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="W1|W2|W3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data", default=os.environ.get("FEDEXP_DATA", "data"))
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    parser.add_argument("--worker", metavar="WORKLOAD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        overrides = [*COMMON, *WORKLOADS[options.worker], f"threads={options.threads}", f"data_root={options.data}"]
        print(json.dumps(fedexp_seconds(overrides, ROUNDS[options.worker])))
        return
    from fedexp.storage.environment import environment

    lines = [
        f"{datetime.date.today()}, commit {environment()['commit']}, {platform.machine()}, {os.cpu_count()} cores, "
        f"{options.threads} threads, Python {platform.python_version()}; "
        f"{options.repeats} pairs of alternating processes, medians",
        "",
        "| workload | bare s/round | fedexp serial s/round | ratio (median of pairs) | min | max |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.workloads:
        pairs = []
        for _ in range(options.repeats):
            bare = in_process([str(HERE / "bare_loop.py"), options.data, name, str(options.threads), str(ROUNDS[name])])
            mine = in_process(
                [__file__, "--worker", name, "--threads", str(options.threads), "--data", str(options.data)]
            )
            pairs.append((bare, mine))
        ratios = [mine / bare for bare, mine in pairs]
        lines.append(
            f"| {name} | {statistics.median(b for b, _ in pairs):.4f} | {statistics.median(m for _, m in pairs):.4f} "
            f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )
        print(lines[-1], flush=True)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
