"""Every method computes on a GPU what it computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedexp.core.errors import ConfigError
from tests.real_cuda.runs import MOST, distance, needs_gpu, run_with_cpu_noise
from tests.simulated_cuda.matrix import SETTINGS, methods, overrides

# Adam divides by gradients that may be tiny, which enlarges rounding errors. On the CPU,
# runs of this method in float32 and float64 differ by 2e-4.
_SENSITIVE = {("feddf_paper", "float32"): 1e-3}
_REFUSAL = "only chains of linear layers can be matched here"


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
    chosen = [*overrides(method, setting), f"dtype={dtype}"]
    try:
        on_cpu = run_with_cpu_noise(tmp_path / "cpu", chosen, "cpu")
    except ConfigError as error:
        if setting == "CNN" and _REFUSAL in str(error):
            pytest.skip(str(error))
        raise

    on_gpu = run_with_cpu_noise(tmp_path / "gpu", chosen, "cuda")

    found = distance(on_gpu, on_cpu)
    record_property("distance", found)
    assert on_gpu["peak_memory"]["gpu"] > 0
    assert on_gpu["metrics"].keys() == on_cpu["metrics"].keys()
    assert found <= _SENSITIVE.get((method, dtype), MOST[dtype])
