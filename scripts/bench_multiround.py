"""Measure the cost of the multi-round methods, compared with bare loops.

    python scripts/bench_multiround.py [CASE ...] [--threads 1] [--write FILE] [--help]

The cases are:

- `table`: FedCDA's choice of the best of K^m combinations of models (m clients with K
  candidates each), from given inner products.
- `gram`: the inner products of m * K ResNet-18s with each other and with the models
  that the other clients have chosen, in float64. Memory is the peak in addition to the
  candidates.
- `peak`: a run of FedCDA with N clients, compared with a run of FedAvg. In its last
  round, FedCDA chooses among the K stored models of each of m clients. Stored models
  are kept in memory up to --memory-gb in total, and the others on disk. Each run is a
  separate process, and its memory is the peak that the operating system reports when
  the process ends. Models are not trained: they are the start plus noise. The full size
  takes 13.5 GB of disk. With --clients 20 it takes a fifth of that.
- `rounds`: seconds per round of methods on the workloads of bench_rounds.py, without
  momentum. Each method is compared with a bare loop or another method, in alternating
  processes. W1s is W1 with 100 clients, whose states all exist after a few rounds. The
  median is then not affected by the time for the first use of their memory.
- `mix`: FedLAW's mix of m ResNet-18s and the gradient of its scalars x and z, compared
  with two products with the matrix of the models.
- `teachers`: the server's part of a FedDF round with fixed proxy samples, and how often
  a teacher processes a sample.

For `table`, `gram` and `mix`, a time is that of the fastest call. `gram` and `mix` make
--repeats calls. `table` makes ten times as many. For `rounds`, a time is a median over
--repeats pairs of processes. `peak` and `teachers` measure once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import alternate
import bench_rounds
from bench_scale import child

from fedexp.config.compose import compose
from fedexp.core.data import FederatedData, Samples
from fedexp.core.engine import Engine
from fedexp.core.env import Sampling
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.net import Net
from fedexp.core.runner import Snapshot, run
from fedexp.core.seeds import numpy_generator, torch_generator
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.methods import feddf
from fedexp.methods.fedcda import Selection, products
from fedexp.methods.fedlaw import FedLAW
from fedexp.running.experiment import Experiment
from fedexp.running.peak_memory import peak_memory, reset_peak
from fedexp.storage.checkpoint import Checkpoint

CPU = torch.device("cpu")
NET = {"_target_": "fedexp.models.resnet.ResNet"}


def measured(call: Callable[[], Any], repeats: int) -> tuple[float, float, Any]:
    """Call `call` and measure it.

    Returns:
        Seconds of the fastest call, peak memory minus the memory before the call in MB,
        and the return value of `call`.
    """
    best, most, value = float("inf"), 0.0, None
    for _ in range(repeats):
        reset_peak(CPU)
        before = peak_memory(CPU)["ram"]
        began = time.perf_counter()
        value = call()
        best = min(best, time.perf_counter() - began)
        most = max(most, (peak_memory(CPU)["ram"] - before) / 1e6)
    return best, most, value


def bench_table(options: argparse.Namespace) -> Iterator[str]:
    m, K = options.clients_per_round, options.models
    rng = numpy_generator("bench", "table")
    vectors = rng.normal(size=(m * K + 2, 200))
    problem = Selection(vectors @ vectors.T, rng.random(m * K), (K,) * m, 2 * m, 1.0, 4e3, 1.0)

    cases = (
        (1, f"{K}^{m} = {K**m:,} combinations", "bound 10 ms"),
        (3, f"{m} clients in three groups", ""),
    )

    for groups, what, bound in cases:
        order = np.array_split(np.arange(m), groups)
        seconds, memory, _ = measured(
            lambda order=order: problem.choose(order), 10 * options.repeats
        )
        yield f"| FedCDA, {what} | {1e3 * seconds:.2f} ms | {memory:,.0f} | {bound} |"


def network(classes: int) -> Weights:
    return Weights.init(ModelSpec.of(NET, (3, 32, 32), classes), 0, CPU, torch.float32)


def noisy(tree: Tree, *names: object) -> Tree:
    generator = torch_generator("bench", *names)
    return {
        k: torch.randn(v.shape, generator=generator).mul_(0.01).add_(v) for k, v in tree.items()
    }


def bench_gram(options: argparse.Namespace) -> Iterator[str]:
    start = network(100).params
    count = options.clients_per_round * options.models
    candidates = [noisy(start, number).__getitem__ for number in range(count)]
    fixed = {k: v.double() * 90 for k, v in start.items()}
    seconds, memory, _ = measured(lambda: products(candidates, start, fixed, 90), options.repeats)
    D = sum(value.numel() for value in start.values())
    said = "bounds 4 s on one core, 200 MB"
    yield f"| FedCDA, Gram matrix of {count} x {D:,} | {seconds:.2f} s | {memory:,.0f} | {said} |"


class InTurn(Sampling):
    """A sampling in which the clients take turns."""

    def draw(self, N: int, seed: int, round: int) -> list[int]:
        return sorted((round * int(self.m) + place) % N for place in range(int(self.m)))


@dataclass(frozen=True)
class Noise(Engine):
    """An engine that returns the start plus noise instead of a trained model."""

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        for job in jobs:
            weights = Weights(job.start.spec, noisy(job.start.params, job.seed), job.start.buffers)
            loss = 1 / (2 + job.round)
            yield ClientResult(
                job.client, weights, 1, 1, {}, None, {"loss": loss, "loss_last_epoch": loss}
            )


def worker(method: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Run `method` until every client has K models, and then one more round.

    Returns:
        Seconds of the aggregation in the last round, and GB on disk.
    """
    N, m = options.clients, options.clients_per_round
    filling = -(-N * options.models // m)
    more = (
        [f"aggregator.K={options.models}", f"aggregator.warm_up={filling}"]
        if method == "fedcda"
        else []
    )
    shape = [f"clients={N}", f"clients_per_round={m}", f"rounds={filling + 1}", "partition=iid"]

    experiment = Experiment.of(
        compose([f"method={method}", "dataset=digits", "model=resnet18_gn", *shape, *more])
    )

    data = experiment.load(CPU)

    checkpoint = Checkpoint(folder, CPU, options.memory_gb)
    env = replace(experiment.env(data, CPU), models=checkpoint.models, sampling=InTurn("fixed", m))

    seconds = 0.0
    start = Snapshot(0, experiment.aggregator.init(env), checkpoint.client_states)
    for step in run(experiment.aggregator, env, Noise(), data, start):
        seconds = step.seconds["aggregate"]
    return {
        "seconds": seconds,
        "gb": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9,
    }


def bench_peak(options: argparse.Namespace) -> Iterator[str]:
    first = 0.0
    size = [f"--clients={options.clients}", f"--clients-per-round={options.clients_per_round}"]
    size += [
        f"--models={options.models}",
        f"--memory-gb={options.memory_gb}",
        f"--threads={options.threads}",
    ]

    for method in ("fedavg", "fedcda"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            text, _, peak = child([__file__, *size, f"--folder={folder}", f"--worker={method}"])

        row = json.loads(text.splitlines()[-1])
        first = first or peak
        what = f"{method}, {options.clients} clients, ResNet-18, {row['gb']:.2f} GB on disk"
        yield (
            f"| {what} | {row['seconds']:.2f} s | {peak:,.0f} in all "
            f"| {peak - first:+,.0f}, bound +1,500 |"
        )


@dataclass(frozen=True)
class Pair:
    """Two sides of a comparison in `rounds`.

    Args:
        workload: Workload on which both sides run.
        method: The measured method.
        beside: The other side: a method, or ``bare`` and the name of a bare loop's
            method.
        most: Upper bound of the ratio of their times, method to other side.
        engine: Engine that the method uses.
        threads: Number of threads. If None, that of --threads.
    """

    workload: str
    method: str
    beside: str
    most: float
    engine: str = "vectorized"
    threads: int | None = None


WORKLOADS = {
    **bench_rounds.WORKLOADS,
    "W1s": [*bench_rounds.WORKLOADS["W1"], "clients=100", "limit.train=6000"],
}
ROUNDS = {**bench_rounds.ROUNDS, "W1s": 30}
PAIRS = [
    *(Pair("W1", method, "bare fedsam", 0.55) for method in ("fedsam", "mofedsam")),
    *(Pair("W2", method, "bare fedsam", 0.72) for method in ("fedsam", "mofedsam")),
    *(Pair(w, "fedcm", "fedavg", 1.15) for w in ("W1", "W2")),
    *(Pair(w, "feddyn", "fedavg", most) for w, most in (("W1", 1.4), ("W1s", 1.4), ("W2", 1.15))),
    *(
        Pair(w, "fedmrur", "mofedsam", 1.35, engine)
        for w in ("W1", "W2")
        for engine in ("vectorized", "serial")
    ),
    Pair("W4", "fedavg", "bare fedavg", 1.05, "auto", threads=2),
]  # fmt: skip


def bench_rounds(options: argparse.Namespace) -> Iterator[str]:
    for pair in PAIRS:
        if options.only in (None, pair.workload, pair.method):
            yield _paired(pair, options)


def _paired(pair: Pair, options: argparse.Namespace) -> str:
    rounds, threads = options.rounds or ROUNDS[pair.workload], pair.threads or options.threads

    def seconds(method: str) -> float:
        if method.startswith("bare "):
            more = ["--method", method.removeprefix("bare "), "--momentum", "0"]
            said = alternate.bare(options.data, pair.workload, threads, rounds, *more)
        else:
            more = [
                f"method={method}",
                f"engine={pair.engine}",
                "local.momentum=0",
                "aggregator.weights=uniform",
            ]
            said = alternate.fedexp(options.data, threads, rounds, *WORKLOADS[pair.workload], *more)

        steps.add(tuple(said["steps"]))
        return statistics.median(said["seconds"][1:])

    steps: set[tuple[int, ...]] = set()
    times = [(seconds(pair.beside), seconds(pair.method)) for _ in range(options.repeats)]
    if len(steps) > 1:
        raise SystemExit(f"{pair.workload} {pair.method}: steps per round differ: {steps}")

    ratio = statistics.median(mine / other for other, mine in times)
    other, mine = map(statistics.median, zip(*times, strict=True))
    what = f"{pair.workload}, {pair.method} ({pair.engine}) beside {pair.beside}"
    what += f", {pair.threads} threads" if pair.threads else ""
    return (
        f"| {what} | {mine:.4f} s beside {other:.4f} s per round | "
        f"| ratio {ratio:.2f}, bound {pair.most} |"
    )


def bench_mix(options: argparse.Namespace) -> Iterator[str]:
    start = network(100).params
    m, D = options.clients_per_round, sum(value.numel() for value in start.values())
    models = torch.randn(m, D, generator=torch_generator("bench", "mix"))
    scalars, q, shares = (
        {"x": torch.zeros(m), "z": torch.zeros(())},
        models[0].clone(),
        torch.full((m,), 1 / m),
    )

    law = FedLAW()
    bare, _, _ = measured(lambda: (shares @ models, models @ q), options.repeats)
    mine, memory, _ = measured(
        lambda: (law.mixed(scalars, models), law.gradients(scalars, models, q)), options.repeats
    )

    what = f"FedLAW, mix of {m} x {D:,} and gradient of x and z"
    yield f"| {what} | {mine:.4f} s beside {bare:.4f} s | {memory:,.0f} | ratio {mine / bare:.2f} |"


def bench_teachers(options: argparse.Namespace) -> Iterator[str]:
    shape = [
        f"clients={options.clients_per_round}",
        "partition=iid",
        "rounds=1",
        "model=mlp_784_200",
    ]
    experiment = Experiment.of(
        compose(["method=feddf", "dataset=fashion_mnist", f"data_root={options.data}", *shape])
    )

    data = experiment.load(CPU)
    env, asked, logits_of = experiment.env(data, CPU), [0], feddf.logits_of

    def counted(net: Net, weights: Weights, samples: Samples) -> torch.Tensor:
        asked[0] += len(samples)
        return logits_of(net, weights, samples)

    feddf.logits_of = counted
    seconds = 0.0
    start = Snapshot(0, experiment.aggregator.init(env), {})
    for step in run(experiment.aggregator, env, Noise(), data, start):
        seconds += step.seconds["aggregate"]
    feddf.logits_of = logits_of

    assert env.proxy is not None
    n, m = len(env.proxy), options.clients_per_round
    said = f"a teacher processes a sample {asked[0] / n / m:g} times, bound 1"
    yield (
        f"| FedDF, {m} teachers, {n:,} proxy samples, server's part of a round "
        f"| {seconds:.2f} s | | {said} |"
    )


CASES = {
    "table": bench_table,
    "gram": bench_gram,
    "peak": bench_peak,
    "rounds": bench_rounds,
    "mix": bench_mix,
    "teachers": bench_teachers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)"
    )

    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100, help="N of peak")
    parser.add_argument("--clients-per-round", type=int, default=10, help="m")
    parser.add_argument("--models", type=int, default=3, help="K")
    parser.add_argument("--memory-gb", type=float, default=0.1, help="state.memory_gb of peak")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder of peak, on the disk to measure",
    )
    parser.add_argument(
        "--data",
        type=alternate.absolute,
        default=os.environ.get("FEDEXP_DATA", "data"),
        help="folder that contains FashionMNIST/raw, unpacked",
    )
    parser.add_argument("--only", help="only this workload or method of rounds")
    parser.add_argument(
        "--rounds", type=alternate.several, help="rounds of every process of the case rounds"
    )
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)

    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(worker(options.worker, options, options.folder)))
        return

    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}: choose from {', '.join(CASES)}")

    facts = alternate.heading(f"{options.threads} threads")
    heading = f"# Multi-round methods\n\n{facts}. `scripts/bench_multiround.py`."
    table = alternate.Table(options.write, heading, ["what", "time", "memory, MB", ""])

    for case in options.cases or CASES:
        for row in CASES[case](options):
            table.line(row)


if __name__ == "__main__":
    main()
