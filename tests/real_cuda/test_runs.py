"""Properties of runs on a GPU: bits, resumption, synchronisations, memory and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fedexp.core.errors import ConfigError
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.client_states import StoredClientStates
from tests.real_cuda.count import per_step
from tests.real_cuda.runs import bits, count_synchronisations, distance, needs_gpu, run
from tests.simulated_cuda.cases import CASES

pytestmark = needs_gpu
_MANY = [
    *("clients=16", "rounds=1", "partition=iid", "local.steps=2"),
    *("model=mlp_784_200", "model.hidden=[50000]", "engine=vectorized", "engine.stack=16"),
]


@pytest.mark.parametrize("name", CASES)
def test_deterministic_run_repeats_with_the_same_bits(tmp_path: Path, name: str) -> None:
    overrides = [*CASES[name].run()[0], "deterministic=true"]

    first, second = (run(tmp_path / folder, overrides) for folder in ("first", "second"))

    assert bits(first) == bits(second)


@pytest.mark.parametrize("name", ["scaffold", "fedcda", "dense", "cnn"])
def test_interrupted_run_resumes_with_the_same_bits(tmp_path: Path, name: str) -> None:
    overrides = [*CASES[name].run()[0], "deterministic=true", "checkpoint.every=1"]
    save = Checkpoint.save
    saved: list[bool] = []

    def save_then_stop(self: Checkpoint, *args: Any) -> None:
        save(self, *args)
        saved.append(True)
        if len(saved) == 2:
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole", overrides)
    with (
        patch.object(Checkpoint, "save", save_then_stop),
        pytest.raises(KeyboardInterrupt),
    ):
        run(tmp_path / "interrupted", overrides)
    resumed = run(tmp_path / "interrupted", overrides)

    assert resumed["attempts"] == 2
    assert bits(resumed) == bits(whole)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ceiling is not None])
def test_a_local_step_never_waits_for_the_gpu(tmp_path: Path, name: str) -> None:
    # A whole run waits for the GPU, so the count works.
    assert count_synchronisations(tmp_path, CASES[name].run()[0]) > 0

    assert per_step(CASES[name], count_synchronisations) == 0


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_changes_the_models_a_little(tmp_path: Path, precision: str) -> None:
    overrides = CASES["fedavg vmap"].run()[0]

    exact = run(tmp_path / "exact", overrides)
    lower = run(tmp_path / "lower", [*overrides, f"precision={precision}"])

    assert 0 < distance(lower, exact) < 0.01


def test_workers_compute_what_one_process_computes(tmp_path: Path) -> None:
    overrides = [*CASES["fedavg serial"].run()[0], "deterministic=true"]
    workers = ["engine=workers", "engine.workers=2"]

    one = run(tmp_path / "one", overrides, "cuda:0")
    many = run(tmp_path / "many", [*overrides, *workers], "cuda:0")

    assert bits(many) == bits(one)


def test_states_in_files_change_no_bit(tmp_path: Path) -> None:
    overrides = [*CASES["scaffold"].run()[0], "deterministic=true"]

    spill = StoredClientStates.spill
    held: list[int] = []

    def spill_and_measure(self: StoredClientStates) -> None:
        spill(self)
        held.append(self.bytes)

    with patch.object(StoredClientStates, "spill", spill_and_measure):
        memory = run(tmp_path / "memory", overrides)
        in_memory = held.copy()
        held.clear()
        files = run(tmp_path / "files", [*overrides, "state.memory_gb=0.00001"])

    assert max(held) == 0 < max(in_memory)
    assert bits(files) == bits(memory)


def test_lack_of_memory_leads_to_smaller_stacks(tmp_path: Path) -> None:
    ample = run(tmp_path / "ample", _MANY)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.5 * ample["peak_memory"]["gpu"] / total)
    try:
        scarce = run(tmp_path / "scarce", _MANY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert scarce["peak_memory"]["gpu"] < ample["peak_memory"]["gpu"]
    assert distance(scarce, ample) < 1e-5


def test_the_first_gpu_has_two_names(tmp_path: Path) -> None:
    overrides = [*CASES["fedavg"].run()[0], "deterministic=true"]

    without, first = (run(tmp_path / name, overrides, name) for name in ("cuda", "cuda:0"))

    assert bits(without) == bits(first)


def test_an_absent_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device 'cuda:99' cannot be used"):
        run(tmp_path, CASES["fedavg"].run()[0], "cuda:99")
