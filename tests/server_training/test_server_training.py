"""Tests of training on the server.

Optimizers equal torch.optim, and batches and gradients equal their definitions.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedexp.core.build import build
from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.core.runner import Snapshot
from fedexp.core.weights import ModelSpec, Weights
from fedexp.server_training.batches import batches
from fedexp.server_training.gradients import value_and_grad
from fedexp.server_training.optimizers import Adam, Optimizer, Sgd, cosine
from fedexp.storage.checkpoint import Checkpoint

CPU = torch.device("cpu")
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}


def tree(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()
    }


def copies(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


OPTIMIZERS = [
    (Sgd(), torch.optim.SGD, {}),
    (Sgd(weight_decay=0.01), torch.optim.SGD, {"weight_decay": 0.01}),
    (
        Sgd(momentum=0.9, weight_decay=5e-4),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 5e-4},
    ),
    (Sgd(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (Adam(), torch.optim.Adam, {}),
    (
        Adam(betas=(0.5, 0.999), eps=1e-6, weight_decay=0.01),
        torch.optim.Adam,
        {"betas": (0.5, 0.999), "eps": 1e-6, "weight_decay": 0.01},
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ours", "kind", "options"), OPTIMIZERS)
def test_steps_are_torchs_to_the_bit(
    ours: Optimizer, kind: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Six steps with different step sizes are bit-identical."""
    params = tree(0, dtype)
    theirs = {name: value.clone().requires_grad_() for name, value in params.items()}
    reference = kind(list(theirs.values()), lr=0.1, foreach=False, **options)
    state = ours.init(params)
    for step in range(6):
        grads, lr = tree(step + 1, dtype), 0.1 / (step + 1)
        for name, value in theirs.items():
            value.grad = grads[name].clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        params, state = ours.step(params, grads, state, lr)
        assert_equal(params, {name: value.detach() for name, value in theirs.items()})


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_unclipped_gradients_do_not_count_and_do_not_shrink(bound: float) -> None:
    params, grads = tree(0, torch.float64), tree(1, torch.float64)
    first, *rest = params
    theirs = {name: value.clone().requires_grad_() for name, value in params.items()}
    for name, value in theirs.items():
        value.grad = grads[name].clone()
    nn.utils.clip_grad_norm_([theirs[name] for name in rest], bound)
    torch.optim.SGD(theirs.values(), lr=0.1).step()
    moved, _ = Sgd(clip=bound).step(params, grads, {}, 0.1, unclipped={first})
    for name, value in theirs.items():
        torch.testing.assert_close(moved[name], value.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_clipping_is_torchs_and_comes_before_the_decay(bound: float) -> None:
    params, grads = tree(0, torch.float64), tree(1, torch.float64)
    theirs = [value.clone().requires_grad_() for value in params.values()]
    for value, grad in zip(theirs, grads.values(), strict=True):
        value.grad = grad.clone()
    nn.utils.clip_grad_norm_(theirs, bound)
    torch.optim.SGD(theirs, lr=0.1, weight_decay=0.3).step()
    moved, _ = Sgd(clip=bound, weight_decay=0.3).step(params, grads, {}, 0.1)
    for a, b in zip(moved.values(), theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=0)


def test_gradients_belong_to_parameters_by_name() -> None:
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    grads = {"b": torch.full((2,), 2.0), "a": torch.full((2,), 1.0)}
    moved, _ = Sgd(weight_decay=0.1).step(params, grads, {}, 0.5)
    assert_equal(moved, {"a": torch.full((2,), -0.5), "b": torch.full((2,), -1.0)})


@pytest.mark.parametrize(
    "optimizer", [Sgd(momentum=0.9, weight_decay=0.1, clip=1.0), Adam(weight_decay=0.1, clip=1.0)]
)
def test_a_step_leaves_its_arguments_alone(optimizer: Optimizer) -> None:
    params, grads = tree(0), tree(1)
    _, state = optimizer.step(params, grads, optimizer.init(params), 0.1)
    held, (kept_params, kept_grads) = json.dumps(_plain(state)), (copies(params), copies(grads))
    first, second = (optimizer.step(params, grads, state, 0.1) for _ in range(2))
    assert_equal(first[0], second[0])
    assert_equal(params, kept_params)
    assert_equal(grads, kept_grads)
    assert json.dumps(_plain(state)) == held != json.dumps(_plain(first[1]))


def _plain(value: Any) -> Any:
    return (
        {key: _plain(item) for key, item in value.items()}
        if isinstance(value, dict)
        else torch.as_tensor(value).tolist()
    )


@pytest.mark.parametrize("optimizer", [Sgd(), Sgd(momentum=0.9, nesterov=True), Adam()])
def test_stored_in_mid_training_it_goes_on_with_the_same_bits(
    optimizer: Optimizer, tmp_path: Path
) -> None:
    def train(
        params: dict[str, torch.Tensor], state: dict[str, Any], steps: range
    ) -> tuple[Any, Any]:
        for step in steps:
            params, state = optimizer.step(params, tree(step + 1), state, cosine(0.1, step, 10))
        return params, state

    straight, _ = train(tree(0), optimizer.init(tree(0)), range(10))
    params, state = train(tree(0), optimizer.init(tree(0)), range(4))
    Checkpoint(tmp_path, CPU).save(Snapshot(4, {"params": params, "optimizer": state}), set(), 0)
    snapshot, _ = Checkpoint(tmp_path, CPU).load() or (Snapshot(0, {}), 0)
    again = snapshot.state
    assert_equal(train(again["params"], again["optimizer"], range(4, 10))[0], straight)


def test_the_cosine_is_torchs() -> None:
    for end in (0.0, 0.01):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=end)
        for step in range(50):
            assert cosine(0.3, step, 50, end) == pytest.approx(schedule.get_last_lr()[0], rel=1e-7)
            optimizer.step()
            schedule.step()
        assert cosine(0.3, 50, 50, end) == cosine(0.3, 70, 50, end) == pytest.approx(end)


