"""Tests of nets, weights and specs: replaced tensors, randomness, refused models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedexp.core.errors import ConfigError
from fedexp.core.model_check import check_model
from fedexp.core.net import Net
from fedexp.core.weights import ModelSpec, Weights
from tests.world import CPU


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) + self.shift


class GlobalNoise(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.fc(x.flatten(1)), 0.5, training=self.training)


class Spatial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout2d(0.5)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.drop(x).flatten(1))


class OwnTrain(nn.Module):
    """A network whose own method `train` keeps BatchNorm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def train(self, mode: bool = True) -> OwnTrain:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))


class FrozenNorm(OwnTrain):
    """The same network with frozen running statistics instead."""

    frozen_parameters = ("norm.*",)
    train = nn.Module.train


class RandomFeatures(nn.Module):
    """A network with random numbers that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.projection = nn.Linear(4, 3), torch.randn(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x @ self.projection)


def spec(name: str, **kwargs) -> ModelSpec:
    return ModelSpec(f"{__name__}.{name}", tuple(sorted(kwargs.items())))


def test_initialisation_is_a_function_of_the_seed() -> None:
    one, same, other = (Weights.init(spec("Tied"), seed, CPU, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(one.params["a.weight"], same.params["a.weight"])
    assert not torch.equal(one.params["a.weight"], other.params["a.weight"])


@pytest.mark.parametrize("name", ["OwnTrain", "FrozenNorm"])
def test_a_norm_may_stay_in_evaluation_mode(name: str) -> None:
    weights = Weights.init(spec(name), 1, CPU, torch.float32)
    before = weights.buffers["norm.running_mean"].clone()
    net, x = Net(spec(name), CPU, torch.float32), torch.randn(5, 4, generator=torch.Generator())
    assert not net.has_batch_norm
    for mode in (True, False, True):
        net.train(mode)(weights.params, weights.buffers, x)
        assert torch.equal(weights.buffers["norm.running_mean"], before)


def test_a_network_does_not_depend_on_the_global_generator() -> None:
    weights, x = Weights.init(spec("RandomFeatures"), 1, CPU, torch.float32), torch.ones(1, 4)
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.default_generator.manual_seed(seed)
            net = Net(spec("RandomFeatures"), CPU, torch.float32)
            outputs.append(net(weights.params, weights.buffers, x))
    assert torch.equal(*outputs)


def test_tied_parameters_are_one_and_swap_together() -> None:
    weights = Weights.init(spec("Tied"), 1, CPU, torch.float64)
    assert list(weights.params) == ["a.weight"]
    net = Net(spec("Tied"), CPU, torch.float64)
    x, w = torch.ones(1, 3, dtype=torch.float64), torch.full((3, 3), 2.0, dtype=torch.float64)
    output = net({"a.weight": w}, {"shift": torch.ones(3, dtype=torch.float64)}, x)
    assert torch.equal(output, x @ w.T @ w.T + 1)


def test_binding_follows_the_dictionary() -> None:
    net = Net(spec("Tied"), CPU, torch.float64)
    x, buffers = (
        torch.ones(1, 3, dtype=torch.float64),
        {"shift": torch.zeros(3, dtype=torch.float64)},
    )
    a, b = ({"a.weight": torch.eye(3, dtype=torch.float64) * k} for k in (1, 2))
    assert [float(net(p, buffers, x)[0, 0]) for p in (a, b, a)] == [1.0, 4.0, 1.0]
    a["a.weight"].mul_(3)
    assert float(net(a, buffers, x)[0, 0]) == 9.0


class Still(nn.Module):
    """A network with a parameter that requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1)) * self.scale


class DeclaredStill(Still):
    frozen_parameters = ("scale",)


def test_a_parameter_without_gradient_must_be_declared_as_frozen() -> None:
    with pytest.raises(ConfigError, match="'scale' has requires_grad=False"):
        check_model(spec("Still"), (1, 2, 2), (3,))
    check_model(spec("DeclaredStill"), (1, 2, 2), (3,))


class Pair(nn.Module):
    """A network that returns logits and features."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fc(x.flatten(1)), x


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="output does not fit") as refused:
        check_model(spec("Pair"), (1, 2, 2), (3,))
    assert "a tuple for a batch of 2" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"), [("GlobalNoise", "global generator"), ("Spatial", "Dropout2d")]
)
def test_models_that_draw_from_the_global_generator_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_model(
            spec(name, **({"num_classes": 3} if name == "GlobalNoise" else {})), (1, 2, 2), (3,)
        )


@pytest.mark.parametrize(
    ("shape", "classes", "said"), [((1, 5, 5), 3, "cannot take"), ((1, 2, 2), 7, "does not fit")]
)
def test_models_that_do_not_fit_the_data_are_refused(shape: tuple, classes: int, said: str) -> None:
    fixed = ModelSpec.of({"_target_": f"{__name__}.Fixed"}, shape, classes)
    with pytest.raises(ConfigError, match=said):
        check_model(fixed, shape, (classes,))


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.flatten(1))


def test_spec_checks_the_constructor() -> None:
    node = {"_target_": "fedexp.models.mlp.MLP", "hidden": [8]}
    assert hash(ModelSpec.of(node, (1, 2, 2), 3)) == hash(ModelSpec.of(dict(node), (1, 2, 2), 3))
    for extra, said in (
        ({"hiden": [8]}, "did you mean 'hidden'?"),
        ({"hidden": "x"}, "wrong type"),
        ({"num_classes": 4}, "comes from the data set"),
    ):
        with pytest.raises(ConfigError) as caught:
            ModelSpec.of({**node, **extra}, (1, 2, 2), 3)
        assert said in str(caught.value)


class Normal(nn.Module):
    """Fills parameters with normal numbers in both ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.direct, self.by_init = nn.Linear(2, 3), nn.Linear(3, 1)
        self.direct.weight.data.normal_()
        nn.init.normal_(self.by_init.weight, 0.0, 0.1)


class Seen(TorchDispatchMode):
    """Collects the names of the operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_module_without_values_draws_no_normal_numbers() -> None:
    """torch's version for the meta device imports its compiler, which takes seconds."""
    with Seen() as seen:
        module = spec("Normal").module_without_values()
    assert all(value.is_meta for value in module.parameters())
    assert [tuple(value.shape) for value in module.parameters()] == [(3, 2), (3,), (1, 3), (1,)]
    assert seen.names and "normal_.default" not in seen.names
