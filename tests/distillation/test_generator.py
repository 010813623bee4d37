"""The generator is compared with the layers that FedSyn's code lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedexp.core.seeds import torch_generator
from fedexp.core.weights import Weights
from fedexp.distillation.generator import Generator, doubled, generator_spec


def as_listed(own: Generator) -> nn.Sequential:
    """Compute the output with separate upsampling, convolutions and `own`'s weights."""
    layers: list[nn.Module] = [own.linear, nn.Unflatten(1, own.start), own.norms[0]]
    for conv, norm in zip(own.convs, list(own.norms)[1:], strict=True):
        layers += [nn.Upsample(scale_factor=2), conv, norm, nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, own.output, nn.Sigmoid())


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 12), (2, 4, 4)])
def test_images_and_gradients_are_those_of_its_layers(shape: tuple[int, int, int]) -> None:
    random = torch_generator("test", "generator")
    generator = Weights.init(
        generator_spec(shape, 5, 3), 0, torch.device("cpu"), torch.float64
    ).module()
    assert isinstance(generator, Generator)
    # With the initial parameters, all images are nearly grey
    with torch.no_grad():
        for value in generator.parameters():
            value.add_(torch.randn(value.shape, generator=random, dtype=value.dtype), alpha=0.3)
    z = torch.randn(4, 5, generator=random, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(4, *shape, generator=random, dtype=torch.float64)
    values = [z, *generator.parameters()]

    def of(images: Tensor) -> list[Tensor]:
        return [images, *torch.autograd.grad(images, values, upstream)]

    torch.testing.assert_close(of(generator(z)), of(as_listed(generator)(z)), rtol=1e-9, atol=1e-11)


def test_doubling_and_convolving_take_four_products_of_nine() -> None:
    x, weight = torch.ones(2, 3, 5, 6), torch.ones(4, 3, 3, 3)
    with FlopCounterMode(display=False) as ours:
        made = doubled(x, weight)
    with FlopCounterMode(display=False) as theirs:
        plain = nn.functional.conv2d(
            nn.functional.interpolate(x, scale_factor=2), weight, padding=1
        )
    torch.testing.assert_close(made, plain)
    assert 9 * ours.get_total_flops() == 4 * theirs.get_total_flops()
