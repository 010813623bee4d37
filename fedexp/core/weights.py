"""Models as values: a spec, which describes the network, and the network's weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedexp.core import trees
from fedexp.core.build import convert, locate
from fedexp.core.device import prefers_channels_last
from fedexp.core.errors import ConfigError, suggest
from fedexp.core.trees import Tree
from fedexp.core.user_code import describe_exception, is_ours

by_spec = lru_cache(maxsize=16)
"""Decorator that caches the results of a function or class that takes a `ModelSpec`.

The cache is limited to the 16 most recently used results. The reason is that a method
may change the widths of a network in every round, and each change is a new spec.
"""


@dataclass(frozen=True)
class ModelSpec:
    """The description of a network: the path of its class and keyword arguments.

    A spec is hashable. The widths of layers are arguments and may change between
    rounds.

    Args:
        arch: Dotted path of the class.
        kwargs: Pairs of argument name and value, sorted.
    """

    arch: str
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls, node: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int
    ) -> ModelSpec:
        """Build a spec from a ``model`` config node.

        The names and types of the keys are checked against the class's constructor.
        ``input_shape`` and ``num_classes`` come from the data set. They are passed to
        the constructor if it has arguments of these names.

        Args:
            node: The config node.
            input_shape: Shape of one sample.
            num_classes: Number of classes of the data set.

        Raises:
            ConfigError: A key is unknown, missing or of the wrong type.
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
                raise ConfigError(
                    f"'model.{key}' comes from the data set", where=f"model.{key}", do="remove it"
                )
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
                _freeze(value)
                if hint is inspect.Parameter.empty
                else _freeze(convert(value, hint, f"model.{key}"))
            )
        kwargs |= {key: value for key, value in given.items() if key in signature or open_ended}
        for name, parameter in signature.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and name not in kwargs:
                raise ConfigError(
                    f"'model.{name}' is not set",
                    where=f"model.{name}",
                    expected=f"for {kind.__name__}",
                )
        return cls(str(arch), tuple(sorted(kwargs.items())))

    @classmethod
    def from_stored(cls, arch: str, kwargs: Mapping[str, Any]) -> ModelSpec:
        """Build a spec from arguments that were read from JSON.

        JSON has lists in place of tuples, which are converted back.
        """
        return cls(arch, tuple(sorted((name, _freeze(value)) for name, value in kwargs.items())))

    def split(self) -> tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None:
        """Split the network into a frozen feature extractor and a trained head.

        The static method ``extractor_and_head(kwargs)`` of the network's class defines
        the two parts. The network must equal ``head(extractor(x))``.

        Returns:
            The spec of the extractor, the spec of the head, and the shape of the
            features. None if the class cannot be split.
        """
        parts = getattr(locate(self.arch, nn.Module, "model"), "extractor_and_head", None)
        answer: tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None = parts and parts(
            dict(self.kwargs)
        )
        return answer

    @property
    def arguments(self) -> dict[str, Any]:
        """All constructor arguments. Those that are not set have their defaults."""
        signature = inspect.signature(locate(self.arch, nn.Module, "model")).parameters.values()
        return {p.name: p.default for p in signature if p.default is not p.empty} | dict(
            self.kwargs
        )

    def variant(self, rule: str, refusal: str, *arguments: Any) -> ModelSpec:
        """Return a changed spec. A static method of the class defines the changes.

        The static method receives all constructor arguments (defaults included) and
        `arguments`. It returns only the constructor arguments that change.

        Args:
            rule: Name of the static method.
            refusal: Error message for a class without this method.
            arguments: Further arguments of the method.

        Raises:
            ConfigError: The class has no such method.
        """
        changes: Callable[..., Mapping[str, Any]] | None = getattr(
            locate(self.arch, nn.Module, "model"), rule, None
        )
        if changes is None:
            raise ConfigError(
                refusal,
                where="model",
                expected=f"a class with a static method `{rule}`",
                got=self.arch,
                do="choose another model (MLP, ConvNet), or a method that does not ask for it",
            )
        whole = self.arguments
        changed = {key: _freeze(value) for key, value in changes(whole, *arguments).items()}
        own = dict(self.kwargs) | {
            key: value for key, value in changed.items() if value != whole[key]
        }
        return ModelSpec(self.arch, tuple(sorted(own.items())))

    def module(self, seed: int = 0) -> nn.Module:
        """Build a new PyTorch module of this spec.

        The initial values are those of `seed`. They are drawn from torch's global
        generator, whose state is restored afterwards.
        """
        kind = locate(self.arch, nn.Module, "model")
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                module: nn.Module = kind(**dict(self.kwargs))
        except ValueError as error:
            raise ConfigError(
                str(error),
                where="model",
                got=f"{self.arch} with {dict(self.kwargs)}",
                do="set these keys of the model otherwise, or choose another model or data set",
            ) from error
        return module

    def module_without_values(self) -> nn.Module:
        """Build a module of this spec on torch's meta device.

        Its tensors have shapes, but no memory and no values.
        """
        with torch.device("meta"), _WithoutNormal():
            return self.module()


