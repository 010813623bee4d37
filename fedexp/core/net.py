"""The net: one module that runs on the parameters and buffers that it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedexp.core.dropout import Dropout
from fedexp.core.errors import ConfigError
from fedexp.core.numerics import Precision
from fedexp.core.torch_private import is_vmapped
from fedexp.core.trees import Tree
from fedexp.core.user_code import is_ours
from fedexp.core.weights import ModelSpec, Weights, computes_channels_last

LAYERS = (nn.Linear, nn.Conv2d)
_RANDOM_LAYERS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


@dataclass(frozen=True, eq=False)
class Observed:
    """The values observed in one run of a network.

    A function under ``torch.vmap`` must return tensors. It can therefore return the
    fields of this object, but not the object itself.

    Args:
        output: The network's output.
        layers: Inputs of linear and convolutional layers, by the names of their
            weights, in forward order.
        features: The head's input, (batch, ...), or None if it was not requested.
        norms: Inputs (batch, channels, ...) of BatchNorms by module name, in forward
            order. The running statistics of each are the buffers
            ``<name>.running_mean`` and ``<name>.running_var``.
    """

    output: Tensor
    layers: Tree
    features: Tensor | None
    norms: Tree


class Net:
    """A network that runs on given parameters and buffers.

    It holds one module and puts the given tensors into it. Method code runs networks
    only through this class. In training mode, BatchNorm updates the given buffers in
    place.

    A model's class may declare two attributes. ``frozen_parameters`` lists fnmatch
    patterns of the names of parameters and buffers that clients never train.
    ``head_module`` is described below.

    Args:
        spec: Architecture of the network.
        device: Device of the tensors.
        dtype: Type of parameters and outputs.
        precision: ``bf16`` runs the network under autocast, in training mode only.
            Parameters, gradients and the output stay in `dtype`. Evaluation runs
            without autocast.

    Attributes:
        linear_chain: Names (weight, bias or None) of linear layers, first to last. A
            model's class declares the chain if the network consists only of ``flatten``
            and these layers with ReLU between them. Engines train such a network
            faster. Empty for other networks.
        head_module: Name of the module that computes the output from the penultimate
            features, empty if there is none. By default it is the last linear layer.
        has_batch_norm: Whether a training batch needs at least two samples. BatchNorms
            that the module leaves in evaluation mode do not count.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        precision: Precision = "float32",
    ) -> None:
        self.spec = spec
        self.precision = precision
        self._device, self._dtype = device, dtype
        self._module = _own_dropout(_module(spec, device, dtype))
        self._parts = dict(self._module.named_modules())
        self._layers = {
            _joined(name, "weight"): name
            for name, m in self._parts.items()
            if isinstance(m, LAYERS)
        }
        self._norms = {
            name
            for name, m in self._parts.items()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }
        linear = [name for name, m in self._parts.items() if isinstance(m, nn.Linear)]
        self.head_module: str = getattr(
            type(self._module), "head_module", linear[-1] if linear else ""
        )
        self._slots = _slots(self._module, "_parameters")
        self._buffer_slots = _slots(self._module, "_buffers")
        self._bound: tuple[Tree, Tree] | None = None
        self._beside: dict[ModelSpec, Net] = {}
        self._dropouts = {name: m for name, m in self._parts.items() if isinstance(m, Dropout)}
        for name, dropout in self._dropouts.items():
            dropout.stream = name
        self.linear_chain = _linear_chain(self._module)
        self._channels_last = computes_channels_last(spec, device.type) and any(
            value.dim() == 4 for value in self._module.parameters()
        )
        self.has_batch_norm = any(self._parts[name].training for name in self._norms)

    @classmethod
    def for_evaluation(cls, weights: Weights) -> Net:
        """Return a network for these weights, in evaluation mode.

        Its device and dtype are those of the parameters. The tensors are not put into
        the network yet.
        """
        first = next(iter(weights.params.values()))
        return cls(weights.spec, first.device, first.dtype).train(False)

    def train(self, mode: bool = True) -> Net:
        """Set training or evaluation mode, and return this network."""
        if self._module.training != mode:
            self._module.train(mode)
        return self

    def set_noise(self, noise: Callable[[str, tuple[int, ...]], Tensor] | None) -> None:
        """Set the source of random numbers that random layers use in training."""
        for dropout in self._dropouts.values():
            dropout.noise = noise

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the parts of the network with their names."""
        yield from self._parts.items()

    def bind(self, params: Tree, buffers: Tree) -> None:
        """Put tensors into the module.

        Binding the same dictionaries again costs nothing. To change values, write into
        the tensors. If an entry of a bound dictionary is replaced, the module keeps the
        old tensor.
        """
        if self._bound is not None and self._bound[0] is params and self._bound[1] is buffers:
            return
        for slots, tree in ((self._slots, params), (self._buffer_slots, buffers)):
            for name, places in slots.items():
                for place, key in places:
                    place[key] = tree[name]
        self._bound = (params, buffers)

    def release(self) -> None:
        """Forget the bound dictionaries. The next `bind` puts in all tensors again."""
        self._bound = None
        for net in self._beside.values():
            net.release()

    def beside(self, spec: ModelSpec) -> Net:
        """Return another network of `spec`, in evaluation mode.

        The other network is created at the first call. Running it does not change the
        tensors or the mode of this network.
        """
        if spec not in self._beside:
            self._beside[spec] = Net(spec, self._device, self._dtype, self.precision)
            self._beside[spec].train(False)
        return self._beside[spec]

    def __call__(self, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        return self._run(self._module, params, buffers, inputs)

    def head(self, params: Tree, buffers: Tree, features: Tensor) -> Tensor:
        """Compute the output from penultimate features (batch, ...).

        Before a method that calls `head` trains anything, it checks with
        `fedexp.core.layers.check_head` that the network has a head.
        """
        return self._run(self._parts[self.head_module], params, buffers, (features,))

    def observe(
        self,
        params: Tree,
        buffers: Tree,
        *inputs: Tensor,
        layers: Collection[str] | Literal["all"] = (),
        features: bool = False,
        norms: bool = False,
    ) -> Observed:
        """Run the network as a call does and return the requested values.

        If a layer runs twice, its last input is returned.

        Args:
            params: Parameters.
            buffers: Buffers.
            inputs: Inputs of the network.
            layers: Names of the weights of linear and convolutional layers, or ``all``.
            features: Whether to return the head's input.
            norms: Whether to return the inputs of BatchNorms.

        Raises:
            ConfigError: `features` is true and the network has no head.
        """
        shown = (
            self._layers if layers == "all" else {weight: self._layers[weight] for weight in layers}
        )
        names = {
            *shown.values(),
            *(self._norms if norms else ()),
            *((self.head_module, "") if features else ()),
        }
        watched = [(name, self._parts[name]) for name in names]
        calls: dict[str, tuple[Tensor, Tensor]] = {}
        # Replacing `forward` is cheaper than a hook of torch. If nothing is observed,
        # it costs nothing.
        for name, module in watched:
            module.__dict__["forward"] = partial(_witnessed, module.forward, calls, name)
        try:
            output = self(params, buffers, *inputs)
        finally:
            for _, module in watched:
                del module.__dict__["forward"]
        if features and (
            not self.head_module
            or self.head_module not in calls
            or calls[self.head_module][1] is not calls[""][1]
        ):
            raise ConfigError(
                "the network has no head that runs on penultimate features: "
                + (
                    f"its output is not that of '{self.head_module}' alone"
                    if self.head_module
                    else "it has no linear layer"
                ),
                where="model",
                got=self.spec.arch,
                do="choose another model, a method that needs no features, or declare "
                "`head_module` on the class",
            )
        rounded = self.precision == "bf16" and self._module.training
        seen = {name: x.to(self._dtype) if rounded else x for name, (x, _) in calls.items()}
        weight_of = {name: weight for weight, name in shown.items()}
        return Observed(
            output,
            {weight_of[name]: x for name, x in seen.items() if name in weight_of},
            seen[self.head_module] if features else None,
            {name: x for name, x in seen.items() if name in self._norms} if norms else {},
        )

    def _run(
        self, module: nn.Module, params: Tree, buffers: Tree, inputs: tuple[Tensor, ...]
    ) -> Tensor:
        self.bind(params, buffers)
        if self._channels_last:
            inputs = tuple(_channels_last(x) for x in inputs)
        if self.precision == "bf16" and self._module.training:
            with torch.autocast(self._device.type, torch.bfloat16):
                output: Tensor = module(*inputs)
            return output.to(self._dtype)
        output = module(*inputs)
        return output


def _witnessed(
    forward: Callable[..., Tensor],
    calls: dict[str, tuple[Tensor, Tensor]],
    name: str,
    *inputs: Tensor,
) -> Tensor:
    output = forward(*inputs)
    calls[name] = inputs[0], output
    return output


def _channels_last(x: Tensor) -> Tensor:
    """Return an input with its channels last.

    Under `torch.vmap` the input is returned as it is, because the layout of one
    client's part cannot be read or changed.
    """
    if x.dim() != 4 or is_vmapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _slots(module: nn.Module, kind: str) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Find the pairs (dictionary of a module, key) that hold each named tensor.

    A shared (tied) tensor has several pairs.
    """
    first: dict[int, str] = {}
    slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for prefix, child in module.named_modules():
        for key, value in getattr(child, kind).items():
            if value is None:
                continue
            name = first.setdefault(id(value), _joined(prefix, key))
            slots.setdefault(name, []).append((getattr(child, kind), key))
    return slots


