"""Inner products of hidden units' activations, which are used to compare units.

Reference: Singh & Jaggi, Model Fusion via Optimal Transport, NeurIPS 2020,
    activation-based alignment.

All models run on the same samples. A unit is one row in each layer of its group. Its
activations are the outputs of these layers at this row, before norms and activation
functions. A unit of a convolution has one activation per sample and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.data import Samples
from fedexp.core.layers import Layer
from fedexp.core.net import Net
from fedexp.core.weights import Weights
from fedexp.matching.structure import Group, Structure

_BATCH = 64  # samples per forward pass


@dataclass(eq=False)
class ActivationProducts:
    """Inner products of the activations of one group's n units, in float64.

    Args:
        cross: Products of each model's units with the reference's units, of shape
            (models, n, n). Entry [i, a, b] is for unit a of model i and unit b of the
            reference.
        moved: Squared norms of the activations of each model's units, of shape (models,
            n).
        reference: Squared norms of the activations of the reference's units, of shape
            (n,).
    """

    cross: Tensor
    moved: Tensor
    reference: Tensor


@torch.no_grad()
def activation_products(
    models: Sequence[Weights],
    reference: Weights,
    structure: Structure,
    groups: Sequence[Group],
    samples: Samples,
) -> dict[str, ActivationProducts]:
    """Compute the inner products of activations for each group, by the group's name.

    Networks run in evaluation mode. To save memory, only the activations of two models
    on one batch are stored at the same time.

    Args:
        models: The models that are compared with the reference.
        reference: The reference.
        structure: The structure of the network.
        groups: The groups whose units are compared.
        samples: Inputs of the networks. Targets are not used.
    """
    net = Net.for_evaluation(reference)
    device = samples.x.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=device)

    found = {
        group.name: ActivationProducts(
            zeros(len(models), group.size, group.size),
            zeros(len(models), group.size),
            zeros(group.size),
        )
        for group in groups
    }

    for start in range(0, len(samples), _BATCH):
        x = samples.inputs(slice(start, start + _BATCH))
        targets = _activations(net, reference, structure, groups, x)
        for name, target in targets.items():
            found[name].reference += target.square().sum(1)

        for number, model in enumerate(models):
            for name, rows in _activations(net, model, structure, groups, x).items():
                found[name].cross[number] += rows @ targets[name].T
                found[name].moved[number] += rows.square().sum(1)

    return found


def _activations(
    net: Net, weights: Weights, structure: Structure, groups: Sequence[Group], x: Tensor
) -> dict[str, Tensor]:
    """Return the activations of each group's units on a batch, (n, entries) float64."""
    layers = {layer.weight: layer for layer in structure.layers}
    names = [name for group in groups for name in group.layers]
    seen = net.observe(weights.params, weights.buffers, x, layers=names).layers
    return {
        group.name: torch.cat(
            [_outputs(layers[name], seen[name], weights) for name in group.layers], 1
        ).double()
        for group in groups
    }


def _outputs(layer: Layer, inputs: Tensor, weights: Weights) -> Tensor:
    """Return a layer's outputs by unit, (units, entries)."""
    weight = weights.params[layer.weight]
    bias = None if layer.bias is None else weights.params[layer.bias]
    if layer.kind == "linear":
        return F.linear(inputs, weight, bias).movedim(-1, 0).flatten(1)
    outputs = F.conv2d(inputs, weight, bias, layer.stride, layer.padding, layer.dilation)
    return outputs.movedim(1, 0).flatten(1)
