"""Plain convolutional networks as one configurable class.

The class covers the CNN of McMahan et al., the CNN of MA-Echo, LeNet and similar
networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require
from fedexp.core.dropout import Dropout
from fedexp.models.heads import head


class ConvNet(nn.Module):
    """Convolutions of stride 1, then linear layers with ReLU between them.

    Each convolution is followed by BatchNorm (if `norm` is ``batch``), ReLU, dropout
    and max pooling.

    Args:
        input_shape: (channels, height, width).
        num_classes: Number of logits.
        channels: Output channels of each convolution.
        kernel: Height and width of every convolution's kernel. It must be odd if
            `padding` is ``same``.
        padding: ``same`` pads with zeros and keeps height and width. ``valid`` does not
            pad.
        pool: Window and stride of the max pooling. It is one number for all
            convolutions, or one number per convolution. 1 means no pooling.
        hidden: Widths of the hidden linear layers.
        bias: Whether convolutions and linear layers have biases.
        conv_dropout: Probability of elementwise dropout after the ReLU of each
            convolution.
        fc_init: Initialisation of the linear layers. ``default`` is torch's.
            ``xavier_normal`` draws weights from N(0, 2 / (fan_in + fan_out)).
            Convolutions always have torch's default initialisation.
        norm: ``batch`` puts a BatchNorm (momentum 0.1, affine, eps 1e-5) after each
            convolution. ``none`` means no BatchNorm.
        cosine_scale: Scale of a cosine head (`fedexp.models.heads.CosineHead`). None
            means a linear head.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, int, int],
        num_classes: int,
        channels: tuple[int, ...] = (32, 64),
        kernel: int = 5,
        padding: Literal["same", "valid"] = "same",
        pool: int | tuple[int, ...] = 2,
        hidden: tuple[int, ...] = (512,),
        bias: bool = True,
        conv_dropout: float = 0.0,
        fc_init: Literal["default", "xavier_normal"] = "default",
        norm: Literal["none", "batch"] = "none",
        cosine_scale: float | None = None,
    ) -> None:
        super().__init__()
        require(
            len(input_shape) == 3,
            f"a ConvNet takes images (channels, height, width), got samples of {input_shape}",
        )

        pools = (pool,) * len(channels) if isinstance(pool, int) else pool
        require(
            len(pools) == len(channels),
            f"pool needs one window, or one for each convolution, got {pool=}",
        )
        require(
            min(*input_shape, *channels, *hidden, kernel, *pools, num_classes) >= 1,
            "channels, hidden, kernel, pool and the image's sides must be at least 1, "
            f"got {channels=}, {hidden=}, {kernel=}, {pool=}, {input_shape=}",
        )
        require(
            padding == "valid" or kernel % 2 == 1,
            f"padding 'same' needs an odd kernel, got {kernel}",
        )

        pad = kernel // 2 if padding == "same" else 0
        side = tuple(input_shape[1:])
        for index, window in enumerate(pools):
            side = tuple((s + 2 * pad - kernel + 1) // window for s in side)
            require(
                min(side) >= 1,
                f"images of {input_shape[1]}x{input_shape[2]} are too small: nothing is left after "
                f"convolution {index + 1} of {len(channels)} "
                f"(kernel {kernel}, padding {padding}, pool {window})",
            )

        self.pools = pools
        depths = (input_shape[0], *channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, padding=pad, bias=bias) for a, b in pairwise(depths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(depth) for depth in channels if norm == "batch")
        self.dropouts = nn.ModuleList(Dropout(conv_dropout) for _ in channels if conv_dropout)

        widths = (depths[-1] * math.prod(side), *hidden)

        self.hidden = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))
        self.output = head(widths[-1], num_classes, bias, cosine_scale)

        if fc_init == "xavier_normal":
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_normal_(module.weight)

    @staticmethod
    def with_widths(kwargs: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
        """Return constructor arguments for a network with other widths.

        Args:
            kwargs: Constructor arguments of the present network.
            widths: New widths (output units) of convolutions and hidden layers, by the
                names of their weights.
        """
        convs, hidden = range(len(kwargs["channels"])), range(len(kwargs["hidden"]))
        return {
            "channels": tuple(widths[f"convs.{i}.weight"] for i in convs),
            "hidden": tuple(widths[f"hidden.{i}.weight"] for i in hidden),
        }

    @staticmethod
    def without_batch_norm(kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that change for a network without BatchNorm.

        Each BatchNorm can be folded into the convolution before it, which then needs a
        bias.
        """
        return {"norm": "none", "bias": True}

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to logits (batch, num_classes)."""
        x = _channels_innermost(x)
        for index, conv in enumerate(self.convs):
            x = conv(x)
            if self.norms:
                x = self.norms[index](x)
            if self.dropouts:
                x = self.dropouts[index](x)
            if self.pools[index] > 1:
                x = functional.max_pool2d(x, self.pools[index])
            # ReLU is applied after max pooling, because it then has fewer values to
            # process. The order does not change values or gradients.
            x = torch.relu(x)

        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        logits: Tensor = self.output(x)
        return logits


def _channels_innermost(x: Tensor) -> Tensor:
    """Return x of shape (batch, channels, height, width) with channels innermost.

    The order in memory becomes (batch, height, width, channels). All later layers keep
    this order, and max pooling is ten times faster with it on a CPU.
    ``x.contiguous(memory_format=torch.channels_last)`` is not used for two reasons. It
    does not change images of one channel, and `torch.vmap` does not support it.
    """
    n, c, h, w = x.shape
    return x.permute(0, 2, 3, 1).flatten(1).view(n, h, w, c).permute(0, 3, 1, 2)
