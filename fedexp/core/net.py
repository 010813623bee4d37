"""The net: one module that runs on whatever parameters and buffers are put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.core.dropout import Dropout
from fedexp.core.errors import ConfigError
from fedexp.core.numerics import Precision
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, computes_channels_last

_RANDOM_LAYERS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


class Net:
    """Runs a network on given parameters and buffers: one module whose tensors are swapped in.

    This is the only way method code runs a network. Training mode updates the given buffers in place (BatchNorm).

    Args:
        precision: ``bf16`` runs the network under autocast in training mode, alone; parameters, gradients and the output
            stay in `dtype`, evaluation is exact.

    Attributes:
        linear_chain: a module may offer it: (weight, bias or None) names of linear layers, first to last, if the network is
            ``flatten``, then these layers with ReLU between them, and nothing else. Engines have a faster way to train it.
        has_batch_norm: whether a training batch needs two samples; what the module keeps in evaluation mode does not count.

    A class may declare ``frozen_parameters``, fnmatch patterns of the names of what clients never train.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, precision: Precision = "float32"
    ) -> None:
        self.spec = spec
        self.precision = precision
        self._device, self._dtype = device.type, dtype
        with torch.random.fork_rng(devices=[]):
            self._module = _own_dropout(spec.module().to(device, dtype))
        self._slots = _slots(self._module, "_parameters")
        self._buffer_slots = _slots(self._module, "_buffers")
        self._bound: tuple[Tree, Tree] | None = None
        self._beside: dict[ModelSpec, Net] = {}
        self._dropouts = [m for m in self._module.modules() if isinstance(m, Dropout)]
        for name, module in self._module.named_modules():
            if isinstance(module, Dropout):
                module.stream = name
        self.linear_chain = _linear_chain(self._module)
        has_maps = any(value.dim() == 4 for value in self._module.parameters())
        self._channels_last = has_maps and computes_channels_last(spec, device.type)
        self.has_batch_norm = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self._module.modules()
        )

    def train(self, mode: bool = True) -> None:
        if self._module.training != mode:
            self._module.train(mode)

    def set_noise(self, noise: Callable[[str, tuple[int, ...]], Tensor] | None) -> None:
        """Where random layers draw from during training."""
        for module in self._dropouts:
            module.noise = noise

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The network's parts by name, for those who look into it."""
        yield from self._module.named_modules()

    def bind(self, params: Tree, buffers: Tree) -> None:
        """Put tensors into the module. The same dictionaries again cost nothing; change tensors in place, not the dicts."""
        if self._bound is not None and self._bound[0] is params and self._bound[1] is buffers:
            return
        for slots, tree in ((self._slots, params), (self._buffer_slots, buffers)):
            for name, places in slots.items():
                for place, key in places:
                    place[key] = tree[name]
        self._bound = (params, buffers)

    def release(self) -> None:
        """Forget the bound tensors' identity, so that nothing outlives its client by mistake."""
        self._bound = None
        for net in self._beside.values():
            net.release()

    def beside(self, spec: ModelSpec) -> Net:
        """Another network, of `spec`, in evaluation mode: running it leaves this one's tensors and mode alone. Kept."""
        if spec not in self._beside:
            first = next(self._module.parameters())
            self._beside[spec] = Net(spec, first.device, self._dtype, self.precision)
            self._beside[spec].train(False)
        return self._beside[spec]

    def __call__(self, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        self.bind(params, buffers)
        if self._channels_last:
            inputs = tuple(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
        output: Tensor
        if self.precision == "bf16" and self._module.training:
            with torch.autocast(self._device, torch.bfloat16):
                output = self._module(*inputs)
            return output.to(self._dtype)
        output = self._module(*inputs)
        return output


def _slots(module: nn.Module, kind: str) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each named tensor sits in the module tree; a shared (tied) tensor has several places."""
    first: dict[int, str] = {}
    slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for prefix, child in module.named_modules():
        for key, value in getattr(child, kind).items():
            if value is None:
                continue
            name = first.setdefault(id(value), f"{prefix}.{key}" if prefix else key)
            slots.setdefault(name, []).append((getattr(child, kind), key))
    return slots


def _linear_chain(module: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """The module's own word, where it comes from the class that wrote `forward` and names every parameter."""
    if not same_author(type(module), "linear_chain", "forward"):
        return ()
    chain: tuple[tuple[str, str | None], ...] = getattr(module, "linear_chain", ())
    named = [name for layer in chain for name in layer if name is not None]
    return chain if sorted(named) == sorted(name for name, _ in module.named_parameters()) else ()


def same_author(kind: type, claim: str, about: str) -> bool:
    """Whether the class that states `claim` is the one that defines `about`: a subclass may change one and not the other."""

    def author(name: str) -> type | None:
        return next((base for base in kind.__mro__ if name in vars(base)), None)

    return author(claim) is not None and author(claim) is author(about)


def _own_dropout(module: nn.Module) -> nn.Module:
    """Replace torch's dropout, which draws from the global generator, by ours; refuse other random layers."""
    for name, child in module.named_modules():
        for key, layer in list(child.named_children()):
            if type(layer) is nn.Dropout:
                setattr(child, key, Dropout(layer.p))
            elif isinstance(layer, _RANDOM_LAYERS):
                raise ConfigError(
                    f"layer '{f'{name}.{key}' if name else key}' ({type(layer).__name__}) draws from torch's global generator",
                    where="model",
                    do="use fedexp.core.dropout.Dropout, or draw through its `noise`",
                )
    return module
