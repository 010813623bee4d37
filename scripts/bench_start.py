"""Measure start-up and concurrency of the `fedexp` command on workload W1.

    python scripts/bench_start.py [--repeats 5] [--rounds 300] [--engine serial]
        [--write FILE]

W1 is a workload of bench_rounds.py on Fashion-MNIST.

1. The time from the start of a process to the end of round 1 (the moment at which the
   round's line is printed) is compared with the same time of the bare loop
   (bare_loop.py) with one round. Processes of both alternate, and files are in the page
   cache. The time of `fedexp --help` is measured until the process exits.
2. Two jobs of one sweep run at the same time (joblib, n_jobs=2). Each job is compared
   with the same job when it is the only one and has threads=1. The numbers are median
   seconds per round from timing.jsonl, without evaluation.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import alternate
import yaml

W1 = [
    "dataset=fashion_mnist",
    "model=mlp_784_200",
    "partition=iid",
    "clients=1000",
    "clients_per_round=20",
]
W1 += ["local.batch_size=20", "local.lr=0.05"]
SEEDS = (0, 1)


def command() -> list[str]:
    """Return the command line of fedexp: the installed script, or else the module."""
    script = Path(sys.executable).with_name("fedexp")
    return [str(script)] if script.exists() else [sys.executable, "-m", "fedexp"]


def seconds_until(line: str, arguments: list[str]) -> float:
    """Return the seconds from the process's start until it prints a line.

    Args:
        line: Beginning of the line. The time until the process ends is not measured.
        arguments: Command of the process.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=alternate.variables(),
    ) as running:
        output = []
        for printed in running.stdout:
            if printed.startswith(line):
                seconds = time.perf_counter() - began
                running.stdout.read()
                return seconds
            output.append(printed)
    sys.exit(f"{' '.join(arguments)} ended without '{line}'\n{''.join(output)}")


def first_round(options: Namespace) -> tuple[float, float]:
    """Return the seconds to the end of round 1 of the bare loop and of fedexp."""
    threads = str(options.threads)
    loop = [
        sys.executable,
        str(alternate.HERE / "bare_loop.py"),
        options.data,
        "W1",
        "--threads",
        threads,
    ]

    bare = seconds_until("{", [*loop, "--rounds", "1"])
    with tempfile.TemporaryDirectory() as outputs:
        more = [
            "rounds=1",
            f"threads={threads}",
            f"data_root={options.data}",
            f"output_root={outputs}",
        ]
        mine = seconds_until(
            "round 1/1", [*command(), *W1, *more, *alternate.chosen(options.engine)]
        )
    return bare, mine


def help_seconds() -> float:
    began = time.perf_counter()
    subprocess.run(
        [*command(), "--help"], stdout=subprocess.DEVNULL, check=True, env=alternate.variables()
    )
    return time.perf_counter() - began


def round_seconds(options: Namespace, *more: str) -> dict[int, float]:
    """Return the median seconds per round of each job of a command line, by its seed.

    The first round of each job is left out.
    """
    from fedexp.storage.files import read_jsonl

    with tempfile.TemporaryDirectory() as outputs:
        fixed = [
            f"rounds={options.rounds}",
            "eval.every=1000000",
            "checkpoint.every=off",
            "memo.enabled=false",
        ]
        fixed += [
            f"data_root={options.data}",
            f"output_root={outputs}",
            *alternate.chosen(options.engine),
        ]

        done = subprocess.run(
            [*command(), *more, *W1, *fixed],
            capture_output=True,
            text=True,
            check=False,
            env=alternate.variables(),
        )
        if done.returncode:
            sys.exit(f"{' '.join(done.args)}\n{done.stdout}{done.stderr}")

        found = {}
        for config in Path(outputs).glob("runs/*/*/config.yaml"):
            rows = read_jsonl(config.with_name("timing.jsonl"))[1:]
            seconds = [
                sum(v for phase, v in row["seconds"].items() if phase != "evaluate") for row in rows
            ]
            found[yaml.safe_load(config.read_text())["seed"]] = statistics.median(seconds)
    return found


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rounds",
        type=alternate.several,
        default=300,
        help="rounds of the concurrent jobs, about ten seconds",
    )
    parser.add_argument("--engine", default="serial", metavar="ENGINE[,OVERRIDE...]")

    options = parser.parse_args()

    facts = f"engine {options.engine}, medians of {options.repeats} alternating repeats"
    columns = ["what", "reference s", "fedexp s", "ratio (median of pairs)", "min", "max"]
    table = alternate.Table(options.write, alternate.heading(facts), columns)

    def row(what: str, pairs: list[tuple[float, float]]) -> None:
        ratios = [mine / reference for reference, mine in pairs]
        middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
        figures = [
            *(f"{value:.3f}" for value in middle),
            *(f"{f(ratios):.2f}" for f in (statistics.median, min, max)),
        ]
        table.row([what, *figures])

    first_round(options)  # brings files into the page cache
    row(
        f"W1, process start to the end of round 1 ({options.threads} threads; "
        "reference: bare loop)",
        [first_round(options) for _ in range(options.repeats)],
    )
    table.row(
        [
            "`fedexp --help`",
            "",
            f"{statistics.median(help_seconds() for _ in range(options.repeats)):.3f}",
            "",
            "",
            "",
        ]
    )

    joint: dict[int, list[tuple[float, float]]] = {seed: [] for seed in SEEDS}
    for _ in range(options.repeats):
        alone = {seed: round_seconds(options, "threads=1", f"seed={seed}")[seed] for seed in SEEDS}
        both = [
            "-m",
            "hydra/launcher=joblib",
            "hydra.launcher.n_jobs=2",
            f"seed={','.join(map(str, SEEDS))}",
        ]
        together = round_seconds(options, *both)
        for seed in SEEDS:
            joint[seed].append((alone[seed], together[seed]))

    for seed in SEEDS:
        row(
            f"W1, s/round, seed={seed} beside the sweep's other job "
            "(reference: running alone, threads=1)",
            joint[seed],
        )


if __name__ == "__main__":
    main()
