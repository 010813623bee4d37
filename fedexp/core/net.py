"""A network that gets its parameters and buffers as arguments of every call."""

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
from fedexp.core.weights import ModelSpec, Weights, computes_channels_last, frozen_of

LAYERS = (nn.Linear, nn.Conv2d)
_RANDOM_LAYERS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


@dataclass(frozen=True, eq=False)
class Observed:
    """The values that `Net.observe` recorded in one forward pass.

    A function that is called by ``torch.vmap`` must return tensors. Such a function can
    return the fields of this object, but not the object itself.

    Args:
        output: The network's output.
        layers: Inputs of linear and convolutional layers, by the names of their
            weights, in forward order.
        features: Input of the head (the module that computes the output from the
            penultimate features), (batch, ...). None if it was not requested.
        norms: Inputs of BatchNorm layers by module name, in forward order, each of
            shape (batch, channels, ...). The running statistics of a layer are the
            buffers ``<name>.running_mean`` and ``<name>.running_var``.
    """

    output: Tensor
    layers: Tree
    features: Tensor | None
    norms: Tree


class Net:
    """A network that gets its parameters and buffers as arguments of every call.

    It has one PyTorch module and puts the given tensors into this module. Methods run
    networks only through this class. In training mode, BatchNorm updates the given
    buffers in place.

    A model's class may declare ``linear_chain`` and ``head_module`` (see below) and
    ``frozen_parameters``. The latter lists patterns (fnmatch) for the names of
    parameters and running statistics that clients never change.

    Args:
        spec: Architecture of the network.
        device: Device of the tensors.
        dtype: Type of parameters and outputs.
        precision: ``bf16`` runs the network under autocast, in training mode only.
            Parameters, gradients and the output stay in `dtype`. Evaluation runs
            without autocast.

    Attributes:
        linear_chain: One pair per linear layer, in forward order: the name of its
            weight, and the name of its bias or None. A model's class declares the chain
            if the network consists only of ``flatten`` and these layers with ReLU
            between them. Engines train such a network faster. Empty for other networks.
        head_module: Name of the head, the module that computes the output from the
            penultimate features. By default it is the last linear layer. Empty if there
            is none.
        has_batch_norm: Whether the network has BatchNorm layers in training mode, which
            need at least two samples. BatchNorm layers that stay in evaluation mode do
            not count. These are layers with frozen running statistics, and layers that
            the module's own method `train` keeps in this mode.
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
        frozen = frozen_of(spec.arch, tuple(name for name, _ in self._module.named_buffers()))
        self._frozen_norms = [
            m
            for name, m in self._parts.items()
            if isinstance(m, nn.modules.batchnorm._NormBase)
            and any(_joined(name, f"running_{kind}") in frozen for kind in ("mean", "var"))
        ]
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
        # A new module is in training mode although its method `train` was never called.
        self._set_mode(True)
        self.has_batch_norm = any(self._parts[name].training for name in self._norms)

    @classmethod
    def for_evaluation(cls, weights: Weights) -> Net:
        """Return a network in evaluation mode that can run on these weights.

        Its device and dtype are those of the parameters. Every call of the network
        still needs the parameters and buffers as arguments.
        """
        first = next(iter(weights.params.values()))
        return cls(weights.spec, first.device, first.dtype).train(False)

    def train(self, mode: bool = True) -> Net:
        """Set training or evaluation mode, and return this network."""
        if self._module.training != mode:
            self._set_mode(mode)
        return self

    def _set_mode(self, mode: bool) -> None:
        self._module.train(mode)
        for norm in self._frozen_norms:
            norm.eval()

    def set_noise(self, noise: Callable[[str, tuple[int, ...]], Tensor] | None) -> None:
        """Set the source of random numbers that random layers use in training."""
        for dropout in self._dropouts.values():
            dropout.noise = noise

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the parts of the network with their names."""
        yield from self._parts.items()

    def bind(self, params: Tree, buffers: Tree) -> None:
        """Put the tensors of two dictionaries into the module.

        If the same dictionaries were bound last, nothing is done. To change the values
        of a bound tensor, write into this tensor. A new tensor in a bound dictionary
        has no effect, because the module keeps the old tensor.
        """
        if self._bound is not None and self._bound[0] is params and self._bound[1] is buffers:
            return
        for slots, tree in ((self._slots, params), (self._buffer_slots, buffers)):
            for name, places in slots.items():
                for place, key in places:
                    place[key] = tree[name]
        self._bound = (params, buffers)

    def release(self) -> None:
        """Forget the bound dictionaries. The next `bind` then puts in all tensors."""
        self._bound = None
        for net in self._beside.values():
            net.release()

    def beside(self, spec: ModelSpec) -> Net:
        """Return a second network, of architecture `spec` and in evaluation mode.

        The second network is created at the first call with this spec. Running it does
        not change the tensors or the mode of this network.
        """
        if spec not in self._beside:
            self._beside[spec] = Net(spec, self._device, self._dtype, self.precision)
            self._beside[spec].train(False)
        return self._beside[spec]

    def __call__(self, params: Tree, buffers: Tree, *inputs: Tensor) -> Tensor:
        return self._run(self._module, params, buffers, inputs)

    def head(self, params: Tree, buffers: Tree, features: Tensor) -> Tensor:
        """Compute the output from penultimate features (batch, ...).

        A method that calls `head` must first check that the network has a head, with
        `fedexp.core.layers.check_head`. It does so before anything is trained.
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
        """Run the network and return its output and the requested inputs of layers.

        If a layer runs twice in the forward pass, its last input is returned.

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
        # Replacing `forward` is cheaper than registering a hook of torch.
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
    """Return an input in the channels-last memory layout.

    Under `torch.vmap` the input is returned unchanged. There `x` is one client's part
    of a larger tensor, and its layout cannot be read or changed.
    """
    if x.dim() != 4 or is_vmapped(x):
        return x
    return x.contiguous(memory_format=torch.channels_last)


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _slots(module: nn.Module, kind: str) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Find the places of each tensor in a module and its submodules.

    A place is a pair: the dictionary `kind` of a submodule, and the tensor's key in
    this dictionary. A shared (tied) tensor has several places.

    Args:
        module: The module.
        kind: ``_parameters`` or ``_buffers``.

    Returns:
        The places by the name of the tensor.
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
    """Return the module's declared ``linear_chain``, or () if it may be wrong.

    A chain is trusted if the class that defines `forward` also declares the chain, if
    the chain names every parameter, and if its layers are of the class `nn.Linear`. A
    subclass of `nn.Linear` may compute something else.
    """
    if not same_author(type(module), "linear_chain", "forward"):
        return ()
    chain: tuple[tuple[str, str | None], ...] = getattr(module, "linear_chain", ())
    named = [name for layer in chain for name in layer if name is not None]
    if sorted(named) != sorted(name for name, _ in module.named_parameters()):
        return ()
    layers = (module.get_submodule(weight.rpartition(".")[0]) for weight, _ in chain)
    return chain if all(type(layer) is nn.Linear for layer in layers) else ()


def same_author(kind: type, claim: str, about: str) -> bool:
    """Return whether the attributes `claim` and `about` are defined in one class.

    The attribute `claim` describes the attribute `about`. If a subclass overrides only
    one of the two attributes, the description may be wrong.
    """
    author = _author(kind, claim)
    return author is not None and author is _author(kind, about)


@lru_cache(maxsize=256)  # asked for every job
def _author(kind: type, name: str) -> type | None:
    """Return the class that defines the attribute `name` of `kind`, or None."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _module(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a module whose tensors `Net.bind` will replace.

    Modules of fedexp are built on torch's meta device, without values, because `bind`
    would overwrite the values anyway. Modules of users are built with values, because
    they may use tensors that are not registered and that `bind` does not replace.
    """
    if not is_ours(spec.arch):
        return spec.module().to(device, dtype)
    return spec.module_without_values().to(dtype=dtype)


def _own_dropout(module: nn.Module) -> nn.Module:
    """Replace the dropout layers of torch by those of fedexp.

    The layers of torch draw from the global generator. Other random layers of torch are
    refused with a `ConfigError`.
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
