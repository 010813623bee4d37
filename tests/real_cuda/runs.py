"""Runs of fedexp on a GPU, and what they are compared by."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedexp.running.execute
from fedexp.config.compose import compose
from fedexp.core.kernel import StepNoise
from fedexp.running.execute import execute
from fedexp.storage.model_folder import MODELS

# Largest relative distance between the models of the two devices. They add numbers in
# different orders, so their results differ by rounding.
MOST = {"float64": 1e-8, "float32": 1e-6}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
# These overrides switch off everything that is not part of the run.
_ALONE = ["memo.enabled=false", "logger=local", "threads=1"]
# These calls of CUDA start a kernel. The profiler reports them.
_LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}


def run(folder: Path, overrides: Sequence[str], device: str = "cuda") -> dict[str, Any]:
    """Execute a run in this process and return the content of ``result.json``."""
    config = compose([*_ALONE, f"output_root={folder}", *overrides, f"device={device}"])
    # Drawing a picture takes longer than a tiny run.
    with patch.object(fedexp.running.execute, "draw_curve", lambda rows, path, title: None):
        result: dict[str, Any] = execute(config, say=None)
    return result


def run_with_cpu_noise(folder: Path, overrides: Sequence[str], device: str) -> dict[str, Any]:
    """Execute a run whose dropout masks and other local noise are drawn on the CPU."""
    draw, generator = StepNoise.__call__, torch.Generator()

    def draw_on_cpu(self: StepNoise, name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(self, name, shape).to(self._device)

    with (
        patch.object(StepNoise, "_generator", generator),
        patch.object(StepNoise, "__call__", draw_on_cpu),
    ):
        return run(folder, overrides, device)


def bits(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the digests of the models and metrics."""
    return result["models_sha256"], result["metrics_sha256"]


def weights(result: dict[str, Any]) -> Tensor:
    """Return the floating-point numbers of the delivered models as one float64 vector."""
    stored = load_file(Path(result["folder"]) / MODELS)
    parts = [value.double().flatten() for value in stored.values() if value.is_floating_point()]
    return torch.cat(parts)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return ``||w_one - w_other|| / ||w_other||`` of the delivered models."""
    a, b = weights(one), weights(other)
    return ((a - b).norm() / b.norm()).item()


def count_synchronisations(folder: Path, overrides: Sequence[str]) -> int:
    """Return how often torch waited for the GPU during a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(folder, overrides)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


def count_launches(folder: Path, overrides: Sequence[str]) -> int:
    """Return how many kernels a run launched."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run(folder, overrides)
        torch.cuda.synchronize()
    return sum(event.name in _LAUNCHES for event in profiler.events())
