"""Tests of teachers together.

They cover mean logits, statistics at the inputs of BatchNorm, parts, stacks and
bfloat16, and also the generator, the bank and views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fedexp.config.compose import compose
from fedexp.core import trees
from fedexp.core.data import InputDomain, Samples
from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data.augment import Augment
from fedexp.distillation import ensemble as ensembles
from fedexp.distillation import stacking
from fedexp.distillation.bank import samples_of, stored
from fedexp.distillation.ensemble import TeacherEnsemble
from fedexp.distillation.generator import generator_spec
from fedexp.distillation.views import View, augmentation
from tests.methods.distilled_world import of_norms, small_world
from tests.world import CPU

SHAPE, CLASSES, DTYPE = (1, 8, 8), 3, torch.float64
CNN = {
    "_target_": "fedexp.models.cnn.ConvNet",
    "channels": [3, 4],
    "kernel": 3,
    "hidden": [],
    "norm": "batch",
}
PLAIN = {"_target_": "fedexp.models.mlp.MLP", "hidden": [5]}
RESNET = {"_target_": "fedexp.models.resnet.ResNet", "norm": "batch", "stem": "cifar", "width": 2}


def teacher(node: dict[str, Any], seed: int) -> Weights:
    """Return a model of `node` with other statistics than an untrained one has."""
    weights = Weights.init(ModelSpec.of(node, SHAPE, CLASSES), seed, CPU, DTYPE)
    random = torch.Generator().manual_seed(seed)
    buffers = {
        name: value + torch.rand(value.shape, generator=random, dtype=DTYPE)
        if value.is_floating_point()
        else value
        for name, value in weights.buffers.items()
    }
    return Weights(weights.spec, weights.params, buffers)


def single(model: Weights) -> Weights:
    cast = lambda tree: {k: v.float() if v.is_floating_point() else v for k, v in tree.items()}  # noqa: E731
    return Weights(model.spec, cast(model.params), cast(model.buffers))


def inputs(seed: int = 0, b: int = 6) -> torch.Tensor:
    return torch.randn((b, *SHAPE), generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def test_mean_logits_of_any_architectures_whatever_their_order() -> None:
    models, x = [teacher(node, seed) for seed, node in enumerate((CNN, PLAIN, CNN))], inputs()
    each = torch.stack([model.module()(x) for model in models]).detach()
    torch.testing.assert_close(TeacherEnsemble(models)(x), each.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        TeacherEnsemble(models[::-1])(x), each.mean(0), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(TeacherEnsemble(models[:1] * 4)(x), each[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(TeacherEnsemble(models).each(x), each, rtol=1e-12, atol=1e-12)
    weights = torch.tensor([0.2, 0.0, 0.6], dtype=DTYPE)
    expected = 0.25 * each[0] + 0.75 * each[2]
    torch.testing.assert_close(
        TeacherEnsemble(models)(x, weights), expected, rtol=1e-12, atol=1e-12
    )
    assert TeacherEnsemble(models)(x, torch.zeros(3, dtype=DTYPE)).abs().max() == 0


def by_hooks(model: Weights, x: torch.Tensor) -> torch.Tensor:
    """Return one network's distances of statistics, measured by torch's hooks."""
    module, found = model.module(), list[torch.Tensor]()
    of_norms(module, found)
    module(x)
    return sum(found, torch.zeros((), dtype=DTYPE)).detach()


def test_statistics_are_those_of_the_teachers_norms_over_their_number() -> None:
    models, x = [teacher(CNN, 1), teacher(PLAIN, 2), teacher(CNN, 3)], inputs()
    shown = TeacherEnsemble(models).show(x, norms=True).statistics
    torch.testing.assert_close(
        shown, sum(by_hooks(model, x) for model in models) / 3, rtol=1e-12, atol=0.0
    )
    torch.testing.assert_close(
        TeacherEnsemble(models * 2).show(x, norms=True).statistics, shown, rtol=1e-12, atol=0.0
    )
    torch.testing.assert_close(
        TeacherEnsemble(models).show(x.flip(0), norms=True).statistics, shown, rtol=1e-12, atol=0.0
    )
    assert (
        TeacherEnsemble(models).show(x).statistics == 0
        and TeacherEnsemble(models[1:2]).show(x, norms=True).statistics == 0
    )


def test_statistics_of_the_batch_itself_are_at_no_distance() -> None:
    model, x = teacher(CNN, 1), inputs()
    net = Net(model.spec, CPU, DTYPE)
    net.train(False)
    # Each new statistic changes the inputs of the later layers
    for name in net.observe(model.params, model.buffers, x, norms=True).norms:
        value = net.observe(model.params, model.buffers, x, norms=True).norms[name]
        own = {
            "running_mean": value.mean((0, 2, 3)),
            "running_var": value.var((0, 2, 3), correction=0),
        }
        model = Weights(
            model.spec,
            model.params,
            {**model.buffers, **{f"{name}.{k}": v for k, v in own.items()}},
        )
    assert TeacherEnsemble([model]).show(x, norms=True).statistics < 1e-12


def test_statistics_after_a_pass_in_training_mode_are_off_by_the_correction_of_the_variance() -> (
    None
):
    """The stored variance is unbiased.

    With n values per channel the distance is therefore ||sigma^2|| / (n - 1), which is
    small and not 0.
    """
    model, x = teacher({**CNN, "channels": [3]}, 1), inputs()
    module = model.module().train()
    (norm,) = (part for part in module.modules() if isinstance(part, nn.BatchNorm2d))
    norm.momentum = 1.0
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda layer, args, output: seen.append(args[0].detach()))
    module(x)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    variance, n = seen[0].var((0, 2, 3), correction=0), seen[0].numel() // 3
    shown = (
        TeacherEnsemble([Weights(model.spec, model.params, buffers)]).show(x, norms=True).statistics
    )
    torch.testing.assert_close(shown, variance.norm() / (n - 1), rtol=1e-8, atol=0.0)
    assert 0 < shown < 1e-2


@pytest.mark.parametrize(("name", "count"), [
    ("resnet18_bn_cifar", 20), ("wrn_16_1", 13), ("wrn_40_1", 37), ("cnn_mnist", 2), ("cnn1", 0), ("cnn2", 0), ("mlp", 0),
])  # fmt: skip
def test_every_batch_norm_is_observed(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (1, 28, 28) if name == "cnn_mnist" else (3, 32, 32)
    node = compose([f"model={name}"])["model"]
    model = Weights.init(ModelSpec.of(node, shape, CLASSES), 0, CPU, torch.float32)
    seen: list[int] = []
    measure = ensembles.distance_of_statistics
    monkeypatch.setattr(
        ensembles,
        "distance_of_statistics",
        lambda norms, buffers: (seen.append(len(norms)), measure(norms, buffers))[1],
    )
    x = torch.randn((2, *shape), generator=torch.Generator().manual_seed(0))
    assert (TeacherEnsemble([model]).show(x, norms=True).statistics > 0) == (count > 0)
    assert seen == [count]


def many() -> list[Weights]:
    return [teacher(PLAIN, seed) for seed in range(11)]


@pytest.mark.parametrize(
    ("count", "at_once", "stacked", "parts"),
    [
        (10, None, False, 0),
        (11, None, False, 11),
        (11, None, True, 2),
        (11, 4, False, 3),
        (11, 11, False, 0),
    ],
)
def test_of_many_teachers_one_has_activations_at_a_time(
    count: int, at_once: int | None, stacked: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs().requires_grad_()
    logits = TeacherEnsemble(many()[:count], at_once, stacked=stacked)(x)
    taken: list[int] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (taken.append(1), grad(*a, **k))[1])
    logits.sum().backward()
    assert len(taken) == parts


@pytest.mark.parametrize("at_once", [1, 2])
def test_in_parts_the_same_with_one_more_pass(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [teacher(node, seed) for seed, node in enumerate((CNN, PLAIN, CNN, CNN, PLAIN))]
    before = [trees.clone({**model.params, **model.buffers}) for model in models]
    weights = torch.arange(1, 12, dtype=DTYPE) / 10
    passes: list[str] = []
    observe = Net.observe
    monkeypatch.setattr(
        Net,
        "observe",
        lambda self, *a, **k: (passes.append(self.spec.arch), observe(self, *a, **k))[1],
    )

    def found(models: Sequence[Weights], at_once: int | None) -> tuple[torch.Tensor, ...]:
        passes.clear()
        x = inputs().requires_grad_()
        shown = TeacherEnsemble(models, at_once).show(
            x, weights[: len(models)], norms=True, features=True
        )
        loss = shown.logits.square().sum() + 0.7 * shown.statistics + 0.3 * shown.activation
        return *(value.detach() for value in shown), *torch.autograd.grad(loss, x)

    eleven = many()
    for count, limit, expected in ((10, None, 10), (11, None, 22), (11, 11, 11)):
        found(eleven[:count], limit)
        assert len(passes) == expected
    whole = found(models, None)
    assert len(passes) == 5
    parts = found(models, at_once)
    assert len(passes) == 10
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    features = [Net(m.spec, CPU, DTYPE) for m in models]
    for net in features:
        net.train(False)
    shown = [
        net.observe(m.params, m.buffers, inputs(), features=True)
        for net, m in zip(features, models, strict=True)
    ]
    means = [float(one.features.abs().mean()) for one in shown if one.features is not None]
    assert float(whole[2]) == pytest.approx(-sum(means) / 5)
    for model, old in zip(models, before, strict=True):
        assert all(
            torch.equal(value, old[name])
            for name, value in {**model.params, **model.buffers}.items()
        )


def all_shown(
    ensemble: TeacherEnsemble, x: torch.Tensor, weights: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return logits, statistics, activation, a gradient, and every teacher's logits.

    The gradient is that of a loss of the first three.
    """
    leaf = x.clone().requires_grad_()
    shown = ensemble.show(leaf, weights, norms=True, features=True)
    loss = shown.logits.square().sum() + 0.7 * shown.statistics + 0.3 * shown.activation
    return [
        value.detach() for value in (*shown, *torch.autograd.grad(loss, leaf), ensemble.each(x))
    ]


