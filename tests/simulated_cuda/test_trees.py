"""Operations on trees take few launches and synchronisations on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedexp.core import trees
from fedexp.core.trees import Tree
from tests.simulated_cuda.device import SimulatedCuda, simulate
from tests.world import CPU

CUDA_1 = torch.device("cuda", 1)


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with simulate() as simulated:
        yield simulated


def mixed_tree() -> Tree:
    return {
        "weight": torch.arange(6.0).view(2, 3),
        "count": torch.tensor(7),
        "bias": torch.tensor([-0.0, float("inf")]),
    }


def equal(a: Tree, b: Tree) -> bool:
    return list(a) == list(b) and all(
        a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a
    )


def test_a_tree_is_moved_with_one_copy_per_dtype(device: SimulatedCuda) -> None:
    there = trees.on_device(mixed_tree(), CUDA_1)
    assert {value.device for value in there.values()} == {CUDA_1}
    assert trees.on_device(there, CUDA_1) is there

    device.counter.reset()
    back = trees.on_device(there, CPU)
    count = device.counter.rows().total()
    assert (count.syncs, count.d2h) == (2, 2)
    assert equal(back, mixed_tree())


def test_trees_are_copied_and_zeroed_with_one_launch_per_dtype(device: SimulatedCuda) -> None:
    there = trees.on_device(mixed_tree(), CUDA_1)
    for make, expected in (
        (trees.clone, mixed_tree()),
        (trees.zeros_like, {name: value * 0 for name, value in mixed_tree().items()}),
    ):
        device.counter.reset()
        made = make(there)
        assert device.counter.rows().total().launches == 2
        if make is trees.zeros_like:
            expected["bias"] = torch.zeros(2)
        assert equal(trees.on_device(made, CPU), expected)
        assert all(made[name] is not there[name] for name in there)


def test_the_check_for_nan_synchronises_once(device: SimulatedCuda) -> None:
    there = trees.on_device(mixed_tree(), CUDA_1)
    assert trees.nonfinite(there) == "bias"
    finite = {name: value for name, value in there.items() if name != "bias"}
    device.counter.reset()
    assert trees.nonfinite(finite) is None
    assert device.counter.rows().total().syncs == 1


def test_finite_values_whose_norm_overflows_are_finite(device: SimulatedCuda) -> None:
    assert trees.nonfinite({"large": torch.full((4,), 3e38, device=CUDA_1)}) is None
