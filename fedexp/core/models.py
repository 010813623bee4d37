"""Models as values: a spec (architecture and widths), weights (spec, parameters, buffers) and the net that runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fedexp.core.build import convert, locate
from fedexp.core.dropout import Dropout
from fedexp.core.errors import ConfigError, suggest
from fedexp.core.seeds import seed_of
from fedexp.core.trees import Tree

if TYPE_CHECKING:
    from fedexp.core.engine import Precision

_RANDOM_LAYERS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CHANNELS_LAST_ON = ("cuda",)  # kinds of device whose convolutions are faster so


@dataclass(frozen=True)
class ModelSpec:
    """Which network: a class path and its keyword arguments. Hashable; widths are data and may change between rounds."""

    arch: str
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, node: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int) -> ModelSpec:
        """From a ``model`` config node; checks names and types of its keys against the class's constructor.

        ``input_shape`` and ``num_classes`` come from the data set and are passed to every constructor that takes them.
        """
        values = dict(node)
        arch = values.pop("_target_", None)
        kind = locate(arch, nn.Module, "model")
        signature = inspect.signature(kind, eval_str=True).parameters
        given = {"input_shape": tuple(input_shape), "num_classes": num_classes}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.values())
        kwargs: dict[str, Any] = {}
        for key, value in values.items():
            if key in given:
                raise ConfigError(f"'model.{key}' comes from the data set", where=f"model.{key}", do="remove it")
            if key not in signature and not open_ended:
                names = [name for name in signature if name not in given]
                raise ConfigError(
                    f"unknown key '{key}'",
                    where=f"model.{key}",
                    expected=f"an argument of {kind.__name__}: {', '.join(names) or 'it has none'}",
                    do=suggest(key, names),
                )
            hint = signature[key].annotation if key in signature else inspect.Parameter.empty
            kwargs[key] = (
                _freeze(value) if hint is inspect.Parameter.empty else _freeze(convert(value, hint, f"model.{key}"))
            )
        kwargs |= {key: value for key, value in given.items() if key in signature or open_ended}
        for name, parameter in signature.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and name not in kwargs:
                raise ConfigError(f"'model.{name}' is not set", where=f"model.{name}", expected=f"for {kind.__name__}")
        return cls(str(arch), tuple(sorted(kwargs.items())))

    def split(self) -> tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None:
        """Frozen extractor, tuned head, and the shape of the features between; None: the network is trained as one.

        A class offers them as a static method ``extractor_and_head(kwargs)``; it must compute the head of the extractor.
        """
        parts = getattr(locate(self.arch, nn.Module, "model"), "extractor_and_head", None)
        answer: tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None = parts and parts(dict(self.kwargs))
        return answer

    def module(self) -> nn.Module:
        """A new module; its initialisation draws from torch's global generator, so call it through `Weights.init`."""
        kind = locate(self.arch, nn.Module, "model")
        try:
            module: nn.Module = kind(**dict(self.kwargs))
        except ValueError as error:
            raise ConfigError(str(error), where="model", got=f"{self.arch} with {dict(self.kwargs)}") from error
        return module


def _freeze(value: Any) -> Any:
    """Hashable form of plain config values."""
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        raise ConfigError("a model argument cannot be a mapping", where="model", got=repr(value))
    return value


