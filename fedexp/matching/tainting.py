"""The flow of units between layers, found by running the network with NaN values.

Every linear, convolutional and norm layer is replaced by a stand-in, which records the
input columns that contain NaN. A linear or convolutional stand-in outputs ones, and one
of them, the source, outputs NaN for some of its units. A NaN passes through everything
between layers (activations, pools, flattening, sums) and through norms. It stops at the
next linear or convolutional layers.

The numbers of the source's units are encoded as bits. For each bit b = 0, 1, ..., two
patterns are run. Pattern 2b has NaN in the units whose number has bit b set, and
pattern 2b + 1 has NaN in the other units. If an input column depends on exactly one
unit, it receives NaN in exactly one pattern of each pair, and this reveals bit b. The
patterns are the samples of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.net import LAYERS
from fedexp.core.weights import ModelSpec

# Largest size in bytes of a layer's output in one pass, for all patterns together
_BYTES = 16 * 2**20
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True, eq=False)
class Flows:
    """The observed flow of units: which layers read the units of which layers.

    Args:
        sizes: Number of output units of every linear and convolutional layer, by module
            name, in forward order.
        columns: Number of input columns (features or channels) of these layers.
        tensors: All parameters and buffers of every linear, convolutional and norm
            layer, except scalars.
        reads: For each linear, convolutional or norm layer (the reader), the layers
            that it reads. For each of these layers, a tensor of shape (columns,),
            int64: the unit on which each input column of the reader depends, or -1 if
            there is none.
        outputs: Layers whose units reach the network's output directly.
    """

    sizes: dict[str, int]
    columns: dict[str, int]
    tensors: dict[str, tuple[str, ...]]
    reads: dict[str, dict[str, Tensor]]
    outputs: tuple[str, ...]


def norm_layers(spec: ModelSpec) -> list[str]:
    """Return the names of the norm layers (Batch-, Instance-, Layer- and GroupNorm)."""
    return [name for name, part in spec.module().named_modules() if isinstance(part, _NORMS)]


def flows_of(spec: ModelSpec, input_shape: tuple[int, ...]) -> Flows:
    """Trace the units of a network from layer to layer.

    Raises:
        ConfigError: An input of a layer depends on several units of one earlier layer,
            or a layer cannot be traced.
    """
    with torch.no_grad():
        module = spec.module().eval()
        watched: dict[str, nn.Module] = {
            n: m for n, m in module.named_modules() if isinstance(m, LAYERS + _NORMS)
        }

        for name, m in module.named_modules():
            if (
                type(m).__module__.startswith("torch.nn.")
                and name not in watched
                and any(value.dim() > 1 for value in m.parameters(recurse=False))
            ):
                raise refusal(
                    f"layer '{name}' ({type(m).__name__}) has its own units, "
                    "and it is not known how they are read"
                )

        for name, m in watched.items():
            if isinstance(m, nn.GroupNorm) and 1 < m.num_groups < m.num_channels:
                raise refusal(
                    f"norm layer '{name}' normalises {m.num_groups} groups of channels, "
                    "which fixes their order"
                )

        shapes = _output_shapes(module, watched, input_shape)
        weights = {n: m.weight for n in shapes if isinstance(m := watched[n], LAYERS)}
        run = _Stage(module, watched, shapes, input_shape)
        sizes = {name: weight.shape[0] for name, weight in weights.items()}
        reads: dict[str, dict[str, Tensor]] = {}
        outputs = []

        for source, size in sizes.items():
            bits = max(1, math.ceil(math.log2(size)))
            numbers = torch.arange(size) >> torch.arange(bits)[:, None] & 1
            patterns = torch.stack([numbers == 1, numbers == 0], 1).reshape(2 * bits, size)
            seen, at_output = run(source, patterns)
            for reader, hit in seen.items():
                units = _decoded(hit, reader, source)
                if (units >= 0).any():
                    reads.setdefault(reader, {})[source] = units
            if at_output:
                outputs.append(source)

    return Flows(
        sizes,
        {name: weight.shape[1] for name, weight in weights.items()},
        {name: _tensors(name, m) for name, m in watched.items()},
        reads,
        tuple(outputs),
    )


def _tensors(name: str, layer: nn.Module) -> tuple[str, ...]:
    named = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
    return tuple(f"{name}.{key}".lstrip(".") for key, value in named if value.dim())


def refusal(what: str) -> ConfigError:
    """Return the error for a network whose units cannot be exchanged."""
    return ConfigError(
        what,
        where="model",
        expected="layers between which hidden units can be re-ordered "
        "without changing the function",
        do="choose a method that does not match units (average, fedavg), or another model",
    )


def _output_shapes(
    module: nn.Module, watched: dict[str, nn.Module], input_shape: tuple[int, ...]
) -> dict[str, list[torch.Size]]:
    """Return each layer's output shapes (one per call, no batch), in forward order."""
    shapes: dict[str, list[torch.Size]] = {}

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        shapes.setdefault(name, []).append(output.shape[1:])

    handles = [m.register_forward_hook(partial(note, name)) for name, m in watched.items()]
    module(torch.zeros(1, *input_shape))
    for handle in handles:
        handle.remove()
    return shapes


