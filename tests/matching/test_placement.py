"""The device on which models are matched."""

from __future__ import annotations

import pytest
import torch

from fedexp.core.weights import Weights
from fedexp.matching import placement
from fedexp.matching.placement import placed
from tests.core.test_jobs import SMALL
from tests.simulated_cuda.device import simulate
from tests.world import CPU


@pytest.mark.parametrize(("limit", "expected"), [(12, "cpu"), (11, "cuda")])
def test_models_without_large_layers_are_matched_on_the_cpu(
    limit: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_SMALL", limit)
    model = Weights.init(SMALL, 0, CPU, torch.float32)
    assert max(value.numel() for value in model.params.values()) == 12
    with simulate() as device:
        there = model.to(torch.device("cuda", 1))
        device.counter.reset()
        (found,) = placed([there])
        assert {value.device.type for value in found.params.values()} == {expected}
        # One copy transfers the parameters and floating-point buffers, and one copy
        # transfers the counts
        assert device.counter.rows().total().syncs == (2 if expected == "cpu" else 0)
    assert all(torch.equal(found.params[name], value) for name, value in model.params.items())
