import pytest
import torch
from torch import nn
from torch.nn import functional

from fedexp.core.seeds import seed_of, torch_generator
from fedexp.models.heads import CosineHead
from fedexp.models.wide_resnet import WideResNet

CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10}


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("wide resnet tests"))
        yield


@pytest.mark.parametrize(("depth", "widen", "parameters", "norms"), [
    (16, 1, 175_066, 13),
    (40, 1, 563_930, 37),
    # Table 5 of Zagoruyko and Komodakis 2016 reports 36.5 M
    (28, 10, 36_479_194, 25),
])  # fmt: skip
def test_wide_resnet_has_expected_parameters_and_norms(depth, widen, parameters, norms):
    with torch.device("meta"):
        model = WideResNet(**CIFAR, depth=depth, widen=widen)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == norms


def test_multiplications_of_an_image():
    with torch.device("meta"):
        model = WideResNet(**CIFAR)
    total = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(
                lambda m, inputs, out: total.append(m.weight.numel() * out[0, 0].numel())
            )
    model(torch.empty(1, 3, 32, 32, device="meta"))
    assert 2 * sum(total) == pytest.approx(53e6, rel=0.02)


def test_pre_activation_block_equals_its_formula():
    """The projection reads the activated input, and the identity reads the raw one.

    The projection reads the activated input. The identity reads the input before the
    activation.
    """
    model = WideResNet(input_shape=(2, 9, 8), num_classes=3, depth=16).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)

    def norm(m, x):
        shape = (1, -1, 1, 1)
        scale = m.weight / (m.running_var + 1e-5).sqrt()
        return (x - m.running_mean.reshape(shape)) * scale.reshape(shape) + m.bias.reshape(shape)

    def conv(w, x, stride):
        return functional.conv2d(x, w.weight, stride=stride, padding=w.weight.shape[-1] // 2)

    x = torch.randn(2, 2, 9, 8, dtype=torch.float64, generator=torch_generator("x"))
    h = conv(model.conv, x, 1)
    for index, group in enumerate(model.groups):
        for place, block in enumerate(group):
            stride = 2 if index and not place else 1
            a = norm(block.norm1, h).clamp(min=0)
            body = conv(
                block.conv2, norm(block.norm2, conv(block.conv1, a, stride)).clamp(min=0), 1
            )
            h = body + (conv(block.shortcut, a, stride) if stride == 2 else h)
    features = norm(model.norm, h).clamp(min=0).mean((2, 3))
    torch.testing.assert_close(model(x), features @ model.output.weight.T + model.output.bias)


def test_wide_resnet_initialisation_follows_the_paper():
    for module in WideResNet(**CIFAR).modules():
        if isinstance(module, nn.Conv2d):
            w = module.weight
            expected = (2 / (w.shape[0] * w.shape[2] * w.shape[3])) ** 0.5
            assert abs(w.std().item() / expected - 1) < 5 / (2 * w.numel()) ** 0.5
        elif isinstance(module, nn.Linear):
            assert not module.bias.any()


def test_a_head_of_cosines_is_their_scaled_values():
    model = WideResNet(input_shape=(1, 8, 8), num_classes=4, depth=10, cosine_scale=30.0).eval()
    assert isinstance(model.output, CosineHead) and model.output.bias is None
    h = torch.randn(5, 64, generator=torch_generator("h"))
    expected = torch.stack(
        [30 * functional.cosine_similarity(h, row[None]) for row in model.output.weight], 1
    )
    torch.testing.assert_close(model.output(h), expected)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"depth": 18}, r"depth must be 6 n \+ 4"),
    ({"depth": 4}, r"depth must be 6 n \+ 4"),
    ({"widen": 0}, "at least 1"),
    ({"input_shape": (64,)}, "takes images"),
    ({"cosine_scale": 0.0}, "cosine_scale must be positive"),
])  # fmt: skip
def test_wide_resnet_with_impossible_arguments_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        WideResNet(**(CIFAR | arguments))
