"""Models as values: a spec (architecture and widths) and weights (spec, parameters, buffers)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.core.build import convert, locate
from fedexp.core.errors import ConfigError, suggest
from fedexp.core.trees import Tree

_CHANNELS_LAST_ON = ("cuda",)  # kinds of device whose convolutions are faster so

by_spec = lru_cache(maxsize=16)
"""Keeps what a function of specs (or `Net`) returned for those used last: widths may change every round."""


@dataclass(frozen=True)
class ModelSpec:
    """Which network: a class path and its keyword arguments. Hashable; widths are data and may change between rounds."""

    arch: str
    kwargs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls, node: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int
    ) -> ModelSpec:
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

    def split(self) -> tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None:
        """Frozen extractor, tuned head, and the shape of the features between; None: the network is trained as one.

        A class offers them as a static method ``extractor_and_head(kwargs)``; it must compute the head of the extractor.
        """
        parts = getattr(locate(self.arch, nn.Module, "model"), "extractor_and_head", None)
        answer: tuple[ModelSpec, ModelSpec, tuple[int, ...]] | None = parts and parts(
            dict(self.kwargs)
        )
        return answer

    @property
    def arguments(self) -> dict[str, Any]:
        """All constructor arguments, those at their defaults included."""
        signature = inspect.signature(locate(self.arch, nn.Module, "model")).parameters.values()
        return {p.name: p.default for p in signature if p.default is not p.empty} | dict(
            self.kwargs
        )

    def variant(self, rule: str, refusal: str, *arguments: Any) -> ModelSpec:
        """The network that a rule of its class makes of it.

        A rule is a static method; of all constructor arguments (defaults included) and `arguments` it makes those that change.

        Raises:
            ConfigError: the class has no such rule; says `refusal`.
        """
        kind = locate(self.arch, nn.Module, "model")
        changes: Callable[..., Mapping[str, Any]] | None = getattr(kind, rule, None)
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

    def module(self) -> nn.Module:
        """A new module. Its initialisation draws from a fork of torch's global generator: `Weights.init` seeds it."""
        kind = locate(self.arch, nn.Module, "model")
        try:
            with torch.random.fork_rng(devices=[]):
                module: nn.Module = kind(**dict(self.kwargs))
        except ValueError as error:
            do = "set these keys of the model otherwise, or choose another model or data set"
            raise ConfigError(
                str(error), where="model", got=f"{self.arch} with {dict(self.kwargs)}", do=do
            ) from error
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
        if first is not None and computes_channels_last(self.spec, first.device.type):
            laid = channels_last(self.params)
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
        return (
            {name: value for name, value in self.params.items() if name not in frozen}
            if frozen
            else self.params
        )

    @classmethod
    def init(cls, spec: ModelSpec, seed: int, device: torch.device, dtype: torch.dtype) -> Weights:
        """The network's own initialisation under `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = spec.module()
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
        """From what ``torch.nn.Module.state_dict`` returned, on the CPU; buffers it leaves out are as initialised.

        Raises:
            ConfigError: names or shapes are not the network's; says `where`.
        """
        module = spec.module()
        kinds = {value.dtype for value in state.values() if value.is_floating_point()}
        module.to(dtype=kinds.pop() if len(kinds) == 1 else torch.float32)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]]
            raise ConfigError(
                "the state dict does not fit the network",
                where=where,
                expected=spec.arch,
                got=" ".join(lines),
            ) from error
        params = {name: value.detach() for name, value in module.named_parameters()}
        return cls(spec, params, dict(module.named_buffers()))

    def module(self) -> nn.Module:
        """A network of its own with copies of these tensors, in evaluation mode."""
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


@cache
def frozen_of(arch: str, names: tuple[str, ...]) -> frozenset[str]:
    """Those of `names` that clients of this architecture never change."""
    patterns: tuple[str, ...] = getattr(locate(arch, nn.Module, "model"), "frozen_parameters", ())
    return frozenset(name for name in names for pattern in patterns if fnmatchcase(name, pattern))


@by_spec
def computes_channels_last(spec: ModelSpec, device: str) -> bool:
    """Whether 4-D tensors of this network lie channels last; its class may refuse with ``channels_last = False``."""
    return device in _CHANNELS_LAST_ON and getattr(
        locate(spec.arch, nn.Module, "model"), "channels_last", True
    )


def channels_last(params: Tree) -> Tree:
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
        for name, value in params.items()
    }
