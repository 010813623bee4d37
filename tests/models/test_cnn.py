import pytest
import torch
from torch.nn import functional

from fedexp.core.dropout import Dropout
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.models.cnn import ConvNet

MNIST = {"input_shape": (1, 28, 28), "num_classes": 10}
CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10}
MAECHO = CIFAR | {
    "channels": (64, 128, 256),
    "kernel": 3,
    "hidden": (1000, 500),
    "bias": False,
    "conv_dropout": 0.2,
    "fc_init": "xavier_normal",
}


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("cnn tests"))
        yield


def count(**arguments):
    with torch.device("meta"):
        return sum(p.numel() for p in ConvNet(**arguments).parameters())


def test_convnet_has_expected_number_of_parameters():
    assert count(**MNIST) == 1_663_370
    assert count(**MNIST, padding="valid") == 582_026
    assert (
        count(**MAECHO)
        == 27 * 64 + 9 * (64 * 128 + 128 * 256) + 4096 * 1000 + 1000 * 500 + 500 * 10
    )
    # This is LeNet, with linear layers of widths 800-500-10
    assert count(**MNIST, channels=(20, 50), padding="valid", hidden=(500,)) == 431_080


def test_lenets_reach_their_linear_parts_with_the_papers_widths():
    lenet = ConvNet(**MNIST, channels=(20, 50), padding="valid", hidden=(500,))
    nafi = ConvNet(**CIFAR, channels=(6, 16), padding="valid", hidden=(120, 84))
    assert [layer.in_features for layer in (*lenet.hidden, lenet.output)] == [800, 500]
    assert [layer.in_features for layer in (*nafi.hidden, nafi.output)] == [400, 120, 84]


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convnet_forward_equals_its_formula(padding):
    model = ConvNet(
        input_shape=(2, 12, 10),
        num_classes=4,
        channels=(3, 5),
        kernel=3,
        padding=padding,
        hidden=(7,),
    )
    x = torch.randn(6, 2, 12, 10, generator=torch_generator("x"))
    h = x
    for conv in model.convs:
        if padding == "same":
            h = functional.pad(h, (1, 1, 1, 1))
        # The shape is (batch, channels * 9, positions)
        columns = functional.unfold(h, 3)
        maps = (conv.weight.flatten(1) @ columns + conv.bias[:, None]).clamp(min=0)
        h = functional.max_pool2d(maps.unflatten(2, (h.shape[2] - 2, h.shape[3] - 2)), 2)
    expected = model.output(torch.relu(model.hidden[0](h.flatten(1))))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert model(x).shape == (6, 4)


def test_gradients_are_those_of_relu_dropout_and_pooling_in_the_documented_order():
    model = ConvNet(
        input_shape=(1, 8, 8),
        num_classes=3,
        channels=(4, 5),
        kernel=3,
        hidden=(6,),
        conv_dropout=0.4,
    ).double()
    for drop in model.dropouts:
        drop.noise = lambda name, shape: torch.rand(
            shape, dtype=torch.float64, generator=torch_generator(name, *shape)
        )
    x = torch.randn(7, 1, 8, 8, dtype=torch.float64, generator=torch_generator("x"))
    h = x
    for conv, drop in zip(model.convs, model.dropouts, strict=True):
        h = functional.max_pool2d(drop(torch.relu(conv(h))), 2)
    expected = model.output(torch.relu(model.hidden[0](h.flatten(1))))
    params = list(model.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), params)
    found = torch.autograd.grad(model(x).square().sum(), params)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("channels", [1, 3])
def test_feature_maps_lie_channels_innermost(channels):
    model = ConvNet(input_shape=(channels, 8, 8), num_classes=3, channels=(4, 5), kernel=3)
    laid = []
    for conv in model.convs:
        conv.register_forward_hook(
            lambda conv, x, y: laid.append(y.is_contiguous(memory_format=torch.channels_last))
        )
    model(torch.randn(2, channels, 8, 8))
    assert laid == [True, True]


def test_without_pooling_or_hidden_layers():
    model = ConvNet(
        input_shape=(1, 6, 6),
        num_classes=3,
        channels=(4,),
        kernel=3,
        padding="valid",
        pool=1,
        hidden=(),
    )
    assert model.output.in_features == 4 * 4 * 4
    assert model(torch.zeros(2, 1, 6, 6)).shape == (2, 3)


