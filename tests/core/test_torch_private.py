"""Tests that torch's private interfaces still work as fedexp needs them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fedexp.core.torch_private import (
    ProfilerDevice,
    is_profiler_enabled,
    is_vmapped,
    run_backward,
)

PACKAGE = Path(__file__).resolve().parents[2] / "fedexp"


def test_run_backward_gives_the_gradients_of_autograd_grad() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, generator=generator).requires_grad_() for _ in range(2))
    unused = torch.ones(2, requires_grad=True)

    def loss() -> torch.Tensor:
        return (a * b.exp()).sum()

    expected = torch.autograd.grad(loss(), (a, b, unused), allow_unused=True)
    found = run_backward(loss(), (a, b, unused))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2] is expected[2] is None
    assert a.grad is b.grad is None and not found[0].requires_grad


def test_is_profiler_enabled_only_while_a_profiler_runs() -> None:
    assert not is_profiler_enabled()
    with profile(activities=[ProfilerActivity.CPU]):
        assert is_profiler_enabled()
    assert not is_profiler_enabled()


def test_profiler_device_of_an_event_on_the_cpu() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("range"):
        torch.ones(2).sum()
    events = [event for event in profiler.events() if event.name == "range"]
    assert [event.device_type for event in events] == [ProfilerDevice.CPU]


def test_is_vmapped_only_inside_vmap() -> None:
    seen = []

    def watched(row: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        seen.append((is_vmapped(row), is_vmapped(whole)))
        return row + whole

    torch.vmap(watched, in_dims=(0, None))(torch.ones(2, 3), torch.ones(3))
    assert seen == [(True, False)] and not is_vmapped(torch.ones(2, 3))


def test_no_other_module_uses_a_private_interface_of_torch() -> None:
    private = re.compile(r"torch\._(?!foreach_|_version__)|_execution_engine|functorch\._")
    users = {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())}
    assert users == {"torch_private.py"}
