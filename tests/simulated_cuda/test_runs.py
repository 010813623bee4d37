"""Runs of fedexp on the simulated device: tests of their errors, counts and results."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedexp.config.compose import compose
from fedexp.running.experiment import load_data
from tests.simulated_cuda.cases import CASES, LONG, SHORT, Case
from tests.simulated_cuda.counts import Count
from tests.simulated_cuda.device import CAPACITY
from tests.simulated_cuda.pictures import pictures
from tests.simulated_cuda.processes import record_in_process
from tests.simulated_cuda.runs import ROUND, Recording, Run

LIMIT = 250  # seconds


@pytest.mark.parametrize("name", CASES)
def test_run(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    runs = [case.run()]
    if case.has_same_bits:
        runs.append(case.run(device="cpu"))
    if case.ceiling is not None:
        # These runs reuse the networks that the first run has created.
        runs += [case.run(SHORT), case.run(LONG)]

    recordings = record(tmp_path, runs)

    # The run uses only the second device. It does not even ask for the first device's
    # name.
    assert set(recordings[0].uses) == {1}
    assert recordings[0].stacked_share == case.share
    if case.has_same_bits:
        assert recordings[1].bits == recordings[0].bits
    if case.ceiling is not None:
        step = count_step(case, *recordings[-2:])
        assert step.launches <= case.ceiling
        assert step.syncs == 0


def test_interrupted_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    overrides = [*CASES["scaffold"].run()[0], "rounds=3", "checkpoint.every=1"]
    interrupted = [f"output_root={tmp_path}/interrupted", *overrides]

    whole, _, resumed = record(
        tmp_path,
        [
            (overrides, "cuda:1"),
            (interrupted, "cuda:1", 2),
            (interrupted, "cuda:1"),
        ],
        failing=1,
    )

    assert resumed.result["attempts"] == 2
    assert resumed.bits == whole.bits


def test_lack_of_memory_leads_to_smaller_stacks(tmp_path: Path) -> None:
    overrides = [
        *("clients=8", "rounds=1", "partition=iid", "local.steps=2", "model=mlp_784_200"),
        *("limit.train=200", "limit.test=40", "engine=vectorized", "engine.stack=8"),
    ]

    ample, scarce = (
        record(tmp_path, [(overrides, "cuda:1")], capacity=capacity)[0]
        for capacity in (2_000_000, 1_000_000)
    )

    assert scarce.stacked_share == ample.stacked_share == 1
    assert scarce.rows.total(ROUND).launches > ample.rows.total(ROUND).launches
    assert scarce.bits == ample.bits


@pytest.mark.parametrize("epochs", [1, 2])
def test_share_of_clients_of_different_sizes(tmp_path: Path, epochs: int) -> None:
    batch_size = 16
    overrides = [
        *("clients=4", "rounds=1", "partition=dirichlet", "partition.alpha=5"),
        *("model=cnn_mnist", *pictures(1, 8, 8, 400), "engine=vectorized", "engine.stack=4"),
        *("engine.kernel=vmap", f"local.epochs={epochs}", f"local.batch_size={batch_size}"),
    ]
    data = load_data(compose(overrides))
    sizes = [data.partition.size(client) for client in range(4)]

    (recording,) = record(tmp_path, [(overrides, "cuda")])

    assert len(set(sizes)) > 1
    assert recording.stacked_share == round(stacked_share(sizes, batch_size, epochs), 4)


def stacked_share(sizes: Sequence[int], batch_size: int, epochs: int) -> float:
    """Return the share of steps that clients take with another client.

    Clients take a step together if they are in the same epoch and their batches have
    the same length.
    """
    schedules = [
        [
            (epoch, min(batch_size, size - start))
            for epoch in range(epochs)
            for start in range(0, size, batch_size)
        ]
        for size in sizes
    ]
    steps = [Counter(step) for step in itertools.zip_longest(*schedules)]
    for step in steps:
        step.pop(None, None)
    stacked = sum(count for step in steps for count in step.values() if count > 1)
    return stacked / sum(map(len, schedules))


def record(
    folder: Path, runs: Sequence[Run], failing: int | None = None, capacity: int = CAPACITY
) -> list[Recording]:
    """Execute runs in a forked process and check that CUDA would refuse nothing.

    Args:
        folder: Folder for the process's files.
        runs: The runs.
        failing: Index of a run that ends with an error.
        capacity: Bytes of memory of the simulated device.
    """
    recordings = record_in_process(folder, runs, LIMIT, capacity)
    for number, recording in enumerate(recordings):
        assert not recording.violations
        assert bool(recording.error) == (number == failing), recording.error
    return recordings


def count_step(case: Case, short: Recording, long: Recording) -> Count:
    """Return the counts of one local step of all clients."""
    difference = long.rows.total(ROUND) - short.rows.total(ROUND)
    return difference * (1 / (case.rounds * (LONG - SHORT)))