class _WithoutNormal(TorchFunctionMode):
    """Skips the functions that fill a tensor with normal random numbers.

    On the meta device they would have no effect, but they would import torch's
    compiler. This takes one to five seconds.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.normal_:
            return args[0]
        if func is nn.init.normal_:  # torch passes all of its arguments by name
            return kwargs["tensor"]
        return func(*args, **kwargs)


def _freeze(value: Any) -> Any:
    """Return plain config values in a hashable form."""
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        raise ConfigError("a model argument cannot be a mapping", where="model", got=repr(value))
    return value


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters and buffers of a network, together with the network's spec.

    The parts of fedexp exchange models only as objects of this class. On CUDA, 4-D
    parameters are stored channels last, unless the network's class refuses this layout
    (see `computes_channels_last`).

    Args:
        spec: Architecture of the network.
        params: Parameters by name.
        buffers: Buffers by name.
    """

    spec: ModelSpec
    params: Tree
    buffers: Tree

    def __post_init__(self) -> None:
        first = next(iter(self.params.values()), None)
        if first is not None and computes_channels_last(self.spec, first.device.type):
            laid = with_layout(self.params, channels_last=True)
            if any(laid[name] is not value for name, value in self.params.items()):
                object.__setattr__(self, "params", laid)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters and running statistics that clients never change.

        These are the names that match a pattern in the attribute ``frozen_parameters``
        of the network's class.
        """
        return frozen_of(self.spec.arch, (*self.params, *self.buffers))

    @property
    def trainable(self) -> Tree:
        """The parameters that clients may change."""
        frozen = self.frozen
        return (
            {name: value for name, value in self.params.items() if name not in frozen}
            if frozen
            else self.params
        )

    @classmethod
    def init(cls, spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype) -> Weights:
        """Return the initial weights that the network's class produces with `seed`.

        Raises:
            ConfigError: A parameter has ``requires_grad=False``, but the class does not
                declare it as frozen.
        """
        module = spec.module(seed)
        without_gradient = tuple(
            name for name, value in module.named_parameters() if not value.requires_grad
        )
        undeclared = sorted({*without_gradient} - frozen_of(spec.arch, without_gradient))
        if undeclared:
            raise ConfigError(
                f"the parameter '{undeclared[0]}' has requires_grad=False, but would be trained",
                where="model",
                expected="parameters that require a gradient, or that are declared as frozen",
                got=f"{spec.arch} with {', '.join(undeclared)}",
                do="name it in the class attribute frozen_parameters, of this class or of a "
                "class that you derive from it",
            )
        params = {
            name: value.detach().to(device, dtype) for name, value in module.named_parameters()
        }
        buffers = {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in module.named_buffers()
        }
        return cls(spec, params, buffers)

    @classmethod
    def of_state_dict(cls, spec: ModelSpec, state: Mapping[str, Tensor], where: str) -> Weights:
        """Build weights from a module's ``state_dict()``, on the CPU.

        A state dict does not contain non-persistent buffers. These get their initial
        values. The dtype of the weights is that of the floating-point tensors in
        `state`, or float32 if these tensors have several dtypes.

        Args:
            spec: Architecture of the network.
            state: The state dict.
            where: Name of the state dict for messages.

        Raises:
            ConfigError: Names or shapes do not fit the network.
        """
        module = spec.module()
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        module.to(dtype=kinds.pop() if len(kinds) == 1 else torch.float32)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                "the state dict does not fit the network",
                where=where,
                expected=spec.arch,
                got=" ".join(line.strip() for line in str(error).splitlines()[1:]),
            ) from error
        params = {name: value.detach() for name, value in module.named_parameters()}
        return cls(spec, params, dict(module.named_buffers()))

    def to(self, device: torch.device) -> Weights:
        """Return these weights on `device`."""
        joined = trees.on_device({**self.params, **self.buffers}, device)
        return Weights(
            self.spec,
            {name: joined[name] for name in self.params},
            {name: joined[name] for name in self.buffers},
        )

    def module(self) -> nn.Module:
        """Return a new network with copies of these tensors, in evaluation mode.

        Raises:
            ConfigError: The tensors do not fit the network.
        """
        self._check_shapes()
        module = self.spec.module()
        first = next(iter(self.params.values()))
        module.to(first.device, first.dtype)
        with torch.no_grad():
            for named, tree in (
                (module.named_parameters(), self.params),
                (module.named_buffers(), self.buffers),
            ):
                for name, value in named:
                    value.copy_(tree[name])
        return module.eval()

    def _check_shapes(self) -> None:
        """Refuse tensors that do not fit the network, before its memory is allocated.

        The spec may come from a damaged or harmful file with arbitrarily large widths.
        A user's class that does not support torch's meta device is not checked.

        Raises:
            ConfigError: The tensors do not fit the network.
        """
        try:
            module = self.spec.module_without_values()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the class's constructor raises
            if not is_ours(self.spec.arch):
                return
            got = describe_exception(error)
        else:
            expected = {name: tuple(value.shape) for name, value in _tensors(module)}
            found = {
                name: tuple(value.shape) for name, value in {**self.params, **self.buffers}.items()
            }
            if expected == found:
                return
            name = next(
                name for name in (*expected, *found) if expected.get(name) != found.get(name)
            )
            got = f"'{name}' of shape {found.get(name)}, the network needs {expected.get(name)}"
        raise ConfigError(
            "the stored tensors do not fit the network that is stored with them",
            where=self.spec.arch,
            got=got,
            do="use the models of another folder, or make these again",
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@cache
def frozen_of(arch: str, names: tuple[str, ...]) -> frozenset[str]:
    """Return the names in `names` that the network's class declares as frozen.

    The network's class, at the dotted path `arch`, declares patterns of these names.
    """
    patterns: tuple[str, ...] = getattr(locate(arch, nn.Module, "model"), "frozen_parameters", ())
    return frozenset(name for name in names for pattern in patterns if fnmatchcase(name, pattern))


def computes_channels_last(spec: ModelSpec, device: str) -> bool:
    """Return whether 4-D tensors of this network are stored channels last on `device`.

    A network's class can refuse this layout with the attribute
    ``channels_last = False``.
    """
    return prefers_channels_last(device) and _allows_channels_last(spec)


@by_spec
def _allows_channels_last(spec: ModelSpec) -> bool:
    return getattr(locate(spec.arch, nn.Module, "model"), "channels_last", True)


def layout_of(value: Tensor, channels_last: bool) -> torch.memory_format:
    """Return the memory layout in which a tensor of a network is stored.

    Args:
        value: The tensor.
        channels_last: Whether 4-D tensors are stored channels last. All other tensors
            are contiguous.
    """
    last = channels_last and value.dim() == 4
    return torch.channels_last if last else torch.contiguous_format


def with_layout(tree: Tree, channels_last: bool) -> Tree:
    """Return a tree whose tensors have the layout that `layout_of` returns.

    A tensor that has this layout already is not copied.
    """
    return {
        name: value.contiguous(memory_format=layout_of(value, channels_last))
        for name, value in tree.items()
    }
