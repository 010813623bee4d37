"""ResNet-18 and ResNet-34 with GroupNorm or BatchNorm, for large or for 32x32 images.

Reference: He et al. 2016, Table 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.models.heads import head

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # basic blocks of each stage


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each with a norm, whose output is added to the input.

    If the shape of the output differs from that of the input, the output is added to a
    1x1 projection of the input.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))
            if stride != 1 or inputs != width
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, width, h', w').

        h' is ceil(h / stride), and w' is ceil(w / stride).
        """
        residual = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A stem, four stages of basic blocks, an average pool and a linear output.

    The stem is the first convolution with its norm and pooling. The last three stages
    halve height and width. With ``stem=imagenet``, images of up to 32x32 have a last
    map of 1x1. With ``norm=batch``, training batches of one sample are skipped, because
    BatchNorm needs several values to compute a variance.

    Args:
        input_shape: (channels, height, width). Any size works.
        num_classes: Number of logits.
        depth: 18 or 34.
        norm: ``group`` is GroupNorm with `groups` groups, ``batch`` is BatchNorm
            (momentum 0.1). Both are affine with eps 1e-5.
        groups: Number of GroupNorm's groups. It must divide `width`.
        stem: ``imagenet`` is a 7x7 convolution of stride 2 and a 3x3 max pool of stride
            2 (32x32 images become maps of 8x8). ``cifar`` is a 3x3 convolution of
            stride 1 without pooling.
        init: Initialisation of the convolutions. ``kaiming`` draws weights from
            N(0, 2 / fan_out), ``default`` is torch's. In both cases, the scales of
            norms start at 1 and their shifts at 0, and the output layer has torch's
            default initialisation.
        width: Channels of the stem and the first stage. Each later stage has twice the
            channels of the stage before it.
        final_pool: Window of the average pool after the last stage. The window must fit
            exactly once into the last feature map. None means the whole map.
        cosine_scale: Scale of a cosine head (`fedexp.models.heads.CosineHead`). None
            means a linear head.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        num_classes: int,
        depth: Literal[18, 34] = 18,
        norm: Literal["group", "batch"] = "group",
        groups: int = 2,
        stem: Literal["imagenet", "cifar"] = "imagenet",
        init: Literal["kaiming", "default"] = "kaiming",
        width: int = 64,
        final_pool: int | None = None,
        cosine_scale: float | None = None,
    ) -> None:
        super().__init__()
        require(
            len(input_shape) == 3,
            f"a ResNet takes images (channels, height, width), got samples of {input_shape}",
        )
        require(
            min(*input_shape, width, groups, num_classes) >= 1,
            "width, groups and the image's sides must be at least 1, "
            f"got {width=}, {groups=}, {input_shape=}",
        )
        require(
            norm == "batch" or width % groups == 0,
            f"groups must divide width, got {groups=}, {width=}",
        )

        if final_pool is not None:
            halvings = 5 if stem == "imagenet" else 3
            # Each halving of height and width rounds up
            last = [-(-side // 2**halvings) for side in input_shape[1:]]
            require(
                all(1 <= final_pool <= side < 2 * final_pool for side in last),
                f"final_pool must fit the last map of {last[0]}x{last[1]} exactly once, "
                f"got {final_pool} for images of {input_shape[1]}x{input_shape[2]}",
            )

        def make_norm(channels: int) -> nn.Module:
            return nn.GroupNorm(groups, channels) if norm == "group" else nn.BatchNorm2d(channels)

        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv = nn.Conv2d(
            input_shape[0], width, kernel, stride, padding=kernel // 2, bias=False
        )
        self.norm = make_norm(width)
        self.pool: nn.Module = (
            nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()
        )

        self.stages = nn.ModuleList()
        inputs = width
        for stage, count in enumerate(_BLOCKS[depth]):
            outputs = width << stage
            first = BasicBlock(inputs, outputs, 2 if stage > 0 else 1, make_norm)
            others = (BasicBlock(outputs, outputs, 1, make_norm) for _ in range(count - 1))
            self.stages.append(nn.Sequential(first, *others))
            inputs = outputs

        self.final_pool = final_pool
        self.output = head(inputs, num_classes, True, cosine_scale)

        if init == "kaiming":
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to logits (batch, num_classes)."""
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        for stage in self.stages:
            x = stage(x)
        x = (
            x.mean((2, 3))
            if self.final_pool is None
            else functional.avg_pool2d(x, self.final_pool).flatten(1)
        )
        logits: Tensor = self.output(x)
        return logits