def test_each_convolution_may_have_its_own_pooling():
    """DENSE's CNN2 does not pool after the last convolution: 128 maps of 4x4."""
    with torch.device("meta"):
        model = ConvNet(
            **CIFAR, channels=(128,) * 3, kernel=3, padding="valid", pool=(2, 2, 1), hidden=()
        )
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert model.output.in_features == 2048
    small = ConvNet(
        input_shape=(1, 8, 8), num_classes=3, channels=(4, 5), kernel=3, pool=(1, 4), hidden=()
    )
    x = torch.randn(3, 1, 8, 8, generator=torch_generator("x"))
    h = functional.max_pool2d(torch.relu(small.convs[1](torch.relu(small.convs[0](x)))), 4)
    torch.testing.assert_close(small(x), small.output(h.flatten(1)))


def test_parameters_of_denses_cnn_for_100_classes():
    arguments = CIFAR | {
        "num_classes": 100,
        "channels": (256, 256, 128),
        "kernel": 3,
        "padding": "valid",
    }
    assert count(**arguments, pool=(2, 2, 1), hidden=()) == 1_097_188


def test_no_biases_means_homogeneous():
    model = ConvNet(
        input_shape=(1, 8, 8), num_classes=3, channels=(4, 4), kernel=3, hidden=(8,), bias=False
    ).double()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64, generator=torch_generator("x"))
    torch.testing.assert_close(model(3 * x), 3 * model(x))


def test_maecho_linear_weights_are_xavier_normal_and_convolutions_default():
    model = ConvNet(**MAECHO)
    for layer in (*model.hidden, model.output):
        n, expected = layer.weight.numel(), (2 / sum(layer.weight.shape)) ** 0.5
        assert abs(layer.weight.std().item() / expected - 1) < 5 / (2 * n) ** 0.5
        # A uniform distribution with this std would end at 1.73 times the std
        assert layer.weight.abs().max().item() > 3 * expected
    for conv in model.convs:
        bound = conv.weight[0].numel() ** -0.5
        assert 0.95 * bound < conv.weight.abs().max().item() <= bound


def test_dropout_follows_each_convolution_and_the_linear_part_has_none():
    model = ConvNet(
        input_shape=(1, 8, 8),
        num_classes=3,
        channels=(4, 6),
        kernel=3,
        hidden=(8,),
        conv_dropout=0.2,
    ).train()
    asked = []
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Dropout)]
    for name, module in layers:
        module.stream = name
        module.noise = lambda stream, shape: asked.append((stream, shape)) or torch.ones(shape)
    model(torch.zeros(2, 1, 8, 8))
    assert asked == [("dropouts.0", (2, 4, 8, 8)), ("dropouts.1", (2, 6, 4, 4))]
    assert not list(ConvNet(**MNIST).dropouts)


def test_evaluation_is_pure_even_with_dropout():
    model = ConvNet(
        input_shape=(1, 8, 8), num_classes=3, channels=(4,), hidden=(8,), conv_dropout=0.2
    ).eval()
    x = torch.randn(4, 1, 8, 8, generator=torch_generator("x"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(model(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_images_too_small_for_the_pools():
    small = {"input_shape": (1, 8, 8), "num_classes": 10}
    ConvNet(**small)
    with pytest.raises(
        ValueError,
        match=r"8x8 are too small.*convolution 2 of 2 \(kernel 5, padding valid, pool 2\)",
    ):
        ConvNet(**small, padding="valid")
    with pytest.raises(ValueError, match=r"28x3 are too small.*convolution 1 of 2"):
        ConvNet(input_shape=(1, 28, 3), num_classes=10, padding="valid")
    with pytest.raises(ValueError, match="too small"):
        ConvNet(**small, channels=(4, 4, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": 4}, "odd kernel"),
        ({"kernel": 0}, "at least 1"),
        ({"pool": 0}, "at least 1"),
        ({"pool": (2, 2, 1)}, "one for each convolution"),
        ({"channels": (8, 0)}, "at least 1"),
        ({"conv_dropout": 1.0}, "below 1"),
        ({"input_shape": (64,)}, "takes images"),
    ],
)
def test_convnet_with_impossible_arguments_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConvNet(**(MNIST | arguments))


def test_batch_norm_follows_each_convolution() -> None:
    model = ConvNet(
        input_shape=(2, 8, 8), num_classes=3, channels=(4, 5), kernel=3, norm="batch"
    ).double()
    assert not any(name.startswith("norms") for name, _ in ConvNet(**MNIST).named_parameters())
    x = torch.randn(6, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = x
    for conv in model.convs:
        y = functional.conv2d(expected, conv.weight, conv.bias, padding=1)
        y = (y - y.mean((0, 2, 3), keepdim=True)) / (
            y.var((0, 2, 3), keepdim=True, correction=0) + 1e-5
        ).sqrt()
        # The norm has scale 1 and shift 0
        expected = functional.max_pool2d(y.relu(), 2)
    h = torch.relu(model.hidden[0](expected.flatten(1)))
    torch.testing.assert_close(model.train()(x), model.output(h))