@dataclass(frozen=True, eq=False)
class Weights:
    """The only form in which models travel: parameters and buffers of the network `spec` names.

    On CUDA its 4-D parameters lie channels last, wherever they come from.
    """

    spec: ModelSpec
    params: Tree
    buffers: Tree

    def __post_init__(self) -> None:
        first = next(iter(self.params.values()), None)
        if first is not None and _computes_channels_last(self.spec, first.device.type):
            laid = _channels_last(self.params)
            if any(laid[name] is not value for name, value in self.params.items()):
                object.__setattr__(self, "params", laid)

    @property
    def frozen(self) -> frozenset[str]:
        """Parameters and buffers that clients never change: those that match the class's ``frozen_parameters``."""
        return frozen_of(self.spec.arch, (*self.params, *self.buffers))

    @property
    def trainable(self) -> Tree:
        """The parameters that clients may change."""
        frozen = self.frozen
        return {name: value for name, value in self.params.items() if name not in frozen} if frozen else self.params

    @classmethod
    def init(cls, spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype) -> Weights:
        """The network's own initialisation under `seed`: the one place that forks the global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = spec.module()
        params = {name: value.detach().to(device, dtype) for name, value in module.named_parameters()}
        buffers = {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in module.named_buffers()
        }
        return cls(spec, params, buffers)

    @classmethod
    def of_state_dict(cls, spec: ModelSpec, state: Mapping[str, Tensor], where: str) -> Weights:
        """From what ``torch.nn.Module.state_dict`` returned, on the CPU; buffers it leaves out are as initialised.

        Raises:
            ConfigError: names or shapes are not the network's; says `where`.
        """
        with torch.random.fork_rng(devices=[]):
            module = spec.module()
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        module.to(dtype=kinds.pop() if len(kinds) == 1 else torch.float32)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            raise ConfigError(
                "the state dict does not fit the network", where=where, expected=spec.arch, got=" ".join(lines)
            ) from error
        params = {name: value.detach() for name, value in module.named_parameters()}
        return cls(spec, params, dict(module.named_buffers()))

    def module(self) -> nn.Module:
        """A network of its own with copies of these tensors, in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            module = self.spec.module()
        first = next(iter(self.params.values()))
        module.to(first.device, first.dtype)
        with torch.no_grad():
            for named, tree in ((module.named_parameters(), self.params), (module.named_buffers(), self.buffers)):
                for name, value in named:
                    value.copy_(tree[name])
        return module.eval()


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
        self._dropouts = [m for m in self._module.modules() if isinstance(m, Dropout)]
        for name, module in self._module.named_modules():
            if isinstance(module, Dropout):
                module.stream = name
        self.linear_chain = _linear_chain(self._module)
        has_maps = any(value.dim() == 4 for value in self._module.parameters())
        self._channels_last = has_maps and _computes_channels_last(spec, device.type)
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

    def layer_inputs(self, params: Tree, buffers: Tree, *inputs: Tensor) -> dict[Layer, Tensor]:
        """What every linear and convolutional layer is given, in the order in which the forward pass meets them."""
        found: dict[Layer, Tensor] = {}

        def keep(layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
                found[layer] = given[0]

            return hook

        layers = [(module, _layer(name, module)) for name, module in self._module.named_modules()]
        handles = [m.register_forward_pre_hook(keep(layer)) for m, layer in layers if layer is not None]
        try:
            self(params, buffers, *inputs)
        finally:
            for handle in handles:
                handle.remove()
        return found


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
        return tuple(net.layer_inputs(weights.params, weights.buffers, torch.zeros(1, *input_shape)))


@cache
def frozen_of(arch: str, names: tuple[str, ...]) -> frozenset[str]:
    """Those of `names` that clients of this architecture never change."""
    patterns: tuple[str, ...] = getattr(locate(arch, nn.Module, "model"), "frozen_parameters", ())
    return frozenset(name for name in names for pattern in patterns if fnmatchcase(name, pattern))


@cache
def _computes_channels_last(spec: ModelSpec, device: str) -> bool:
    """Whether 4-D tensors of this network lie channels last; its class may refuse with ``channels_last = False``."""
    return device in _CHANNELS_LAST_ON and getattr(locate(spec.arch, nn.Module, "model"), "channels_last", True)


def _channels_last(params: Tree) -> Tree:
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in params.items()
    }


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


def check_model(spec: ModelSpec, input_shape: tuple[int, ...], num_outputs: int, device: str = "cpu") -> None:
    """Build the network once and run two zeros through it; a `ConfigError` says what does not fit the data set.

    Args:
        device: the kind of device it will run on. The check itself needs the CPU only.
    """
    try:
        weights = Weights.init(spec, seed_of("check"), torch.device("cpu"), torch.float32)
        net = Net(spec, torch.device("cpu"), torch.float32)
        net.train()
        net.set_noise(lambda name, shape: torch.full(shape, 0.5))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            before = torch.random.get_rng_state()
            output = net(weights.params, weights.buffers, torch.zeros(2, *input_shape))
            drawn = not torch.equal(before, torch.random.get_rng_state())
        if len(input_shape) == 3 and _computes_channels_last(spec, device):
            _check_channels_last(net, weights, torch.zeros(2, *input_shape))
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"the model cannot take the data set's inputs: {error}",
            where="model",
            expected=f"inputs of shape (batch, {', '.join(map(str, input_shape))})",
            got=spec.arch,
            do="choose another model or data set",
        ) from error
    if drawn:
        raise ConfigError(
            "the model's forward pass draws from torch's global generator: its runs could not be resumed or compared",
            where="model",
            got=spec.arch,
            do="use fedexp.core.dropout.Dropout in place of torch.nn.functional.dropout",
        )
    if output.shape != (2, num_outputs):
        raise ConfigError(
            "the model's output does not fit the data set",
            where="model",
            expected=f"(batch, {num_outputs}) logits",
            got=f"{tuple(output.shape)} for a batch of 2 from {spec.arch}",
            do="let the constructor take num_classes and input_shape; fedexp passes the data set's",
        )


def _check_channels_last(net: Net, weights: Weights, x: Tensor) -> None:
    net.train(False)
    try:
        with torch.no_grad():
            net(_channels_last(weights.params), weights.buffers, x.contiguous(memory_format=torch.channels_last))
    except RuntimeError as error:
        raise ConfigError(
            f"the model cannot take feature maps that lie channels last, as they do on CUDA: {error}",
            where="model",
            got=weights.spec.arch,
            do="use x.flatten(1) or x.reshape(...) in place of x.view(...), or set `channels_last = False` on the class",
        ) from error
