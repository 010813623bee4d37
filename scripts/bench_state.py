"""Measure checkpoints of a state larger than memory.

    python scripts/bench_state.py [--clients 100] [--models 3] [--memory-gb 1]
        [--threads 1] [--folder DIR] [--write FILE]

It measures peak memory, bytes and seconds of a method that stores old models.
`tests.reference.keeper.KeepLast` stores the last models of every client. The models are
ResNet-18s with random weights. The clients take turns, 4 per round, and a checkpoint is
saved after every round. Seconds and bytes are those of the last rounds, in which every
new model replaces an older one. The full size takes 14 GB of disk. With --clients 12 it
takes an eighth of that.

For comparison, the tensors that changed (4 models and their mean) are also written
plainly after every checkpoint, in the same process. Each goes to one file, which
replaces the previous file and is flushed to disk. The line of FedAvg is the same
measurement without stored models. A checkpoint hashes its tensors in parallel with
writing, so it needs an idle core. Every line is measured in a separate process. Memory
is the peak that the operating system reports when the process ends. The script prints
Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import alternate
from bench_scale import child

from fedexp.config.compose import compose
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.env import Sampling
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.runner import Snapshot, run
from fedexp.core.stored_weights import tree_of
from fedexp.core.trees import Tree, num_bytes
from fedexp.core.weights import Weights
from fedexp.running.experiment import Experiment
from fedexp.storage.checkpoint import Checkpoint
from tests.reference.keeper import KeepLast

COHORT = 4


class InTurn(Sampling):
    def draw(self, N: int, seed: int, round: int) -> list[int]:
        return sorted((round * COHORT + place) % N for place in range(COHORT))


@dataclass(frozen=True)
class RandomModels(Engine):
    """An engine that returns random weights instead of trained ones."""

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        for job in jobs:
            rng = torch.Generator().manual_seed(job.seed)
            params = {
                name: torch.empty_like(v).normal_(generator=rng)
                for name, v in job.start.params.items()
            }
            weights = Weights(job.start.spec, params, job.start.buffers)
            yield ClientResult(job.client, weights, 1, 1, {}, None, {"loss": 0.0})


def write_plainly(folder: Path, models: Sequence[Tree]) -> float:
    """Write the models one after the other, flushed to disk, and return the seconds."""
    began = time.perf_counter()
    for number, tree in enumerate(models):
        with (folder / str(number)).open("wb") as file:
            for value in tree.values():
                file.write(value.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    return time.perf_counter() - began


def worker(
    kind: str, clients: int, models: int, memory_gb: float, threads: int, folder: Path
) -> dict[str, float]:
    torch.set_num_threads(threads)
    overrides = ["method=fedavg", "dataset=digits", "model=resnet18_gn_cifar"]
    config = compose(
        [
            *overrides,
            f"clients={clients}",
            "partition=iid",
            f"rounds={clients * (models + 1) // COHORT}",
        ]
    )

    experiment = Experiment.of(config)
    data = experiment.load(torch.device("cpu"))
    aggregator = KeepLast(models) if kind == "keeper" else experiment.aggregator

    checkpoint = Checkpoint(folder, torch.device("cpu"), memory_gb)
    env = replace(
        experiment.env(data, torch.device("cpu")),
        models=checkpoint.models,
        sampling=InTurn("fixed", COHORT),
    )

    tensors, plain = folder / "checkpoint" / "tensors", folder / "plain"
    plain.mkdir()
    rows: list[tuple[float, float, int, int]] = []
    there: set[str] = set()

    start = Snapshot(0, aggregator.init(env), checkpoint.client_states)
    for step in run(aggregator, env, RandomModels(), data, start):
        began = time.perf_counter()
        checkpoint.save(step.after, set(), 0)
        seconds = time.perf_counter() - began

        files = {path.name: path.stat().st_size for path in tensors.iterdir()}
        written = sum(size for name, size in files.items() if name not in there)
        written += (folder / "checkpoint" / "manifest.json").stat().st_size
        there = set(files)

        state = step.after.state
        changed = [tree_of(state["weights"])]
        if kind == "keeper":
            changed += [
                tree_of(state["kept"][str(client)][-1].load())
                for client in env.at(step.after.step - 1).sample()
            ]

        rows.append((seconds, write_plainly(plain, changed), written, sum(map(num_bytes, changed))))
        del changed

    ours, theirs, written, needed = zip(*rows[clients * models // COHORT :], strict=True)
    return {
        "rounds": len(rows),
        "gb": sum(path.stat().st_size for path in tensors.iterdir()) / 1e9,
        "mb": statistics.median(written) / 1e6,
        "bytes": max(a / b for a, b in zip(written, needed, strict=True)),
        "ours": statistics.median(ours),
        "plain": statistics.median(theirs),
        "ratio": sum(ours) / sum(theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--models", type=int, default=3, help="number of models per client")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="state.memory_gb")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the disk to measure",
    )
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)

    options = parser.parse_args()
    if options.worker:
        size = options.clients, options.models, options.memory_gb, options.threads, options.folder
        print(json.dumps(worker(options.worker, *size)))
        return
    from fedexp.storage.environment import environment

    heading = (
        f"{datetime.date.today()}, commit {environment()['commit']}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {options.threads} threads, "
        f"state.memory_gb={options.memory_gb:g}, "
        f"load average {os.getloadavg()[0]:.1f} before"
    )
    columns = ["state", "rounds", "GB on disk", "MB per checkpoint"]
    columns += ["of the bytes that changed, at most", "s per checkpoint", "s plainly", "ratio"]
    table = alternate.Table(options.write, heading, [*columns, "peak MB", "above FedAvg"])

    first = None
    for kind in ("fedavg", "keeper"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            shape = [
                f"--clients={options.clients}",
                f"--models={options.models}",
                f"--memory-gb={options.memory_gb}",
            ]
            more = [f"--threads={options.threads}", f"--folder={folder}", f"--worker={kind}"]
            text, _, peak = child([__file__, *shape, *more])

        row = json.loads(text.splitlines()[-1])
        first = first or peak
        name = kind if kind == "fedavg" else f"{options.clients} x {options.models} models"
        table.line(
            f"| {name} | {row['rounds']} | {row['gb']:.2f} | {row['mb']:.1f} "
            f"| {row['bytes']:.4f} | {row['ours']:.3f} | {row['plain']:.3f} "
            f"| {row['ratio']:.2f} | {peak:.0f} | {peak - first:+.0f} |"
        )


if __name__ == "__main__":
    main()
