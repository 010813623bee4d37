"""Models and samples on a device can be saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedexp
from fedexp.models.mlp import MLP
from fedexp.storage.client_data import load_client_data
from tests.simulated_cuda.device import simulate


def test_samples_on_a_device_give_the_answers_of_samples_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {"input_shape": (1, 2, 2), "num_classes": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = MLP(**shape, hidden=(4,))
        x, y = torch.randint(256, (6, 1, 2, 2), dtype=torch.uint8), torch.arange(6) % 3
    found = []

    with simulate():
        for place in ("cpu", "cuda:1"):
            states = [{name: value.to(place) for name, value in net.state_dict().items()}]
            fedexp.save_models(
                place.replace(":", ""),
                states,
                {"_target_": "fedexp.models.mlp.MLP", "hidden": [4]},
                **shape,
                mean=[0.5],
                std=[0.5],
                data=[(x.to(place), y.to(place))],
            )
            data = load_client_data(Path(place.replace(":", "")))
            assert data is not None
            found.append(next(iter(data.answers[0].values())))

    on_cpu, on_device = found
    assert all(torch.equal(on_device[name], value) for name, value in on_cpu.items())
