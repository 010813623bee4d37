"""U-Net (Ronneberger et al. 2015) with bilinear upsampling and BatchNorm.

The number of channels of every convolution is configurable.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require

_Widths = tuple[tuple[int, ...], ...]


class Block(nn.Module):
    """3x3 convolutions, each followed by BatchNorm (if `norm`) and ReLU.

    Inputs are padded with one zero on each side, which keeps height and width.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], norm: bool, bias: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=bias) for a, b in pairwise((inputs, *widths))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths if norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, widths[-1], h, w)."""
        for index, conv in enumerate(self.convs):
            x = conv(x)
            x = torch.relu(self.norms[index](x) if self.norms else x)
        return x


class UNet(nn.Module):
    """A U-Net: blocks of convolutions on shrinking feature maps, then on growing maps.

    In the contracting path (`down`), a 2x2 max pool precedes every block except the
    first. In the expanding path (`up`), the height and width of the maps are doubled
    bilinearly before each block. The doubled maps are then concatenated to the maps of
    equal size from the contracting path, which come first. The last layer is a 1x1
    convolution with biases, whose outputs are the logits.

    NAFI (Xiao & Cheng 2023) trains "U-Net with batch normalization" of 19 layers and
    gives no further details. The defaults agree with this description: there are 18 3x3
    convolutions and one 1x1 convolution, and upsampling has no weights. The following
    is assumed:

    - The first four blocks of the contracting path have 64, 128, 256 and 512 channels,
      as in Ronneberger's network. The fifth block has 512 channels instead of 1024. The
      inputs of the blocks in the expanding path then have 1024, 512, 256 and 128
      channels, as in Ronneberger's network.
    - Convolutions are padded, so masks have the size of the images. Ronneberger's
      network crops instead.
    - BatchNorm (momentum 0.1, affine, eps 1e-5) follows each 3x3 convolution, before
      the ReLU. The convolution then needs no biases.
    - Weights have torch's initialisation.

    Args:
        input_shape: (channels, height, width). Height and width must be multiples of
            ``2 ** (len(down) - 1)``.
        num_classes: Number of logits per pixel. It is 1 for masks.
        down: Output channels of the convolutions in the contracting path, one tuple per
            block. The block with the largest maps is first.
        up: Output channels of the convolutions in the expanding path, one tuple per
            block. The block with the smallest maps is first. `up` has one block fewer
            than `down`.
        norm: ``batch`` for BatchNorm, or ``none``.
        bias: Whether the 3x3 convolutions have biases.
    """

    head_module: ClassVar[str] = "output"

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        num_classes: int,
        down: _Widths = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)),
        up: _Widths = ((256, 256), (128, 128), (64, 64), (64, 64)),
        norm: Literal["none", "batch"] = "batch",
        bias: bool = False,
    ) -> None:
        super().__init__()

        require(
            len(input_shape) == 3,
            f"a U-Net takes images (channels, height, width), got samples of {input_shape}",
        )

        require(
            len(down) == len(up) + 1,
            f"up needs one block fewer than down, got {len(down)} down and {len(up)} up",
        )
        require(
            all(block and min(block) >= 1 for block in (*down, *up)) and num_classes >= 1,
            f"every block needs a convolution, and every convolution a channel, got {down=}, {up=}",
        )

        step = 2 ** len(up)
        require(
            input_shape[1] % step == 0 and input_shape[2] % step == 0,
            f"height and width must be multiples of {step} for {len(up)} poolings, "
            f"got {input_shape[1]}x{input_shape[2]}: "
            "set dataset.shape, or fewer blocks in down and up",
        )

        into = (input_shape[0], *(block[-1] for block in down))
        self.down = nn.ModuleList(
            Block(inputs, block, norm == "batch", bias)
            for inputs, block in zip(into, down, strict=False)
        )

        self.up = nn.ModuleList()
        inputs = into[-1]
        for skipped, block in zip(into[-2:0:-1], up, strict=True):
            self.up.append(Block(skipped + inputs, block, norm == "batch", bias))
            inputs = block[-1]

        self.output = nn.Conv2d(inputs, num_classes, 1)

    @staticmethod
    def with_widths(kwargs: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
        """Return constructor arguments for a network with other widths.

        Args:
            kwargs: Constructor arguments of the present network.
            widths: New output channels of the 3x3 convolutions, by the names of their
                weights.
        """
        return {
            side: tuple(
                tuple(widths[f"{side}.{level}.convs.{index}.weight"] for index in range(len(block)))
                for level, block in enumerate(kwargs[side])
            )
            for side in ("down", "up")
        }

    @staticmethod
    def without_batch_norm(kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that change for a network without BatchNorm.

        Each BatchNorm can be folded into the convolution before it, which then needs a
        bias.
        """
        return {"norm": "none", "bias": True}

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, num_classes, height, width).

        The outputs are logits.
        """
        seen: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            seen.append(x)
        for block, skipped in zip(self.up, seen[-2::-1], strict=True):
            x = functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = block(torch.cat([skipped, x], 1))
        logits: Tensor = self.output(x)
        return logits
