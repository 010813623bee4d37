"""Every YAML of conf/model builds the network that its header describes."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fedexp.core.errors import ConfigError
from fedexp.core.weights import ModelSpec

CONF = Path(__file__).parents[2] / "conf" / "model"
MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)
# Input shape of the paper's data set, number of parameters for 10 classes, and number
# of buffers
EXPECTED = {
    "mlp": (DIGITS, 64 * 64 + 64 + 650, 0),
    "mlp_784_200": (MNIST, 159_010, 0),
    "mlp_784_400_200_100": (MNIST, 414_600, 0),
    "mlp_nafi_100": (MNIST, 79_510, 0),
    "cnn_mcmahan": (MNIST, 1_663_370, 0),
    "cnn_mcmahan_valid": (MNIST, 582_026, 0),
    "cnn_maecho": (CIFAR, 4_971_368, 0),
    "cnn_mnist": (MNIST, 29_034, 6),
    "cnn1": (CIFAR, 122_570, 0),
    "cnn2": (CIFAR, 319_242, 0),
    "cnn_cifar100": (CIFAR, 1_097_188 - 2_049 * 90, 0),
    "convnet_nafi": (CIFAR, 62_006, 0),
    "lenet": (MNIST, 431_080, 0),
    "lenet5": (MNIST, 44_426, 0),
    # The terms are 18 convolutions, their norms and the 1x1 convolution
    "unet": (CIFAR, 13_383_360 + 7_936 + 650, 54),
    # The first term is the decoder, and the others are the encoder
    "cvae": (
        MNIST,
        541_712 + (794 * 512 + 512) + (512 * 256 + 256) + 2 * (256 * 20 + 20),
        0,
    ),
    "wrn_16_1": (CIFAR, 175_066, 39),
    "wrn_40_1": (CIFAR, 563_930, 111),
    "resnet18_gn": (CIFAR, 11_181_642, 0),
    "resnet18_gn_cifar": (CIFAR, 11_173_962, 0),
    "resnet18_bn": (CIFAR, 11_181_642, 60),
    "resnet18_bn_cifar": (CIFAR, 11_173_962, 60),
    # The first term is torchvision's network without its last layer. The others are the
    # two tuned layers
    "resnet18_features": (
        CIFAR,
        11_176_512 + 512 * 256 + 2_560,
        60,
    ),
    "resnet34_features": (CIFAR, 21_284_672 + 512 * 256 + 2_560, 108),
}
# The 8x8 digits are too small for these models. They have 5x5 convolutions or three 3x3
# convolutions without padding, or four poolings, which need 16x16
NO_DIGITS = {
    "cnn_mcmahan_valid",
    "convnet_nafi",
    "lenet",
    "lenet5",
    "unet",
    "cnn1",
    "cnn2",
    "cnn_cifar100",
}


def spec(name, shape):
    config = OmegaConf.create(
        {"dataset": {"mean": [0.5], "std": [0.5]}, "model": OmegaConf.load(CONF / f"{name}.yaml")}
    )
    node = OmegaConf.to_container(config, resolve=True)["model"]
    if "random_features" in node:
        # The tests have no file of weights
        node["random_features"] = True
    return ModelSpec.of(node, shape, 10)


def test_every_file_has_its_row():
    assert {path.stem for path in CONF.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_and_buffers(name):
    shape, parameters, buffers = EXPECTED[name]
    with torch.device("meta"):
        model = spec(name, shape).module()
        assert model.eval()(torch.empty(2, *shape)).shape == (
            2,
            10,
            *(shape[1:] if name == "unet" else ()),
        )
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.buffers())) == buffers


@pytest.mark.parametrize("name", EXPECTED)
def test_adapts_to_the_digits_or_says_that_they_are_too_small(name):
    with torch.device("meta"):
        if name in NO_DIGITS:
            with pytest.raises(ConfigError, match="8x8"):
                spec(name, DIGITS).module()
        else:
            assert spec(name, DIGITS).module().eval()(torch.empty(2, *DIGITS)).shape == (2, 10)
