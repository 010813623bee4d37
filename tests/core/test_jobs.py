"""Tests of client results: their memory layout and the check for NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedexp.core.jobs import ClientResult
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.ray_wire import SentResult
from tests.world import CPU

SMALL = ModelSpec("tests.core.test_kernel.Small", (("input_shape", (1, 2, 2)), ("num_classes", 3)))


def result_with(payload: torch.Tensor) -> ClientResult:
    return ClientResult(
        0, Weights.init(SMALL, 0, CPU, torch.float32), 1, 1, {"p": {"x": payload}}, None, {}
    )


def test_transposed_tensors_become_contiguous() -> None:
    value = torch.arange(6.0).view(2, 3).T
    result = result_with(value)
    laid = result.in_order()
    assert laid.payload["p"]["x"].is_contiguous() and torch.equal(laid.payload["p"]["x"], value)
    assert laid.in_order() is laid


@pytest.mark.usefixtures("channels_last_on_cpu")
def test_tensors_become_channels_last_where_the_network_computes_so() -> None:
    value = torch.arange(24.0).view(1, 2, 3, 4)
    laid = result_with(value).in_order()
    found = laid.payload["p"]["x"]
    assert found.is_contiguous(memory_format=torch.channels_last) and torch.equal(found, value)
    assert laid.weights.params["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    assert laid.in_order() is laid


def test_a_result_that_is_packed_keeps_no_model() -> None:
    result = result_with(torch.ones(2))
    result = replace(result, known_finite=result.weights)
    sent = SentResult.of(result)
    assert sent.rest.known_finite is None and not sent.rest.weights.params
    assert torch.equal(sent.result(CPU).weights.params["fc.bias"], result.weights.params["fc.bias"])


def test_a_model_that_is_known_to_be_finite_is_not_checked_again() -> None:
    result = result_with(torch.ones(2))
    known = replace(result, known_finite=result.weights)
    known.weights.params["fc.bias"].fill_(torch.nan)
    assert result.nonfinite() == "fc.bias" and known.nonfinite() is None
    assert replace(known, payload={"p": {"x": torch.tensor([torch.nan])}}).nonfinite()

    other = Weights(SMALL, known.weights.params, known.weights.buffers)
    assert replace(known, weights=other).nonfinite() == "fc.bias"
    moved = replace(known, payload={"p": {"x": torch.ones(3, 2).T}}).in_order()
    assert moved is not known and moved.nonfinite() is None
