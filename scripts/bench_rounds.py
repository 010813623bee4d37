"""Compare the seconds per round of fedexp's engines with the bare loop.

    python scripts/bench_rounds.py [W1 W1u W2 W3 W4]
        [--methods fedavg fedprox scaffold] [--engines serial auto ...]
        [--device cpu|cuda]
    python scripts/bench_rounds.py --against CHECKOUT [...]

The bare loop is bare_loop.py. The second form compares this checkout with a checkout of
another commit instead. All runs are on Fashion-MNIST. Processes of the two sides
alternate strictly. A pair consists of a process of the bare loop or the other commit,
and a process of this checkout. A ratio is computed for each pair. An engine is given by
its name with optional overrides after commas: vectorized,engine.stack=5. The first
round of every process is left out, and so is the time in which engine=auto chooses an
engine before it. Both sides must take the same number of local steps. W1u is W1 with a
Dirichlet(0.1) partition, which is the same on both sides.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import alternate
from scipy.stats import quantile_test

ROUNDS = {"W1": 30, "W1u": 30, "W2": 5, "W3": 7, "W4": 4}
W1 = ["model=mlp_784_200", "clients=1000", "clients_per_round=20", "local.batch_size=20"]
UNEQUAL = [
    "partition=dirichlet",
    "partition.alpha=0.1",
    "partition.gated=false",
    "partition.on_small=allow",
]
WORKLOADS = {
    "W1": [*W1, "partition=iid"],
    "W1u": [*W1, *UNEQUAL],
    "W2": [
        *("partition=iid", "model=mlp_784_400_200_100", "model.bias=true"),
        *("clients=10", "local.batch_size=64", "local.momentum=0.5"),
    ],
    "W3": [
        *("partition=iid", "model=cnn_mcmahan", "limit.train=10000"),
        *("clients=100", "clients_per_round=10", "local.batch_size=10"),
    ],
    "W4": [
        "partition=iid",
        "model=resnet18_gn",
        "limit.train=400",
        "clients=10",
        "local.batch_size=20",
    ],
}
METHODS = {
    "fedavg": ["method=fedavg"],
    "fedprox": ["method=fedprox", "trainer.mu=0.1"],
    # No momentum: with it, SCAFFOLD's corrected gradients make training diverge
    "scaffold": ["method=scaffold", "local.momentum=0"],
}


def write_split(overrides: list[str], data: str, rounds: int, folder: Path) -> None:
    """Write fedexp's partition and each round's participants, for the bare loop."""
    import torch

    from fedexp.config.compose import compose
    from fedexp.data.partition import save_partition
    from fedexp.running.experiment import Experiment

    experiment = Experiment.of(compose([*overrides, "dataset=fashion_mnist", f"data_root={data}"]))
    loaded = experiment.load(torch.device("cpu"))
    env = experiment.env(loaded, torch.device("cpu"))

    save_partition(loaded.partition, folder / "partition.safetensors")
    (folder / "cohorts.json").write_text(
        json.dumps([env.at(round).sample() for round in range(rounds)])
    )


def pair(
    workload: str, method: str, engine: str, options: Any, split: Path
) -> tuple[float, float, dict[str, Any]]:
    """Measure one pair of processes.

    Returns:
        Median seconds per round of the other side, those of this checkout, and
        everything that this checkout's process reported.
    """
    rounds = options.rounds or ROUNDS[workload]
    overrides = [*WORKLOADS[workload], *METHODS[method], *alternate.chosen(engine)]
    common = (options.data, options.threads, rounds, *overrides)

    if options.against:
        other = alternate.fedexp(*common, home=options.against, device=options.device)
    else:
        more = ["--method", method]
        more += ["--split", str(split)] if workload == "W1u" else []
        other = alternate.bare(
            options.data, workload[:2], options.threads, rounds, *more, device=options.device
        )
    mine = alternate.fedexp(*common, device=options.device)

    if other["steps"] != mine["steps"]:
        raise SystemExit(
            f"{workload} {method} {engine}: steps per round differ: "
            f"{other['steps']}, {mine['steps']}"
        )
    return statistics.median(other["seconds"][1:]), statistics.median(mine["seconds"][1:]), mine


def interval(ratios: list[float]) -> str:
    """Return the 95 % confidence interval of the median, from order statistics.

    If there are too few pairs, an end of the interval is nan (unbounded).
    """
    median = statistics.median(ratios)
    low, high = quantile_test(ratios, q=median, p=0.5).confidence_interval(0.95)
    return f"{low:.3f} to {high:.3f}"


def computing(engine: dict[str, Any]) -> str:
    """Return a short name of the engine that a run recorded in its numerics.json."""
    settings = [f"{key}={value}" for key, value in engine.items() if key != "_target_"]
    return " ".join([engine["_target_"].rpartition(".")[2].lower(), *settings])


def main() -> None:
    parser = alternate.parser(__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="W1|W1u|W2|W3|W4")
    parser.add_argument("--methods", nargs="+", default=["fedavg"], choices=METHODS)
    parser.add_argument(
        "--engines", nargs="+", default=alternate.ENGINES, metavar="ENGINE[,OVERRIDE...]"
    )
    parser.add_argument("--pairs", type=int, default=5)
    alternate.add_device(parser)
    parser.add_argument(
        "--against",
        type=lambda path: Path(path).resolve(),
        metavar="CHECKOUT",
        help="compare with a checkout of another commit instead of the bare loop",
    )
    parser.add_argument(
        "--rounds",
        type=alternate.several,
        help="rounds of every process; engine=auto starts workers only for long runs",
    )

    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(
            f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(WORKLOADS)}"
        )
    if options.against and not (options.against / "scripts" / "fedexp_rounds.py").is_file():
        parser.error(f"{options.against} is not a checkout with scripts/fedexp_rounds.py")

    other = f"commit {alternate.commit(options.against)}" if options.against else "bare loop"
    facts = f"{options.threads} threads, {options.pairs} pairs of alternating processes, medians"
    columns = ["workload", "method", "engine", "computed by", "steps per round"]
    columns += [f"{other} s/round", "fedexp s/round", "ratio (median of pairs)"]
    columns += ["95 % interval of the median", "min", "max"]
    table = alternate.Table(options.write, alternate.heading(facts, options.device), columns)

    notes: dict[str, None] = {}

    with tempfile.TemporaryDirectory() as name:
        split = Path(name)
        if "W1u" in options.workloads and not options.against:
            write_split(WORKLOADS["W1u"], options.data, options.rounds or ROUNDS["W1u"], split)

        for workload, method, engine in itertools.product(
            options.workloads, options.methods, options.engines
        ):
            pairs = [pair(workload, method, engine, options, split) for _ in range(options.pairs)]
            ratios = [mine / base for base, mine, _ in pairs]

            used = sorted({computing(run["engine"]) for *_, run in pairs})
            notes |= {
                f"{workload} {method} {engine}: {note}": None
                for *_, run in pairs
                for note in run["notes"]
                if note.startswith("engine")
            }

            table.row(
                [
                    *(workload, method, engine, "; ".join(used)),
                    f"{statistics.mean(pairs[0][2]['steps']):.0f}",
                    f"{statistics.median(base for base, *_ in pairs):.4f}",
                    f"{statistics.median(mine for _, mine, _ in pairs):.4f}",
                    f"{statistics.median(ratios):.3f}",
                    interval(ratios),
                    f"{min(ratios):.3f}",
                    f"{max(ratios):.3f}",
                ]
            )
    for note in ["", *notes] if notes else []:
        table.line(f"- {note}" if note else "")


if __name__ == "__main__":
    main()