def test_an_optimizer_is_a_config_node() -> None:
    node = {"_target_": "fedexp.server_training.optimizers.Adam", "betas": [0.5, 0.999], "clip": 5}
    assert build(Optimizer, node, "aggregator.optimizer") == Adam(betas=(0.5, 0.999), clip=5.0)  # type: ignore[type-abstract]
    for key, value in (("betas", [0.5, 1.0]), ("clip", 0), ("weight_decay", -1)):
        with pytest.raises(ConfigError, match=key):
            build(Optimizer, {**node, key: value}, "aggregator.optimizer")  # type: ignore[type-abstract]
    with pytest.raises(ValueError, match="nesterov"):
        Sgd(nesterov=True)


@pytest.mark.parametrize(("n", "batch_size", "drop_last", "sizes"), [
    (10, 4, False, [4, 4, 2]), (10, 4, True, [4, 4]), (8, 4, True, [4, 4]), (3, 8, False, [3]),
])  # fmt: skip
def test_an_epoch_is_every_sample_once(
    n: int, batch_size: int, drop_last: bool, sizes: list[int]
) -> None:
    parts = list(batches(n, batch_size, 0, "student", drop_last=drop_last))
    assert [len(part) for part in parts] == sizes
    seen = torch.cat(parts).tolist()
    assert len(set(seen)) == len(seen) and set(seen) <= set(range(n))
    assert drop_last or len(seen) == n


