"""The step kernel is compared with torch.optim and torch's clipping, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedexp.core.data import Samples
from fedexp.core.errors import ClientError
from fedexp.core.jobs import ClientJob
from fedexp.core.kernel import StepNoise, Vectors, batch_ranges, batches, clipped, train_client
from fedexp.core.local_training import LocalTraining
from fedexp.core.net import Net
from fedexp.core.task import Batch
from fedexp.core.trainer import Adjustment, Ascent, Ctx, Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.tasks.classification import Classification
from tests.world import CPU, make_data


class Small(nn.Module):
    """A network with a convolution, BatchNorm and dropout."""

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


MLP = ModelSpec(
    "fedexp.models.mlp.MLP", (("hidden", (8,)), ("input_shape", (1, 2, 2)), ("num_classes", 3))
)
SMALL = ModelSpec("tests.core.test_kernel.Small", (("input_shape", (1, 2, 2)), ("num_classes", 3)))
LOCAL_TRAINING = LocalTraining(2, None, 6, "sgd", 0.1, 1.0, 0.0, 0.0, None)


def make_job(spec: ModelSpec = MLP, trainer: Trainer | None = None, **changes) -> ClientJob:
    start = Weights.init(spec, 1, CPU, torch.float64)
    local_training = replace(
        LOCAL_TRAINING, **{k: v for k, v in changes.items() if hasattr(LOCAL_TRAINING, k)}
    )
    rest = {k: v for k, v in changes.items() if not hasattr(LOCAL_TRAINING, k)}
    return ClientJob(
        0, start, trainer or Trainer(), Classification(), local_training, 0, 7, {}, **rest
    )


def train(job: ClientJob, n: int = 20, samples: Samples | None = None):
    samples = samples or make_data((n,)).train
    return train_client(
        job, Net(job.start.spec, CPU, torch.float64), samples, torch.arange(len(samples)), 3
    )


def reference(job: ClientJob, optimizer, clip: float | None = None, n: int = 20) -> Tree:
    """Train on the same batches with torch's own module, autograd and optimizer."""
    samples = make_data((n,)).train
    schedule = list(batch_ranges(n, job.local_training, 1))
    net = Net(job.start.spec, CPU, torch.float64)
    params = {k: v.clone().requires_grad_() for k, v in job.start.params.items()}
    torch_optimizer = optimizer(list(params.values()))
    for batch in batches(job, samples, torch.arange(n), schedule, None):
        torch_optimizer.zero_grad()
        F.cross_entropy(net(params, {}, batch.x), batch.y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(params.values()), clip)
        torch_optimizer.step()
    return {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"momentum": 0.9}, {"weight_decay": 0.01}, {"momentum": 0.5, "weight_decay": 0.1}],
)
def test_sgd_is_torchs(changes: dict) -> None:
    job = make_job(**changes)
    expected = reference(job, lambda p: torch.optim.SGD(p, lr=0.1, **changes))
    torch.testing.assert_close(train(job).weights.params, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad"])
def test_adam_is_torchs(optimizer: str, weight_decay: float) -> None:
    job = make_job(optimizer=optimizer, lr=0.01, weight_decay=weight_decay)
    amsgrad = optimizer == "amsgrad"
    expected = reference(
        job, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=weight_decay, amsgrad=amsgrad)
    )
    torch.testing.assert_close(train(job).weights.params, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_rmsprop_is_torchs(weight_decay: float) -> None:
    job = make_job(optimizer="rmsprop", lr=0.01, weight_decay=weight_decay, betas=(0.3, 0.9))
    expected = reference(
        job, lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=weight_decay)
    )
    torch.testing.assert_close(train(job).weights.params, expected, rtol=1e-9, atol=1e-12)


def test_clipping_is_torchs_and_before_decay() -> None:
    job = make_job(clip=0.05, weight_decay=0.1)
    expected = reference(job, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), clip=0.05)
    torch.testing.assert_close(train(job).weights.params, expected, rtol=1e-10, atol=1e-13)


def test_clip_leaves_short_gradients_alone() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert all(torch.equal(a, b) for a, b in zip(clipped(grads, 5.0, Vectors), grads, strict=True))
    assert float(torch.cat(clipped(grads, 1.0, Vectors)).norm()) == pytest.approx(1.0, rel=1e-5)


@dataclass(frozen=True)
class Recorder(Trainer):
    """A trainer that records the order in which its hooks are called.

    They return a constant gradient and a shift after the step.
    """

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return {k: torch.full_like(v, 10.0) for k, v in grad.items()}

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        return {k: v + 1.0 for k, v in params.items()}


def test_order_of_a_step() -> None:
    """The order of a step is: correct, clip, decay, optimizer step, after_step."""
    job = make_job(trainer=Recorder(), clip=1.0, weight_decay=0.5, epochs=None, steps=1)
    count = sum(v.numel() for v in job.start.params.values())
    after = train(job).weights.params
    for name, w in job.start.params.items():
        unit = 10.0 / (10.0 * count**0.5 + 1e-6)
        torch.testing.assert_close(
            after[name], w - 0.1 * (unit + 0.5 * w) + 1.0, rtol=1e-9, atol=1e-12
        )


