"""Every method computes on a GPU what it computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedexp.core.errors import ConfigError
from tests.real_cuda.runs import distance, needs_gpu, run_with_cpu_noise
from tests.simulated_cuda.matrix import SETTINGS, methods, runs

# Largest relative distance between the models of the two devices. Their sums have
# another order. Optimizers such as Adam divide by gradients that may be tiny, which
# enlarges the difference. In float64 it stays small in spite of this.
MOST = {"float64": 1e-8, "float32": 1e-3}


@needs_gpu
@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", methods())
def test_models_agree_with_the_cpu(
    tmp_path: Path,
    method: str,
    setting: str,
    dtype: str,
    record_property: Callable[[str, object], None],
) -> None:
    overrides = dict(zip(SETTINGS, runs(method), strict=True))[setting][0]
    overrides = [*overrides, f"dtype={dtype}"]
    try:
        on_cpu = run_with_cpu_noise(tmp_path / "cpu", overrides, "cpu")
    except ConfigError:
        assert setting == "CNN"
        pytest.skip(f"{method} refuses networks with convolutions")

    on_gpu = run_with_cpu_noise(tmp_path / "gpu", overrides, "cuda")

    record_property("distance", distance(on_gpu, on_cpu))
    assert on_gpu["peak_memory"]["gpu"] > 0
    assert on_gpu["metrics"].keys() == on_cpu["metrics"].keys()
    assert distance(on_gpu, on_cpu) <= MOST[dtype]
