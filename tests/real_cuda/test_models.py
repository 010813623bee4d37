"""Every network computes on a GPU what it computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedexp.config.folders import conf_dir
from tests.real_cuda.runs import MOST, distance, needs_gpu, run_with_cpu_noise
from tests.simulated_cuda.cases import UNET
from tests.simulated_cuda.matrix import SETTINGS
from tests.simulated_cuda.pictures import pictures

_SMALL = [
    *("dtype=float64", "clients=2", "rounds=1", "partition=iid", "local.steps=2"),
    *("local.batch_size=4", "limit.test=8"),
]
_PICTURES = pictures(3, 32, 32, 40)
# These networks have other inputs or another task.
_OTHER = {
    "cvae": ["task=cvae", *pictures(1, 28, 28, 40)],
    "unet": UNET,
    "cnn_maecho": pictures(1, 28, 28, 40),
    "resnet18_features": [*_PICTURES, "model.random_features=true"],
    "resnet34_features": [*_PICTURES, "model.random_features=true"],
}


def models() -> list[str]:
    """Return the names of all models."""
    return sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))


@needs_gpu
@pytest.mark.parametrize("setting", ["serial", "stack"])
@pytest.mark.parametrize("model", models())
def test_trained_network_agrees_with_the_cpu(tmp_path: Path, model: str, setting: str) -> None:
    overrides = [*_SMALL, *SETTINGS[setting], f"model={model}", *_OTHER.get(model, _PICTURES)]

    on_cpu, on_gpu = (
        run_with_cpu_noise(tmp_path / device, overrides, device) for device in ("cpu", "cuda")
    )

    assert on_gpu["stacked_share"] == (setting == "stack")
    assert distance(on_gpu, on_cpu) <= MOST["float64"]