@dataclass(frozen=True)
class Hooked(Trainer):
    """A trainer whose trees have the parameters' order, or the reverse order of names."""

    reverse: bool = False

    def _ordered(self, tree: Tree) -> Tree:
        return dict(sorted(tree.items(), reverse=True)) if self.reverse else tree

    def grad(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx):
        grad, loss = super().grad(net, params, buffers, batch, ctx)
        return self._ordered(grad), loss

    def ascent(self, ctx: Ctx) -> Ascent:
        return Ascent(0.1)

    def adjustment(self, ctx: Ctx) -> Adjustment:
        numbered = {k: torch.full_like(v, i) for i, (k, v) in enumerate(ctx.start.items())}
        tree = self._ordered(numbered)
        return Adjustment(pull=0.1, toward=tree, shift=tree, outside=tree)

    def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
        return self._ordered(grad)

    def after_step(self, params: Tree, ctx: Ctx) -> Tree:
        return self._ordered({k: v * (1 + i) for i, (k, v) in enumerate(params.items())})


def test_a_hook_may_return_a_tree_in_any_order() -> None:
    """Tensors are combined by name. The two hidden layers have tensors of equal shapes."""
    spec = ModelSpec(MLP.arch, (("hidden", (4, 4)), *MLP.kwargs[1:]))
    expected, got = (
        train(make_job(spec, Hooked(reverse=reverse), steps=2, epochs=None)).weights.params
        for reverse in (False, True)
    )
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_hook_that_leaves_out_a_tensor_is_refused() -> None:
    @dataclass(frozen=True)
    class Partial(Trainer):
        def correct(self, grad: Tree, params: Tree, ctx: Ctx) -> Tree:
            return dict(list(grad.items())[1:])

    with pytest.raises(ValueError, match=r"only one of two trees has 'hidden\.0\.weight'"):
        train(make_job(trainer=Partial()))


def test_frozen_parameters_do_not_move() -> None:
    names = list(make_job().start.params)
    job = make_job(frozen=frozenset(names[:2]), weight_decay=0.1, momentum=0.9)
    after = train(job).weights.params
    assert list(after) == names
    for name in names:
        assert torch.equal(after[name], job.start.params[name]) == (name in job.frozen)


def test_kernel_does_not_change_its_job_and_is_deterministic() -> None:
    job = make_job(SMALL, epochs=3)
    before = {k: v.clone() for k, v in {**job.start.params, **job.start.buffers}.items()}
    net = Net(SMALL, CPU, torch.float64)
    samples = make_data((20,)).train
    first = train_client(job, net, samples, torch.arange(20), 3)
    train_client(replace(job, seed=99), net, samples, torch.arange(10), 3)
    again = train_client(job, net, samples, torch.arange(20), 3)
    for a, b in (
        (first.weights.params, again.weights.params),
        (first.weights.buffers, again.weights.buffers),
    ):
        assert all(torch.equal(a[k], b[k]) for k in a)
    assert all(
        torch.equal(v, {**job.start.params, **job.start.buffers}[k]) for k, v in before.items()
    )
    assert int(first.weights.buffers["norm.num_batches_tracked"]) == first.num_steps
    assert first.metrics == again.metrics


def test_dropout_draws_from_the_job() -> None:
    """If samples are equal and the step size is tiny, the loss depends on the masks."""
    spec = ModelSpec(MLP.arch, (("dropout", 0.5), *MLP.kwargs))
    samples = replace(
        make_data((20,)).train, x=torch.ones(20, 1, 2, 2).double(), y=torch.zeros(20).long()
    )
    job = make_job(spec, lr=1e-300, batch_size=20)
    first, again, other = (
        train(replace(job, seed=seed), samples=samples).metrics for seed in (7, 7, 8)
    )
    assert first == again
    assert first["loss"] != pytest.approx(other["loss"], rel=1e-6)
    # `loss` covers both steps, and `loss_last_epoch` covers only the second.
    assert first["loss"] != pytest.approx(first["loss_last_epoch"], rel=1e-6)


def test_random_numbers_are_a_function_of_seed_step_and_name() -> None:
    def drawn(seed: int, step: int, name: str) -> torch.Tensor:
        noise = StepNoise(seed, CPU)
        noise.step = step
        return noise(name, (4,))

    first = drawn(7, 0, "drop")
    assert torch.equal(first, drawn(7, 0, "drop"))
    assert not any(
        torch.equal(first, drawn(*other))
        for other in ((8, 0, "drop"), (7, 1, "drop"), (7, 0, "others"))
    )