def test_epochs_are_shuffled_anew_by_name() -> None:
    def orders(*names: Any, epochs: int = 3) -> list[list[int]]:
        flat = torch.cat(list(batches(20, 7, *names, epochs=epochs))).tolist()
        return [flat[start : start + 20] for start in range(0, 20 * epochs, 20)]

    first = orders(0, "student")
    assert all(sorted(order) == list(range(20)) for order in first)
    assert len({tuple(order) for order in [*first, list(range(20))]}) == 4
    assert orders(0, "student") == first
    assert orders(1, "student")[0] != first[0] != orders(0, "generator")[0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_goes_on_where_it_was_left(drop_last: bool) -> None:
    whole = [
        part.tolist()
        for part in itertools.islice(batches(10, 4, 3, epochs=None, drop_last=drop_last), 20)
    ]
    for start in range(8):
        rest = batches(10, 4, 3, epochs=None, start=start, drop_last=drop_last)
        assert [part.tolist() for part in itertools.islice(rest, 20 - start)] == whole[start:]
    assert [len(list(batches(10, 4, 3, epochs=2, start=start))) for start in (0, 5, 6, 9)] == [
        6,
        1,
        0,
        0,
    ]


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="do not fill a batch"):
        next(batches(0, 4, 0))
    with pytest.raises(ValueError, match="do not fill a batch"):
        next(batches(3, 4, 0, drop_last=True, epochs=None))


def test_gradients_of_a_quadratic_are_its_own() -> None:
    """F = a/2 |w|^2 + w.b has the gradients a w + b and w for the two trees.

    The gradient is zero for a tensor that the function does not use.
    """
    w, b = tree(0, torch.float64), {**tree(1, torch.float64), "unseen": torch.ones(2)}

    def loss(w: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(1.5 * w[k].square() + w[k] * b[k]).sum() for k in w]).sum()

    with torch.no_grad():
        value, (of_w, of_b) = value_and_grad(loss, w, b)
    assert not value.requires_grad and float(value) == pytest.approx(float(loss(w, b)), rel=1e-12)
    assert_equal(of_b, {**w, "unseen": torch.zeros(2)})
    for name in w:
        torch.testing.assert_close(of_w[name], 3 * w[name] + b[name], rtol=1e-12, atol=1e-12)
    assert not any(leaf.requires_grad for leaf in (*w.values(), *b.values(), *of_w.values()))


def test_inputs_are_optimised_through_networks() -> None:
    """The gradients are compared with finite differences.

    They are gradients of a teacher's loss on generated images, for the generator and
    the noise, as in DENSE.
    """
    shape, dtype = (1, 3, 3), torch.float64
    teacher = Weights.init(
        ModelSpec.of({"_target_": "fedexp.models.mlp.MLP", "hidden": [5]}, shape, 4), 0, CPU, dtype
    )
    net = Net(teacher.spec, CPU, dtype)
    net.train(False)
    with torch.random.fork_rng(devices=[]):
        generator = nn.Sequential(nn.Linear(2, 9), nn.Sigmoid(), nn.Unflatten(1, shape)).to(dtype)
    weights = {name: value.detach() for name, value in generator.named_parameters()}
    labels = torch.tensor([0, 3])

    def loss(params: dict[str, torch.Tensor], noise: dict[str, torch.Tensor]) -> torch.Tensor:
        images = torch.func.functional_call(generator, params, (noise["z"],))
        return nn.functional.cross_entropy(net(teacher.params, teacher.buffers, images), labels)

    z = {"z": torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=dtype)}
    _, (of_weights, of_z) = value_and_grad(loss, weights, z)
    h = 1e-6
    for trees_, which, name, grad in (
        (weights, 0, "0.weight", of_weights["0.weight"]),
        (z, 1, "z", of_z["z"]),
    ):
        for at in itertools.product(*map(range, trees_[name].shape)):
            ends = []
            for sign in (1, -1):
                moved = {**trees_, name: trees_[name].clone()}
                moved[name][at] += sign * h
                ends.append(float(loss(*((moved, z), (weights, moved))[which])))
            assert float(grad[at]) == pytest.approx(
                (ends[0] - ends[1]) / (2 * h), rel=1e-5, abs=1e-8
            )
    assert not any(value.requires_grad for value in teacher.params.values())
