import pytest
import torch

from fedexp.core.seeds import seed_of, torch_generator
from fedexp.models.mlp import MLP


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("mlp tests"))
        yield


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_mlp_has_expected_number_of_parameters():
    image = {"input_shape": (1, 28, 28), "num_classes": 10}
    assert count(MLP(**image, hidden=(400, 200, 100), bias=False)) == 414_600
    assert count(MLP(**image, hidden=(200,))) == 784 * 200 + 200 + 200 * 10 + 10
    assert count(MLP(**image, hidden=())) == 7850


def test_mlp_forward_equals_its_formula():
    model = MLP(input_shape=(2, 3, 4), num_classes=5, hidden=(7, 6)).double()
    x = torch.randn(9, 2, 3, 4, dtype=torch.float64, generator=torch_generator("x"))
    h = x.reshape(9, 24)
    for name in ("hidden.0", "hidden.1"):
        h = (
            h @ model.get_parameter(f"{name}.weight").T + model.get_parameter(f"{name}.bias")
        ).clamp(min=0)
    expected = h @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(model(x), expected)
    assert model(x).shape == (9, 5)


def test_no_biases_means_homogeneous():
    model = MLP(input_shape=(1, 4, 4), num_classes=3, hidden=(8, 8), bias=False).double()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch_generator("x"))
    torch.testing.assert_close(model(3 * x), 3 * model(x))


def test_default_init_is_uniform_by_fan_in():
    model = MLP(input_shape=(1, 28, 28), num_classes=10, hidden=(400,))
    for name, fan_in in (("hidden.0", 784), ("output", 400)):
        weight, bound = model.get_parameter(f"{name}.weight"), fan_in**-0.5
        assert weight.abs().max().item() <= bound
        assert weight.abs().max().item() > 0.99 * bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert model.get_parameter(f"{name}.bias").abs().max().item() <= bound


def test_normal_init_is_pfnm_s():
    model = MLP(input_shape=(1, 28, 28), num_classes=10, hidden=(100, 100), init="normal")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.1))
        else:
            n = parameter.numel()
            assert abs(parameter.mean().item()) < 5 * 0.1 / n**0.5
            assert abs(parameter.std().item() / 0.1 - 1) < 5 / (2 * n) ** 0.5


def test_evaluation_is_pure_even_with_dropout():
    model = MLP(input_shape=(1, 8, 8), num_classes=10, dropout=0.5).eval()
    x = torch.randn(4, 1, 8, 8, generator=torch_generator("x"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(model(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_hidden_layer_drops_on_its_own():
    model = MLP(input_shape=(1, 8, 8), num_classes=10, hidden=(16, 16), dropout=0.5).train()
    asked = []
    for name, module in model.named_modules():
        if name.startswith("dropouts."):
            module.stream = name
            module.noise = lambda stream, shape: asked.append((stream, shape)) or torch.ones(shape)
    model(torch.zeros(4, 1, 8, 8))
    assert asked == [("dropouts.0", (4, 16)), ("dropouts.1", (4, 16))]


@pytest.mark.parametrize(
    "arguments",
    [
        {"hidden": (0,)},
        {"hidden": (8, -1)},
        {"dropout": 1.0},
        {"dropout": -0.5},
        {"input_shape": (1, 0, 8)},
    ],
)
def test_mlp_with_impossible_arguments_raises(arguments):
    with pytest.raises(ValueError, match="at least"):
        MLP(**({"input_shape": (1, 8, 8), "num_classes": 10} | arguments))