@pytest.mark.parametrize(("n", "local_training", "sizes"), [
    (10, {"epochs": 2, "batch_size": 4}, [4, 4, 2, 4, 4, 2]),
    (10, {"epochs": None, "steps": 4, "batch_size": 4}, [4, 4, 2, 4]),
    (10, {"epochs": 2, "batch_size": 4, "max_steps": 4}, [4, 4, 2, 4]),
    (10, {"epochs": 1, "batch_size": 4, "max_steps": 9}, [4, 4, 2]),
    (10, {"epochs": None, "steps": 9, "batch_size": 4, "max_steps": 2}, [4, 4]),
    (3, {"epochs": 1, "batch_size": 8}, [3]),
    (0, {"epochs": 1, "batch_size": 8}, []),
])  # fmt: skip
def test_batches_of_a_schedule(n: int, local_training: dict, sizes: list[int]) -> None:
    assert [
        b - a for _, a, b in batch_ranges(n, replace(LOCAL_TRAINING, **local_training), 1)
    ] == sizes


def test_every_epoch_sees_every_sample_once_in_a_new_order() -> None:
    job = make_job(epochs=3, batch_size=4)
    samples = replace(
        make_data((10,)).train, x=torch.arange(10.0, dtype=torch.float64).reshape(10, 1)
    )
    schedule = list(batch_ranges(10, job.local_training, 1))
    seen = torch.cat(
        [b.x.flatten() for b in batches(job, samples, torch.arange(10), schedule, None)]
    ).reshape(3, 10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in seen)
    assert not torch.equal(seen[0], seen[1])
    other = batches(replace(job, seed=8), samples, torch.arange(10), schedule, None)
    assert not torch.equal(torch.cat([b.x.flatten() for b in other]), seen.flatten())


def test_every_batch_is_augmented_anew() -> None:
    """If all samples are equal, batches differ only by the augmentation."""
    job = make_job(epochs=1, batch_size=4)
    plain = replace(make_data((8,)).train, x=torch.zeros(8, 1, 2, 2).double())
    samples = replace(plain, augment=lambda x, noise: x + noise("shift", (len(x), 1, 1, 1)))
    schedule = list(batch_ranges(8, job.local_training, 1))
    first, second = (
        b.x for b in batches(job, samples, torch.arange(8), schedule, StepNoise(7, CPU))
    )
    assert first.any() and not torch.equal(first, second)


def test_a_single_left_over_sample_is_no_batch_for_batchnorm() -> None:
    assert train(make_job(SMALL, epochs=1, batch_size=4), n=9).num_steps == 2
    assert train(make_job(MLP, epochs=1, batch_size=4), n=9).num_steps == 3
    with pytest.raises(ClientError, match="cannot take a step"):
        train(make_job(SMALL), n=1)


@pytest.mark.parametrize("n", [513, 1025])
def test_full_gradient_of_a_batchnorm_net_has_no_part_of_one_sample(n: int) -> None:
    """513 samples must not be split into 512 + 1.

    One sample has no batch statistics.
    """
    from fedexp.methods.scaffold import Scaffold

    job = make_job(SMALL, trainer=Scaffold(option="I"), epochs=None, steps=1)
    zeros = {k: torch.zeros_like(v) for k, v in job.start.params.items()}
    result = train(replace(job, state={"c_i": zeros}, shared={"c": zeros}), n=n)
    assert all(bool(v.isfinite().all()) for v in result.state["c_i"].values())


def test_the_full_gradient_is_the_mean_over_all_samples() -> None:
    """513 samples are split into parts of 257 and 256."""
    from fedexp.methods.scaffold import Scaffold

    job, samples = (
        make_job(trainer=Scaffold(option="I"), epochs=None, steps=1),
        make_data((513,)).train,
    )
    zeros = {k: torch.zeros_like(v) for k, v in job.start.params.items()}
    found = train(replace(job, state={"c_i": zeros}, shared={"c": zeros}), samples=samples).state[
        "c_i"
    ]
    module = job.start.module()
    F.cross_entropy(module(samples.x), samples.y).backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-9, atol=1e-12)


def test_chunks_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedexp.core import kernel

    whole = train(make_job(SMALL)).weights.params
    monkeypatch.setattr(kernel, "chunk_bytes", lambda device: 1)
    single = train(make_job(SMALL)).weights.params
    assert all(torch.equal(whole[k], single[k]) for k in whole)


def test_uint8_images_are_normalised_as_written() -> None:
    raw = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)
    samples = Samples(
        raw, torch.zeros(2).long(), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), dtype=torch.float64
    )
    mean, std = torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([0.5, 0.6, 0.7]).double()
    expected = (raw.double() / 255 - mean.reshape(3, 1, 1)) / std.reshape(3, 1, 1)
    torch.testing.assert_close(samples.inputs(slice(0, 2)), expected, rtol=1e-6, atol=1e-7)
    floats = Samples(raw.double(), samples.y, dtype=torch.float64)
    floats.inputs(slice(0, 2)).add_(1)
    assert torch.equal(floats.x, raw.double())