@pytest.mark.parametrize("node", [CNN, RESNET, PLAIN], ids=["cnn", "resnet", "mlp"])
@pytest.mark.parametrize("at_once", [None, 2])
def test_stacked_the_same_as_one_after_the_other(node: dict[str, Any], at_once: int | None) -> None:
    models, x = [teacher(node, seed) for seed in range(3)], inputs(b=4)
    before = [trees.clone({**model.params, **model.buffers}) for model in models]
    stacked = TeacherEnsemble(models, at_once, stacked=True)
    weights = torch.tensor([0.1, 0.6, 0.3], dtype=DTYPE)
    for shares in (None, weights):
        for a, b in zip(
            all_shown(stacked, x, shares),
            all_shown(TeacherEnsemble(models), x, shares),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(stacked(x), TeacherEnsemble(models)(x), rtol=1e-9, atol=1e-11)
    for model, old in zip(models, before, strict=True):
        assert all(
            torch.equal(value, old[name])
            for name, value in {**model.params, **model.buffers}.items()
        )


def test_several_architectures_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single teacher, and teachers on a CPU, are not stacked, and nothing is timed.

    If stacking may be faster, it must be faster by a twentieth to be used.
    """
    mixed, alike, x = (
        [teacher(CNN, 0), teacher(PLAIN, 1)],
        [teacher(PLAIN, seed) for seed in range(2)],
        inputs(),
    )
    with pytest.raises(ValueError, match="one architecture"):
        TeacherEnsemble(mixed, stacked=True)
    with pytest.raises(ValueError, match="do not run in bf16"):
        TeacherEnsemble(alike, stacked=True, bf16=True)
    times: list[tuple[bool, float | None]] = []

    def seconds(ensemble: TeacherEnsemble, inputs: torch.Tensor) -> float:
        stacked, time = times.pop(0)
        assert bool(ensemble._stacks) == stacked
        if time is None:
            raise torch.cuda.OutOfMemoryError
        return time

    monkeypatch.setattr(stacking, "seconds", seconds)
    choose = lambda running, models: stacking.stacks(running, models, None, x)  # noqa: E731
    assert choose("stacked", alike) and not choose("looped", alike) and not choose("auto", alike)
    monkeypatch.setattr(stacking, "may_gain_by_stacks", lambda device: True)
    assert (
        not choose("auto", mixed) and not choose("auto", alike[:1]) and not choose("looped", alike)
    )
    for stacked, chosen in ((0.94, True), (0.96, False), (None, False)):
        times[:] = [(False, 1.0), (True, stacked)]
        assert choose("auto", alike) == chosen and not times


def test_a_pass_is_timed_after_one_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.1, 1.0, 3.0, 5.0, 6.5])
    monkeypatch.setattr(stacking.time, "perf_counter", lambda: next(clock))
    assert stacking.seconds(TeacherEnsemble([teacher(CNN, 0)]), inputs(), repeats=2) == 1.5


def test_in_bfloat16_near_with_statistics_in_single_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without bfloat16, autocast is not entered, and the logits are the modules'."""
    models = [single(teacher(CNN, seed)) for seed in range(3)]
    x = inputs().float()
    exact = all_shown(TeacherEnsemble(models), x)
    types: list[torch.dtype] = []
    measure = ensembles.distance_of_statistics
    monkeypatch.setattr(
        ensembles,
        "distance_of_statistics",
        lambda norms, buffers: (
            types.extend(value.dtype for value in norms.values()),
            measure(norms, buffers),
        )[1],
    )
    rounded = all_shown(TeacherEnsemble(models, 2, bf16=True), x)
    # These are the types of the inputs of BatchNorm
    assert set(types) == {torch.bfloat16}
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype == torch.float32 and a.isfinite().all() and not torch.equal(a, b)
        assert (a - b).norm() < 0.06 * b.norm()
    values = torch.randn(64, 2, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    buffers = {"n.running_mean": torch.zeros(2), "n.running_var": torch.ones(2)}
    assert torch.equal(measure({"n": values}, buffers), measure({"n": values.float()}, buffers))
    monkeypatch.setattr(torch, "autocast", lambda *args: pytest.fail("autocast"))
    again = all_shown(TeacherEnsemble(models), x)
    assert all(torch.equal(a, b) for a, b in zip(again, exact, strict=True))
    each = torch.stack([model.module()(x) for model in models])
    assert torch.equal(exact[4], each) and torch.equal(
        exact[0], (each * torch.full((3, 1, 1), 1 / 3)).sum(0)
    )


@pytest.mark.parametrize(
    ("shape", "nz", "count"),
    [
        ((1, 28, 28), 256, 1_834_305), ((3, 32, 32), 256, 2_328_899), ((3, 64, 64), 256, 8_644_931),
        ((1, 28, 28), 100, 855_873), ((3, 32, 32), 100, 1_050_947), ((3, 64, 64), 100, 3_533_123),
    ],
)  # fmt: skip
def test_the_generators_parameters(shape: tuple[int, int, int], nz: int, count: int) -> None:
    assert (
        sum(value.numel() for value in generator_spec(shape, nz, 64).module().parameters()) == count
    )


def test_the_generator_is_its_layers_in_a_row() -> None:
    spec = generator_spec((2, 8, 12), 5, 3)
    weights = Weights.init(spec, 0, CPU, DTYPE)
    with torch.random.fork_rng(devices=[]):
        layers = nn.Sequential(
            nn.Linear(5, 6 * 2 * 3), nn.Unflatten(1, (6, 2, 3)), nn.BatchNorm2d(6),
            nn.Upsample(scale_factor=2), nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2), nn.Conv2d(6, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.LeakyReLU(0.2),
            nn.Conv2d(3, 2, 3, padding=1), nn.Sigmoid(),
        ).to(DTYPE)  # fmt: skip
    order = ["linear", "norms.0", "convs.0", "norms.1", "convs.1", "norms.2", "output"]
    named = [
        f"{part}.{kind}"
        for part in order
        for kind in ("weight", "bias")
        if f"{part}.{kind}" in weights.params
    ]
    with torch.no_grad():
        for own, name in zip(layers.parameters(), named, strict=True):
            own.copy_(30 * weights.params[name])
    z = torch.randn((4, 5), generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    net = Net(spec, CPU, DTYPE)
    net.train()
    with torch.no_grad():
        images = net(trees.scale(weights.params, 30), trees.clone(weights.buffers), z)
    assert images.shape == (4, 2, 8, 12) and 0 <= images.min() < 0.3 and 0.7 < images.max() <= 1
    torch.testing.assert_close(images, layers(z).detach(), rtol=1e-10, atol=1e-12)


def test_the_generators_weights_are_drawn_narrowly_and_anew() -> None:
    spec = generator_spec((1, 8, 8), 32, 16)
    first, again, other = (
        Weights.init(spec, seed, CPU, torch.float32).params for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, value in first.items():
        if name.endswith("bias"):
            assert value.abs().max() == 0
        else:
            assert not torch.equal(value, other[name])
            centre = 1.0 if name.startswith("norms") else 0.0
            assert value.mean() == pytest.approx(centre, abs=0.02) and 0.01 < value.std() < 0.03


@pytest.mark.parametrize("shape", [(1, 6, 8), (1, 8, 9), (64,)])
def test_images_that_no_generator_makes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot make samples of this shape"):
        generator_spec(shape, 256, 64)


def test_the_bank_rounds_and_stays_in_the_clients_domain() -> None:
    """Stored images differ by at most half an 8-bit step, or were cut off below.

    Real images that are normalised like the clients' come back bit-identical.
    """
    x = torch.rand((5, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    y = torch.arange(5)
    rounded, cut = (stored(x, y, rounding)["x"] / 255.0 for rounding in ("round", "floor"))  # type: ignore[arg-type]
    assert (rounded - x).abs().max() <= 1 / 510 + 1e-7
    assert (cut - x).max() <= 1e-7 and 1 / 510 < (x - cut).max() <= 1 / 255
    pixels = torch.arange(256, dtype=torch.uint8).reshape(4, *SHAPE)
    real = Samples(pixels, y[:4], (0.3,), (0.4,))
    again = samples_of(
        [stored(pixels[:3] / 255.0, y[:3]), stored(pixels[3:] / 255.0, y[3:4])], real.domain
    )
    assert torch.equal(again.inputs(slice(0, 4)), real.inputs(slice(0, 4))) and torch.equal(
        again.y, y[:4]
    )
    assert torch.equal(again.inputs(slice(0, 4)), real.domain.normalise(pixels / 255.0))


def test_views_of_images() -> None:
    crop = Augment(flip=0.0, crop_padding=3, crop_probability=0.5)
    clients, plain = InputDomain(augment=crop), InputDomain()
    assert augmentation("clients", clients) is crop and augmentation("clients", plain) is None
    assert augmentation("none", clients) is None
    assert augmentation("authors", clients) == Augment(
        flip=0.5, crop_padding=3, crop_probability=0.5
    )
    assert augmentation("authors", plain) == Augment(flip=0.5)
    assert augmentation("crop_flip", plain) == Augment(flip=0.5, crop_padding=4)


def test_a_view_normalises_as_the_clients_do() -> None:
    env = small_world("dense").env
    images = torch.rand((5, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=DTYPE)
    assert torch.equal(View.of("none", env, "name").inputs(images, 0), env.domain.normalise(images))
    crops = [
        View.of("crop_flip", at, "name").inputs(images, step)
        for at in (env, env.at(0, 1))
        for step in (0, 0, 1)
    ]
    assert torch.equal(crops[0], crops[1])
    assert not any(
        torch.equal(crops[0], other) for other in (*crops[2:], env.domain.normalise(images))
    )
