"""Folding of BatchNorm into the layer before it, to match networks without norms.

Reference: NAFI, Xiao & Cheng 2023, Appendix E.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedexp.core.errors import ConfigError
from fedexp.core.net import LAYERS
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.matching.structure import random_weights, same_function


class _Folding(NamedTuple):
    """The network without BatchNorm, and the pairs of layer and BatchNorm to fold.

    Args:
        spec: The network without BatchNorm.
        shapes: Shapes of the parameters of `spec`.
        pairs: Tuples (name of the layer, name of its BatchNorm, eps of the BatchNorm),
            in forward order.
    """

    spec: ModelSpec
    shapes: dict[str, torch.Size]
    pairs: tuple[tuple[str, str, float], ...]


def fold_batch_norm(weights: Weights, input_shape: tuple[int, ...]) -> Weights:
    """Return a model without BatchNorm that has the same outputs in evaluation mode.

    If `weights` have no BatchNorm, they are returned unchanged. Otherwise, the weight W
    and the bias b of each output unit become ``W' = gamma / sqrt(var + eps) W`` and
    ``b' = gamma (b - mean) / sqrt(var + eps) + beta``. Here gamma, beta and eps are
    those of the BatchNorm, and mean and var are its running statistics. A layer that
    has no bias and no BatchNorm after it may have a bias in the new network. This bias
    is zero. Layers keep their names.

    The network's class needs a static method ``without_batch_norm(kwargs)``. It returns
    the constructor arguments that differ for the network without BatchNorm.

    Args:
        weights: The model.
        input_shape: Shape of one sample.

    Raises:
        ConfigError: The class has no such method, or a BatchNorm does not follow a
            layer directly.
    """
    folding = _folding(weights.spec, input_shape)
    return _folded(weights, folding) if folding.pairs else weights


def folded_spec(spec: ModelSpec, input_shape: tuple[int, ...]) -> ModelSpec:
    """Return the spec of the model that `fold_batch_norm` returns.

    It raises the same errors as `fold_batch_norm`, and can be called before training.
    """
    return _folding(spec, input_shape).spec


def _folded(weights: Weights, folding: _Folding) -> Weights:
    params: Tree = dict(weights.params)
    for layer, norm, eps in folding.pairs:
        weight = params[f"{layer}.weight"].double()
        mean, var = (weights.buffers[f"{norm}.running_{name}"].double() for name in ("mean", "var"))
        scale = params.get(f"{norm}.weight", 1.0) / torch.sqrt(var + eps)
        params[f"{layer}.weight"] = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
        params[f"{layer}.bias"] = scale * (params.get(f"{layer}.bias", 0.0) - mean) + params.get(
            f"{norm}.bias", 0.0
        )

    first = next(iter(weights.params.values()))
    params = {
        name: params.get(name, first.new_zeros(shape)).to(first.dtype)
        for name, shape in folding.shapes.items()
    }
    norms = tuple(f"{norm}." for _, norm, _ in folding.pairs)
    buffers = {name: value for name, value in weights.buffers.items() if not name.startswith(norms)}

    return Weights(folding.spec, params, buffers)


@by_spec
def _folding(spec: ModelSpec, input_shape: tuple[int, ...]) -> _Folding:
    pairs = _pairs(spec, input_shape)
    if not pairs:
        return _Folding(spec, {}, ())

    changed = spec.variant(
        "without_batch_norm", "the network's BatchNorms cannot be folded into its layers"
    )

    module = changed.module_without_values()
    shapes = {name: value.shape for name, value in module.named_parameters()}

    folding = _Folding(changed, shapes, pairs)
    generator = torch_generator(seed_of("folding"))
    weights = random_weights(spec, generator)
    if not same_function(weights, _folded(weights, folding), input_shape, generator):
        raise ConfigError(
            "the network computes another function once BatchNorm is folded into its layers",
            where="model",
            got=f"{spec.arch}, folded: {dict(changed.kwargs)}",
        )

    return folding


def _pairs(spec: ModelSpec, input_shape: tuple[int, ...]) -> tuple[tuple[str, str, float], ...]:
    """Find each BatchNorm of the forward pass and the layer directly before it."""
    outputs: list[tuple[str, Tensor]] = []
    pairs: list[tuple[str, str, float]] = []

    def hook(name: str, part: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(part, LAYERS):
            outputs.append((name, output))
        elif isinstance(part, nn.modules.batchnorm._BatchNorm):
            layer = next((layer for layer, output in outputs if output is given[0]), None)
            if layer is None or part.running_mean is None:
                raise ConfigError(
                    f"BatchNorm '{name}' does not follow a layer directly, "
                    "or has no running statistics",
                    where="model",
                    got=spec.arch,
                    do="choose another model, or a method that does not fold BatchNorm",
                )

            pairs.append((layer, name, part.eps))

    module = spec.module().eval()
    for name, part in module.named_modules():
        part.register_forward_hook(partial(hook, name))

    with torch.no_grad():
        module(torch.zeros(1, *input_shape))

    return tuple(pairs)
