"""What a network is made of, to methods that look into it: its linear and convolutional layers, and what each is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer of a network, as a matrix: rows are output units.

    Args:
        weight, bias: names of its parameters (bias None where it has none).
        kind: ``linear`` (out, in) or ``conv`` (out, channels, kernel height, kernel width).
        kernel, stride, padding, dilation: of a convolution, (height, width).
    """

    weight: str
    bias: str | None
    kind: Literal["linear", "conv"]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)


def _layer(name: str, module: nn.Module) -> Layer | None:
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return None
    weight, bias = f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".") if module.bias is not None else None
    if isinstance(module, nn.Linear):
        return Layer(weight, bias, "linear")
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise ConfigError(
            f"layer '{name}' is a convolution with groups, padding by name or padding that is not zeros",
            where="model",
            do="choose a method that does not look into layers, or another model",
        )
    pairs = [(int(a), int(b)) for a, b in (module.kernel_size, module.stride, module.padding, module.dilation)]
    return Layer(weight, bias, "conv", *pairs)


@cache
def layers_of(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[Layer, ...]:
    """The network's linear and convolutional layers in the order in which a forward pass meets them; the last is the output."""
    cpu = torch.device("cpu")
    weights = Weights.init(spec, seed_of("layers"), cpu, torch.float32)
    net = Net(spec, cpu, torch.float32)
    net.train(False)
    with torch.no_grad():
        return tuple(layer_inputs(net, weights.params, weights.buffers, torch.zeros(1, *input_shape)))


def layer_inputs(net: Net, params: Tree, buffers: Tree, *inputs: Tensor) -> dict[Layer, Tensor]:
    """What every linear and convolutional layer is given, in the order in which the forward pass meets them."""
    seen: dict[Layer, Tensor] = {}

    def keep(layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[layer] = given[0]

        return hook

    layers = [(module, _layer(name, module)) for name, module in net.named_modules()]
    handles = [m.register_forward_pre_hook(keep(layer)) for m, layer in layers if layer is not None]
    try:
        net(params, buffers, *inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen
