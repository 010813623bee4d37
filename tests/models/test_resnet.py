import pytest
import torch
from torch import nn

from fedexp.core.seeds import seed_of, torch_generator
from fedexp.models.resnet import ResNet

CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10}


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of("resnet tests"))
        yield


def images(batch, dtype=torch.float32, side=32):
    return torch.randn(batch, 3, side, side, dtype=dtype, generator=torch_generator("x"))


def on_meta(**arguments):
    with torch.device("meta"):
        return ResNet(**arguments)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("stem", "classes", "expected"),
    [
        ("imagenet", 10, 11_181_642),
        ("imagenet", 100, 11_227_812),
        ("imagenet", 200, 11_279_112),
        # The number is equal to that of torchvision's resnet18
        ("imagenet", 1000, 11_689_512),
        ("cifar", 10, 11_173_962),
        ("cifar", 100, 11_220_132),
        ("cifar", 200, 11_271_432),
    ],
)
def test_resnet_has_expected_number_of_parameters(norm, stem, classes, expected):
    model = on_meta(input_shape=(3, 32, 32), num_classes=classes, norm=norm, stem=stem)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_depth_34_has_torchvision_s_parameter_count():
    model = on_meta(input_shape=(3, 224, 224), num_classes=1000, depth=34, norm="batch")
    assert sum(p.numel() for p in model.parameters()) == 21_797_672


@pytest.mark.parametrize(
    ("stem", "side", "sides"),
    [
        ("imagenet", 32, [16, 8, 8, 4, 2, 1]),
        ("imagenet", 64, [32, 16, 16, 8, 4, 2]),
        ("cifar", 32, [32, 32, 32, 16, 8, 4]),
    ],
)
def test_feature_map_sizes(stem, side, sides):
    model = on_meta(input_shape=(3, side, side), num_classes=10, stem=stem)
    seen = []
    for module in (model.conv, model.pool, *model.stages):
        module.register_forward_hook(
            lambda module, inputs, output: seen.append(tuple(output.shape[1:]))
        )
    logits = model(torch.empty(2, 3, side, side, device="meta"))
    channels = [64, 64, 64, 128, 256, 512]
    assert seen == [(c, s, s) for c, s in zip(channels, sides, strict=True)]
    assert logits.shape == (2, 10)


@pytest.mark.parametrize(("stem", "expected"), [("imagenet", 37e6), ("cifar", 0.56e9)])
def test_multiplications_of_a_32x32_image(stem, expected):
    model = on_meta(**CIFAR, stem=stem)
    total = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(
                lambda m, inputs, out: total.append(m.weight.numel() * out[0, 0].numel())
            )
    model(torch.empty(1, 3, 32, 32, device="meta"))
    assert sum(total) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("norm", "kind"), [("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)])
def test_one_norm_of_the_asked_kind_after_each_convolution(norm, kind):
    model = on_meta(**CIFAR, norm=norm)
    layers = [
        m for m in model.modules() if isinstance(m, nn.Conv2d | nn.GroupNorm | nn.BatchNorm2d)
    ]
    assert len(layers) == 40
    for conv, following in zip(layers[::2], layers[1::2], strict=True):
        assert isinstance(conv, nn.Conv2d)
        assert conv.bias is None
        assert type(following) is kind
        assert following.eps == 1e-5
        assert following.weight.shape == (conv.out_channels,)
    if norm == "group":
        assert {m.num_groups for m in layers[1::2]} == {2}
        assert not dict(model.named_buffers())


def test_every_convolution_is_followed_by_its_norm_so_its_scale_cancels():
    model = ResNet(**CIFAR, width=8).double()
    x = images(2, torch.float64)
    with torch.no_grad():
        before = model(x)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(7)
        # The result differs slightly, because eps = 1e-5 is not scaled
        torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


def test_group_norm_treats_samples_alone_and_groups_together():
    model = ResNet(**CIFAR, width=8, groups=4, stem="cifar").double().train()
    x = images(4, torch.float64)
    torch.testing.assert_close(model(x)[1:3], model(x[1:3]))
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(x)
    groups = seen[0].reshape(4, 4, -1)
    torch.testing.assert_close(
        groups.mean(2), torch.zeros(4, 4, dtype=torch.float64), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        groups.var(2, correction=0), torch.ones(4, 4, dtype=torch.float64), rtol=0, atol=1e-3
    )


def test_batch_norm_normalises_channels_in_training_and_updates_buffers_only_there():
    model = ResNet(**CIFAR, width=8, norm="batch", stem="cifar").double()
    before = {name: value.clone() for name, value in model.named_buffers()}
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = images(4, torch.float64)
    assert torch.equal(model.eval()(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    model.train()(x)
    torch.testing.assert_close(
        seen[-1].mean((0, 2, 3)), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9
    )
    assert not any(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_evaluation_is_pure():
    model = ResNet(**CIFAR, width=8).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = images(2)
    assert torch.equal(model(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_kaiming_init_goes_by_fan_out():
    model = ResNet(**CIFAR, width=16)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            expected = (2 / (weight.shape[0] * weight.shape[2] * weight.shape[3])) ** 0.5
            assert abs(weight.std().item() / expected - 1) < 5 / (2 * weight.numel()) ** 0.5
        elif isinstance(module, nn.GroupNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
    assert model.output.weight.abs().max().item() <= 128**-0.5


def test_default_init_is_torch_s():
    for module in ResNet(**CIFAR, width=16, norm="batch", init="default").modules():
        if isinstance(module, nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5
            assert 0.9 * bound < module.weight.abs().max().item() <= bound


def test_global_pool_sees_the_whole_map_and_a_window_only_its_corner():
    def features(final_pool, last_map):
        model = ResNet(**CIFAR, width=4, stem="cifar", final_pool=final_pool)
        model.stages[-1].register_forward_hook(lambda module, inputs, output: last_map)
        seen = []
        model.output.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        model(images(2))
        return seen[0]

    last = torch.randn(2, 32, 4, 4, generator=torch_generator("map"))
    torch.testing.assert_close(features(None, last), last.sum((2, 3)) / 16)
    torch.testing.assert_close(features(3, last), last[:, :, :3, :3].sum((2, 3)) / 9)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 1, 1), (3, 33, 47)])
def test_any_image_size_works(stem, shape):
    model = ResNet(input_shape=shape, num_classes=3, width=4, stem=stem)
    assert model(torch.zeros(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "groups must divide width"),
        ({"width": 0}, "at least 1"),
        ({"input_shape": (3, 0, 32)}, "at least 1"),
        ({"input_shape": (64,)}, "takes images"),
        ({"final_pool": 3}, r"last map of 1x1 exactly once, got 3 for images of 32x32"),
        ({"stem": "cifar", "final_pool": 2}, "last map of 4x4"),
        ({"stem": "cifar", "final_pool": 0}, "last map of 4x4"),
    ],
)
def test_resnet_with_impossible_arguments_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet(**(CIFAR | arguments))