def _linear_chain(module: nn.Module) -> tuple[tuple[str, str | None], ...]:
    """Return the module's declared chain, or () if the chain may be wrong.

    A chain is trusted if the class that defines `forward` also declares the chain, and
    if the chain names every parameter.
    """
    if not same_author(type(module), "linear_chain", "forward"):
        return ()
    chain: tuple[tuple[str, str | None], ...] = getattr(module, "linear_chain", ())
    named = [name for layer in chain for name in layer if name is not None]
    return chain if sorted(named) == sorted(name for name, _ in module.named_parameters()) else ()


@lru_cache(maxsize=256)  # asked for every job
def same_author(kind: type, claim: str, about: str) -> bool:
    """Return whether one class defines both attributes, `claim` and `about`.

    `claim` is the name of an attribute that describes the attribute `about`. If a
    subclass overrides only one of the two, the description may be wrong.
    """

    def author(name: str) -> type | None:
        return next((base for base in kind.__mro__ if name in vars(base)), None)

    return author(claim) is not None and author(claim) is author(about)


def _module(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a module whose tensors `Net.bind` will replace.

    Modules of fedexp are built without values, because copying the values to the device
    would be wasted. Modules of users get values, because they may use tensors that are
    not registered.
    """
    if not is_ours(spec.arch):
        return spec.module().to(device, dtype)
    with torch.device("meta"):
        return spec.module().to(dtype=dtype)


def _own_dropout(module: nn.Module) -> nn.Module:
    """Replace torch's dropout, which draws from the global generator, by fedexp's.

    Other random layers are refused with a `ConfigError`.
    """
    for name, child in module.named_modules():
        for key, layer in list(child.named_children()):
            if type(layer) is nn.Dropout:
                setattr(child, key, Dropout(layer.p))
            elif isinstance(layer, _RANDOM_LAYERS):
                raise ConfigError(
                    f"layer '{_joined(name, key)}' ({type(layer).__name__}) draws from "
                    "torch's global generator",
                    where="model",
                    do="use fedexp.core.dropout.Dropout, or draw through its `noise`",
                )
    return module
