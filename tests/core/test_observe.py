"""Tests of the observed layer inputs, features, norm inputs and head of a network."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.layers import check_head, layers_of
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.trainer import Trainer
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from tests.engines.compare import assert_same_results
from tests.matching.nets import CLASSES, IMAGE, MODELS, spec_of, weights_of
from tests.models.test_model_configs import CIFAR, EXPECTED
from tests.models.test_model_configs import spec as config_of
from tests.world import CPU, make_data, make_world

DOUBLE = torch.float64
NORMED = {
    "cnn": MODELS["cnn, BatchNorm"],
    "resnet": MODELS["resnet, BatchNorm"],
}


class Bounded(nn.Module):
    """A network whose output differs from the output of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(128, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.output(x.flatten(1)))


class Declared(Bounded):
    """A network that declares its head: two layers and all layers between them."""

    head_module = "head"

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.Linear(CLASSES, 5), nn.Tanh(), nn.Linear(5, CLASSES), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Convolutional(nn.Module):
    """A network without a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.output = nn.Conv2d(2, 4, 3), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.conv(x)))


class Dense(Convolutional):
    """A network whose head is a convolution. Its features are maps."""

    head_module = "output"


HERE = "tests.core.test_observe"


def images(
    count: int = 4, seed: int = 0, shape: tuple[int, ...] = IMAGE, dtype: torch.dtype = DOUBLE
) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def net_of(
    spec: ModelSpec, training: bool, dtype: torch.dtype = DOUBLE, precision: str = "float32"
) -> Net:
    net = Net(spec, CPU, dtype, precision)  # type: ignore[arg-type]
    net.train(training)
    net.set_noise(
        lambda name, shape: torch.rand(
            shape, generator=torch.Generator().manual_seed(seed_of(name))
        )
    )
    return net


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "cvae"])
def test_the_head_of_the_features_is_the_output(name: str, training: bool) -> None:
    spec = config_of(name, EXPECTED[name][0])
    small = {
        key: value
        for key, value in {"width": 4, "channels": (3, 4, 5)}.items()
        if key in dict(spec.kwargs)
    }
    if "channels" in small:
        small["channels"] = small["channels"][: len(dict(spec.kwargs)["channels"])]
    spec = ModelSpec(spec.arch, tuple(sorted({**dict(spec.kwargs), **small}.items())))
    shape = EXPECTED[name][0]
    check_head(spec, shape)
    net, weights = net_of(spec, training, torch.float32), Weights.init(spec, 0, CPU, torch.float32)
    x = images(3, shape=shape, dtype=torch.float32)
    seen = net.observe(weights.params, weights.buffers, x, features=True)
    assert seen.features is not None
    assert torch.equal(net.head(weights.params, weights.buffers, seen.features), seen.output)
    output, bias = weights.params["output.weight"], weights.params.get("output.bias")
    last = (
        F.linear(seen.features, output, bias)
        if output.dim() == 2
        else F.conv2d(seen.features, output, bias)
    )
    assert torch.equal(last, seen.output)


def test_features_and_layer_inputs_by_hand() -> None:
    weights, x = weights_of(MODELS["mlp"], 0), images()
    w = weights.params
    flat = x.flatten(1)
    first = torch.relu(F.linear(flat, w["hidden.0.weight"], w["hidden.0.bias"]))
    second = torch.relu(F.linear(first, w["hidden.1.weight"], w["hidden.1.bias"]))
    seen = net_of(weights.spec, False).observe(w, {}, x, layers="all", features=True)
    expected = {"hidden.0.weight": flat, "hidden.1.weight": first, "output.weight": second}
    assert list(seen.layers) == list(expected)  # forward order
    for name, value in expected.items():
        torch.testing.assert_close(seen.layers[name], value)
    torch.testing.assert_close(seen.features, second)
    some = net_of(weights.spec, False).observe(w, {}, x, layers=["output.weight"])
    assert list(some.layers) == ["output.weight"] and some.features is None and not some.norms


@pytest.mark.parametrize("name", NORMED)
def test_inputs_of_every_norm_give_the_statistics_that_it_keeps(name: str) -> None:
    """The new statistics are 0.9 times the old ones plus 0.1 times those of the batch.

    The variance of the batch is the unbiased one.
    """
    weights, x = weights_of(NORMED[name], 0), images(6)
    buffers = {key: value.clone() for key, value in weights.buffers.items()}
    seen = net_of(weights.spec, True).observe(weights.params, buffers, x, norms=True)
    assert [f"{norm}.running_mean" for norm in seen.norms] == [
        key for key in buffers if "running_mean" in key
    ]
    for norm, a in seen.norms.items():
        for key, batch in (
            ("running_mean", a.mean((0, 2, 3))),
            ("running_var", a.movedim(1, 0).flatten(1).var(1)),
        ):
            old, new = weights.buffers[f"{norm}.{key}"], buffers[f"{norm}.{key}"]
            torch.testing.assert_close(new, 0.9 * old + 0.1 * batch)


def test_every_norm_of_a_resnet18_is_seen() -> None:
    spec = ModelSpec.of(
        {"_target_": "fedexp.models.resnet.ResNet", "norm": "batch", "width": 2}, CIFAR, 10
    )
    weights = Weights.init(spec, 0, CPU, DOUBLE)
    assert (
        len(
            net_of(spec, False)
            .observe(weights.params, weights.buffers, images(2, shape=CIFAR), norms=True)
            .norms
        )
        == 20
    )


@pytest.mark.parametrize("training", [True, False])
def test_observe_returns_the_output_of_a_plain_call(training: bool) -> None:
    weights, x, net = weights_of(NORMED["cnn"], 0), images(), net_of(NORMED["cnn"], training)
    called, observed = ({k: v.clone() for k, v in weights.buffers.items()} for _ in range(2))
    output = net(weights.params, called, x)
    seen = net.observe(weights.params, observed, x, layers="all", features=True, norms=True)
    assert torch.equal(seen.output, output)
    assert all(torch.equal(called[name], observed[name]) for name in called)


def test_observe_removes_its_hooks_also_after_an_error() -> None:
    weights, net = weights_of(NORMED["cnn"], 0), net_of(NORMED["cnn"], False)
    for x in (images(), images(shape=(3, 8, 8))):
        with pytest.raises(RuntimeError) if x.shape[1] == 3 else nullcontext():
            net.observe(weights.params, weights.buffers, x, layers="all", features=True, norms=True)
        assert not [name for name, module in net.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMED)
def test_vectorised_it_shows_each_models_own(name: str, training: bool) -> None:
    models = [weights_of(NORMED[name], i) for i in range(3)]
    net, xs = net_of(NORMED[name], training), torch.stack([images(seed=i) for i in range(3)])
    params, buffers = (
        {
            key: torch.stack([getattr(m, kind)[key] for m in models])
            for key in getattr(models[0], kind)
        }
        for kind in ("params", "buffers")
    )

    def shown(params, buffers, x):
        seen = net.observe(params, buffers, x, layers="all", features=True, norms=True)
        return (
            seen.output,
            seen.layers,
            seen.features,
            seen.norms,
            net.head(params, buffers, seen.features),
        )

    stacked = torch.vmap(shown)(params, buffers, xs)
    for i, model in enumerate(models):
        own = {key: value.clone() for key, value in model.buffers.items()}
        output, layers, features, norms, logits = shown(model.params, own, xs[i])
        torch.testing.assert_close(stacked[0][i], output)
        torch.testing.assert_close(stacked[2][i], features)
        torch.testing.assert_close(stacked[4][i], logits)
        for found, expected in ((stacked[1], layers), (stacked[3], norms)):
            assert list(found) == list(expected)
            for key, value in expected.items():
                torch.testing.assert_close(found[key][i], value)


def test_under_bf16_all_that_is_shown_is_in_the_models_dtype_and_the_head_rounds_as_the_net() -> (
    None
):
    spec = NORMED["cnn"]
    weights, x = Weights.init(spec, 0, CPU, torch.float32), images(dtype=torch.float32)
    net, exact = net_of(spec, True, torch.float32, "bf16"), net_of(spec, True, torch.float32)
    seen = net.observe(weights.params, weights.buffers, x, layers="all", features=True, norms=True)
    assert seen.features is not None
    shown = (seen.output, seen.features, *seen.layers.values(), *seen.norms.values())
    assert {value.dtype for value in shown} == {torch.float32}
    assert torch.equal(net.head(weights.params, weights.buffers, seen.features), seen.output)
    assert not torch.equal(exact.head(weights.params, weights.buffers, seen.features), seen.output)


@pytest.mark.parametrize(
    ("spec", "shape", "match"),
    [
        (config_of("cvae", (1, 8, 8)), (1, 8, 8), "not that of 'logvar' alone"),
        (spec_of("TwoHeads"), IMAGE, "not that of"),
        (spec_of(f"{HERE}.Bounded"), IMAGE, "not that of 'output' alone"),
        (spec_of(f"{HERE}.Convolutional"), IMAGE, "no linear layer"),
    ],
)
def test_networks_without_a_head_are_refused(
    spec: ModelSpec, shape: tuple[int, ...], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check_head(spec, shape)


@pytest.mark.parametrize(("name", "features"), [("Declared", (4, 3)), ("Dense", (4, 4, 6, 6))])
def test_a_class_may_declare_its_head(name: str, features: tuple[int, ...]) -> None:
    weights, net = (
        weights_of(spec_of(f"{HERE}.{name}"), 0),
        net_of(spec_of(f"{HERE}.{name}"), False),
    )
    check_head(weights.spec, IMAGE)
    seen = net.observe(weights.params, {}, images(), features=True)
    assert seen.features is not None and seen.features.shape == features
    torch.testing.assert_close(net.head(weights.params, {}, seen.features), seen.output)


@dataclass(frozen=True)
class Small(Trainer):
    """A trainer whose loss uses everything that a trainer may observe.

    Its loss is twice the cross-entropy of the head plus the mean square of the
    features.
    """

    def loss(self, net, params, buffers, batch, ctx):
        seen = net.observe(params, buffers, batch.x, layers="all", features=True, norms=True)
        again = F.cross_entropy(net.head(params, buffers, seen.features), batch.y)
        inputs = sum(
            value.square().mean() for value in (*seen.layers.values(), *seen.norms.values())
        )
        return (
            F.cross_entropy(seen.output, batch.y)
            + again
            + 0.1 * seen.features.square().mean()
            + 0.01 * inputs
        )


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_trainer_that_observes_trains_equally_when_stacked(norm: str) -> None:
    model = {
        "_target_": "fedexp.models.cnn.ConvNet",
        "channels": [3],
        "kernel": 1,
        "hidden": [5],
        "norm": norm,
    }
    world = make_world("method=fedavg", model=model, data=make_data((20, 20, 20)))
    start = world.env.initial_weights()
    jobs = [replace(world.env.job(c, start, {}), trainer=Small()) for c in range(3)]
    engine = Vectorized(stack=4)
    assert_same_results(
        list(engine.map(jobs, world.data)), list(Serial().map(jobs, world.data)), 1e-9
    )
    assert engine.stacked_steps


def test_the_order_of_layers_is_the_forward_passes() -> None:
    names = [layer.weight for layer in layers_of(MODELS["resnet, BatchNorm"], IMAGE)]
    assert names[0] == "conv.weight" and names[-1] == "output.weight"
    assert names.index("stages.1.0.conv2.weight") < names.index("stages.1.0.shortcut.0.weight")
