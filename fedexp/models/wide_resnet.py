"""Wide residual networks of pre-activation blocks, for 32x32 images.

Reference: Zagoruyko and Komodakis 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedexp.core.build import require
from fedexp.models.heads import head


class PreActivationBlock(nn.Module):
    """A residual block: BatchNorm, ReLU and 3x3 convolution, applied twice.

    The output is added to the input. If the number of channels changes, the output is
    added to a 1x1 projection instead. The projection is applied to the values after the
    first ReLU and has no BatchNorm.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, width, h', w').

        h' is ceil(h / stride), and w' is ceil(w / stride).
        """
        activated = torch.relu(self.norm1(x))
        residual: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(activated))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """A wide residual network for images.

    Its layers are a 3x3 convolution, three groups of blocks, BatchNorm, ReLU, an
    average pool and the head (the output layer). The last two groups halve height and
    width. The weights of a k x k convolution with c output channels are drawn from
    N(0, 2 / (k^2 c)). The scales of BatchNorm layers (momentum 0.1, eps 1e-5) start at
    1 and their shifts at 0. The head's bias starts at 0.

    Args:
        input_shape: (channels, height, width). Any size works.
        num_classes: Number of logits.
        depth: Number of layers, 6 n + 4 for n blocks per group. DENSE uses 16 and 40.
        widen: Factor of the numbers of channels. The groups have 16, 32 and 64 times
            `widen` channels.
        cosine_scale: Scale of a cosine head (`fedexp.models.heads.CosineHead`). None
            means a linear head.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        num_classes: int,
        depth: int = 16,
        widen: int = 1,
        cosine_scale: float | None = None,
    ) -> None:
        super().__init__()
        require(
            len(input_shape) == 3,
            f"a WideResNet takes images (channels, height, width), got samples of {input_shape}",
        )

        require(
            min(*input_shape, widen, num_classes) >= 1,
            f"widen and the image's sides must be at least 1, got {widen=}, {input_shape=}",
        )
        require(
            depth >= 10 and depth % 6 == 4,
            f"depth must be 6 n + 4 (10, 16, 22, 28, 40 ...), got {depth}",
        )

        self.conv = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)

        self.groups = nn.ModuleList()
        inputs = 16
        for group in range(3):
            width = 16 * widen << group
            first = PreActivationBlock(inputs, width, 2 if group > 0 else 1)
            others = (PreActivationBlock(width, width, 1) for _ in range((depth - 4) // 6 - 1))
            self.groups.append(nn.Sequential(first, *others))
            inputs = width

        self.norm = nn.BatchNorm2d(inputs)
        self.output = head(inputs, num_classes, True, cosine_scale)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if self.output.bias is not None:
            nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to logits (batch, num_classes)."""
        x = self.conv(x)
        for group in self.groups:
            x = group(x)
        logits: Tensor = self.output(torch.relu(self.norm(x)).mean((2, 3)))
        return logits