class _Stage:
    """The network with a stand-in for each of its layers."""

    def __init__(
        self,
        module: nn.Module,
        watched: dict[str, nn.Module],
        shapes: dict[str, list[torch.Size]],
        input_shape: tuple[int, ...],
    ) -> None:
        self.module, self.shapes, self.input_shape = module, shapes, input_shape
        self.source, self.patterns = "", torch.zeros(0, 0, dtype=torch.bool)
        self.seen: dict[str, Tensor] = {}
        self.calls: dict[str, int] = {}
        self.at_once = max(
            1, _BYTES // (4 * max(math.prod(call) for calls in shapes.values() for call in calls))
        )
        for name, layer in watched.items():
            layer.forward = self._stand_in(name, layer)

    def __call__(self, source: str, patterns: Tensor) -> tuple[dict[str, Tensor], bool]:
        """Run the patterns through the network.

        Returns:
            For every layer, whether each input column contains a NaN, (patterns,
            columns), bool. Second, whether the network's output contains a NaN in any
            pattern.
        """
        found, reached = [], False
        for part in torch.split(patterns, self.at_once):
            self.source, self.patterns, self.seen, self.calls = source, part, {}, {}
            reached |= bool(self.module(torch.ones(len(part), *self.input_shape)).isnan().any())
            found.append(self.seen)
        return {name: torch.cat([seen[name] for seen in found]) for name in found[0]}, reached

    def _stand_in(self, name: str, layer: nn.Module) -> Callable[[Tensor], Tensor]:
        # Whether the units are on the last axis. Otherwise they are on axis 1.
        last = isinstance(layer, nn.Linear | nn.LayerNorm)

        def forward(x: Tensor) -> Tensor:
            top = (
                x.reshape(len(x), -1, x.shape[-1]).amax(1)
                if last
                else x.reshape(*x.shape[:2], -1).amax(2)
            )
            # The maximum over positions is NaN if one position is NaN. Checking every
            # position is slower.
            hit = top.isnan()
            if name in self.seen and not torch.equal(self.seen[name], hit):
                raise refusal(f"layer '{name}' is applied to the units of different layers")

            self.seen[name] = hit
            if isinstance(layer, _NORMS):
                return x

            call = self.calls.get(name, 0)
            self.calls[name] = call + 1
            output = torch.ones(len(x), *self.shapes[name][call])
            if name == self.source:
                units = output if last else output.movedim(1, -1)
                units.masked_fill_(
                    self.patterns.reshape(len(x), *[1] * (units.dim() - 2), -1), math.nan
                )

            return output

        return forward


def _decoded(hit: Tensor, reader: str, source: str) -> Tensor:
    """Decode which patterns reached each input column into unit numbers.

    Args:
        hit: Whether each column received NaN in each pattern, of shape
            (2 * bits, columns), bool.
        reader: Name of the layer that the columns belong to.
        source: Name of the layer whose units had NaN.

    Returns:
        Unit of each column, of shape (columns,), int64, or -1 if a column depends on no
        unit.
    """
    given, rest = hit[0::2], hit[1::2]
    touched = hit.any(0)
    if not torch.equal(given ^ rest, touched.expand_as(given)):
        raise refusal(f"an input of layer '{reader}' mixes several units of layer '{source}'")
    units = (given.long() << torch.arange(len(given))[:, None]).sum(0)
    return torch.where(touched, units, -1)
