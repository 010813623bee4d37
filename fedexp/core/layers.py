"""The linear and convolutional layers of a network, and a check of its head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedexp.core.errors import ConfigError
from fedexp.core.net import LAYERS, Net, Observed
from fedexp.core.seeds import seed_of
from fedexp.core.weights import ModelSpec, Weights, by_spec


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer, whose weight has one row per output unit.

    Args:
        weight: Name of the layer's weight.
        bias: Name of the layer's bias, or None.
        kind: ``linear``, with a weight (out, in), or ``conv``, with a weight (out,
            channels, kernel height, kernel width).
        kernel: Size of a convolution's kernel, (height, width).
        stride: Stride of a convolution, (height, width).
        padding: Padding of a convolution, (height, width).
        dilation: Dilation of a convolution, (height, width).
    """

    weight: str
    bias: str | None
    kind: Literal["linear", "conv"]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


def _layer(name: str, module: nn.Module) -> Layer | None:
    if not isinstance(module, LAYERS):
        return None
    weight = f"{name}.weight".lstrip(".")
    bias = f"{name}.bias".lstrip(".") if module.bias is not None else None
    if isinstance(module, nn.Linear):
        return Layer(weight, bias, "linear")
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise ConfigError(
            f"layer '{name}' is a convolution with groups, padding by name or padding that "
            "is not zeros",
            where="model",
            do="choose a method that does not look into layers, or another model",
        )
    pairs = [
        (int(a), int(b))
        for a, b in (module.kernel_size, module.stride, module.padding, module.dilation)
    ]
    return Layer(weight, bias, "conv", *pairs)


def layers_in(net: Net) -> dict[str, Layer]:
    """Return the linear and convolutional layers by the names of their weights.

    Their order is not necessarily the forward order.
    """
    layers = [_layer(name, module) for name, module in net.named_modules()]
    return {layer.weight: layer for layer in layers if layer is not None}


@by_spec
def layers_of(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[Layer, ...]:
    """Return the linear and convolutional layers in forward order.

    The last layer is the output layer.
    """
    net, seen = _observe(spec, input_shape, layers="all")
    layers = layers_in(net)
    return tuple(layers[name] for name in seen.layers)


@by_spec
def check_head(spec: ModelSpec, input_shape: tuple[int, ...]) -> None:
    """Check that a network has a head: a module that maps features to the output.

    Raises:
        ConfigError: There is no such head. The message names the reason.
    """
    _observe(spec, input_shape, features=True)


def _observe(
    spec: ModelSpec, input_shape: tuple[int, ...], **requested: Any
) -> tuple[Net, Observed]:
    """Run a new network in evaluation mode on one sample of zeros.

    Args:
        spec: Architecture of the network.
        input_shape: Shape of one sample.
        requested: Values to observe, as keyword arguments of `Net.observe`.
    """
    cpu = torch.device("cpu")
    net = Net(spec, cpu, torch.float32)
    net.train(False)
    weights = Weights.init(spec, seed_of("layers"), cpu, torch.float32)
    with torch.no_grad():
        x = torch.zeros(1, *input_shape)
        return net, net.observe(weights.params, weights.buffers, x, **requested)
