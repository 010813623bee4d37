"""The image generator of FedSyn and related methods.

Its input is noise. It is unconditional, so it does not get a class.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.errors import ConfigError
from fedexp.core.weights import ModelSpec


class Generator(nn.Module):
    """A network that maps noise z (b, nz) to images (b, c, H, W) in (0, 1).

    The images have c channels. The network is always used in training mode. Its layers
    are:

    1. Linear to (2 ngf, H / 4, W / 4), BatchNorm.
    2. Twice: nearest-neighbour upsampling by 2, 3x3 convolution without bias (to 2 ngf,
       then ngf channels), BatchNorm, LeakyReLU 0.2.
    3. 3x3 convolution to c channels, sigmoid.

    Weights of linear and convolutional layers are drawn from N(0, 0.02^2), scales of
    BatchNorms from N(1, 0.02^2). Biases are 0.

    Args:
        shape: Shape (c, H, W) of an image. H and W are multiples of 4.
        nz: Length of a noise vector z.
        ngf: Number of channels before the last convolution.
    """

    def __init__(self, *, shape: tuple[int, int, int], nz: int = 256, ngf: int = 64) -> None:
        super().__init__()
        require(min(nz, ngf) >= 1, f"nz and ngf must be at least 1, got {nz=}, {ngf=}")
        c, height, width = shape
        require(
            height % 4 == width % 4 == 0,
            f"height and width must be multiples of 4, got {height} x {width}",
        )

        self.start = (2 * ngf, height // 4, width // 4)
        self.linear = nn.Linear(nz, math.prod(self.start))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (2 * ngf, 2 * ngf, ngf))
        self.convs = nn.ModuleList(
            nn.Conv2d(2 * ngf, n, 3, padding=1, bias=False) for n in (2 * ngf, ngf)
        )
        self.output = nn.Conv2d(ngf, c, 3, padding=1)

        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                nn.init.normal_(
                    module.weight, 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0, 0.02
                )
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, z: Tensor) -> Tensor:
        x = self.linear(z).unflatten(1, self.start).contiguous(memory_format=torch.channels_last)
        x = self.norms[0](x)
        for conv, norm in zip(self.convs, self.norms[1:], strict=True):
            x = functional.leaky_relu(norm(doubled(x, cast(Tensor, conv.weight))), 0.2)
        return torch.sigmoid(self.output(x))


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``conv2d(interpolate(x, scale_factor=2), weight, padding=1)`` faster.

    `weight` is a 3x3 kernel. The upsampled tensor is not formed. Several weights
    multiply the same pixel of x and are summed first. An output value then needs 4
    products instead of 9. The computation is a transposed convolution of stride 2. Its
    4x4 kernel contains the sums of 2x2 neighbouring weights.
    """
    # On CUDA, weights are channels last. PyTorch 2.11 computes a wrong gradient of a
    # padded pooling there if its input has this layout (pytorch/pytorch#188344).
    flipped = weight.flip(2, 3).contiguous()
    kernel = functional.avg_pool2d(flipped, 2, stride=1, padding=1, divisor_override=1)
    return functional.conv_transpose2d(x, kernel.transpose(0, 1), stride=2, padding=1)


def generator_spec(shape: tuple[int, ...], nz: int, ngf: int) -> ModelSpec:
    """Return the spec of a generator of images of `shape`.

    `nz` and `ngf` are those of `Generator`.

    Raises:
        ConfigError: `shape` is not (c, H, W) with multiples of 4 for H and W.
    """
    if len(shape) != 3 or shape[1] % 4 or shape[2] % 4:
        raise ConfigError(
            "the generator cannot make samples of this shape",
            where="dataset",
            expected="images (channels, height, width), height and width multiples of 4",
            got=f"({', '.join(map(str, shape))})",
            do="choose another data set, or pad its images",
        )
    return ModelSpec(
        f"{__name__}.{Generator.__name__}", (("ngf", ngf), ("nz", nz), ("shape", tuple(shape)))
    )
