"""Work of the many-round methods beside bare loops: FedCDA's selection and its memory.

    python scripts/bench_multiround.py [table gram peak] [--threads 1] [--write FILE] [sizes: --help]

`table`: the least of K^m combinations from products that are there. `gram`: the products of m K ResNet-18s and of what the
other clients have chosen, in float64; memory is the peak beyond the candidates. `peak`: a run in which the last round
chooses among K models of m of N clients, all on disk beyond --memory-gb, beside FedAvg; a process each, models that nobody
trained (start and noise), memory as the system says of the process when it ends. At full size it takes 13.5 GB of disk;
--clients 20 a fifth of that. Seconds are the fastest of --repeats.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_scale import child

from fedexp.aggregators.fedcda import Selection, products
from fedexp.config.compose import compose
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.env import Sampling
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.runner import Snapshot, run
from fedexp.core.seeds import numpy_generator, torch_generator
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.running.experiment import Experiment
from fedexp.running.peak_memory import peak_memory, reset_peak
from fedexp.storage.checkpoint import Checkpoint

CPU = torch.device("cpu")
NET = {"_target_": "fedexp.models.resnet.ResNet"}


def measured(call: Callable[[], Any], repeats: int) -> tuple[float, float, Any]:
    """Seconds of the fastest, MB of memory at the peak beyond the beginning, and what `call` returned."""
    best, most, value = float("inf"), 0.0, None
    for _ in range(repeats):
        reset_peak(CPU)
        before = peak_memory(CPU)["ram"]
        began = time.perf_counter()
        value = call()
        best = min(best, time.perf_counter() - began)
        most = max(most, (peak_memory(CPU)["ram"] - before) / 1e6)
    return best, most, value


def bench_table(options: argparse.Namespace) -> list[str]:
    m, K = options.clients_per_round, options.models
    rng = numpy_generator("bench", "table")
    vectors = rng.normal(size=(m * K + 2, 200))
    problem = Selection(vectors @ vectors.T, rng.random(m * K), (K,) * m, 2 * m, 1.0, 4e3, 1.0)
    seconds, memory, _ = measured(lambda: problem.choose([np.arange(m)]), 10 * options.repeats)
    return [f"| FedCDA, {K}^{m} = {K**m:,} combinations | {1e3 * seconds:.1f} ms | {memory:,.0f} | bound 10 ms |"]


def network(classes: int) -> Weights:
    return Weights.init(ModelSpec.of(NET, (3, 32, 32), classes), 0, CPU, torch.float32)


def noisy(tree: Tree, *names: object) -> Tree:
    generator = torch_generator("bench", *names)
    return {k: torch.randn(v.shape, generator=generator).mul_(0.01).add_(v) for k, v in tree.items()}


def bench_gram(options: argparse.Namespace) -> list[str]:
    start = network(100).params
    count = options.clients_per_round * options.models
    candidates = [noisy(start, number) for number in range(count)]
    fixed = {k: v.double() * 90 for k, v in start.items()}
    seconds, memory, _ = measured(lambda: products(candidates, start, fixed, 90), options.repeats)
    D = sum(value.numel() for value in start.values())
    said = "bounds 4 s on one core, 200 MB"
    return [f"| FedCDA, Gram matrix of {count} x {D:,} | {seconds:.2f} s | {memory:,.0f} | {said} |"]


class InTurn(Sampling):
    """Everyone as often as everyone else."""

    def draw(self, N: int, seed: int, round: int) -> list[int]:
        return sorted((round * int(self.m) + place) % N for place in range(int(self.m)))


@dataclass(frozen=True)
class Noise(Engine):
    """The start and noise in place of a trained model."""

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        for job in jobs:
            weights = Weights(job.start.spec, noisy(job.start.params, job.seed), job.start.buffers)
            loss = 1 / (2 + job.round)
            yield ClientResult(job.client, weights, 1, 1, {}, None, {"loss": loss, "loss_last_epoch": loss})


def worker(method: str, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """A run of `method` until everyone has K models and one round more: seconds of that one's aggregation, GB on disk."""
    N, m = options.clients, options.clients_per_round
    filling = -(-N * options.models // m)
    more = [f"aggregator.K={options.models}", f"aggregator.warm_up={filling}"] if method == "fedcda" else []
    shape = [f"clients={N}", f"clients_per_round={m}", f"rounds={filling + 1}", "partition=iid"]
    experiment = Experiment.of(compose([f"method={method}", "dataset=digits", "model=resnet18_gn", *shape, *more]))
    data = experiment.load(CPU)
    checkpoint = Checkpoint(folder, CPU, options.memory_gb)
    env = replace(experiment.env(data, CPU), models=checkpoint.models, sampling=InTurn("fixed", m))
    seconds = 0.0
    start = Snapshot(0, experiment.aggregator.init(env), checkpoint.client_states)
    for step in run(experiment.aggregator, env, Noise(), data, start):
        seconds = step.seconds["aggregate"]
    return {"seconds": seconds, "gb": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e9}


def bench_peak(options: argparse.Namespace) -> list[str]:
    rows, first = [], 0.0
    size = [f"--clients={options.clients}", f"--clients-per-round={options.clients_per_round}"]
    size += [f"--models={options.models}", f"--memory-gb={options.memory_gb}", f"--threads={options.threads}"]
    for method in ("fedavg", "fedcda"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            text, _, peak = child([__file__, *size, f"--folder={folder}", f"--worker={method}"])
        row = json.loads(text.splitlines()[-1])
        first = first or peak
        what = f"{method}, {options.clients} clients, ResNet-18, {row['gb']:.2f} GB on disk"
        rows.append(f"| {what} | {row['seconds']:.2f} s | {peak:,.0f} in all | {peak - first:+,.0f}, bound +1,500 |")
    return rows


CASES = {"table": bench_table, "gram": bench_gram, "peak": bench_peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=100, help="N of peak")
    parser.add_argument("--clients-per-round", type=int, default=10, help="m")
    parser.add_argument("--models", type=int, default=3, help="K")
    parser.add_argument("--memory-gb", type=float, default=0.1, help="state.memory_gb of peak")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="of peak, on the disk to measure"
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
        parser.error(f"no case is called {unknown[0]}: choose of {', '.join(CASES)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    lines = [
        "# Methods of many rounds",
        "",
        f"{datetime.date.today()}, commit {commit.strip()}, {platform.processor() or platform.machine()}, {options.threads} "
        f"threads, torch {torch.__version__}. `scripts/bench_multiround.py`.",
        "",
        "| what | time | memory, MB | |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in options.cases or CASES:
        rows = CASES[case](options)
        print("\n".join(rows), flush=True)
        lines += rows
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
