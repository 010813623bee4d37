"""Bayesian matching layer by layer, from the first hidden layer to the last.

Reference: Wang et al., Federated Learning with Matched Averaging (FedMA), ICLR 2020,
    Algorithm 1. NAFI uses it for convolutional networks.

Matching assigns the hidden units of all models to common units. A unit is compared by
its incoming weights and its bias. Units of layers whose outputs are summed form one
group and are matched together. Once a group is matched, every model is laid out over
the common units: its units move to the positions of their common units, and common
units that the model lacks get zeros. A hidden layer whose inputs and outputs are all
common (the network's input is common, too) is replaced by its posterior mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedexp.core.layers import Layer
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.matching.alignment import held_groups
from fedexp.matching.beta_bernoulli import BetaBernoulli, match
from fedexp.matching.chains import BIAS_MEAN
from fedexp.matching.embedding import Embedding
from fedexp.matching.structure import Structure, UnitAxis, structure_of, with_widths


@dataclass(frozen=True, eq=False)
class PartlyMatched:
    """Models of one network whose first groups of hidden units are matched.

    Args:
        models: At least one model.
        units: For each matched group, in forward order: the common unit of each of the
            n units of each model, of shape (models, n), int64, on the CPU.
        pending: Groups that are matched, but whose match is not applied to the models
            yet, with the number of common units of each.
    """

    models: Sequence[Weights]
    units: Mapping[str, Tensor]
    pending: Mapping[str, int] = field(default_factory=dict)

    def match_next(
        self, input_shape: tuple[int, ...], options: BetaBernoulli, order: np.ndarray
    ) -> PartlyMatched:
        """Match the next group.

        Units of a frozen tensor do not move, see `held_groups`. A group has several
        layers if their outputs are summed. Only layers whose inputs are already
        matched are then compared.

        Args:
            input_shape: Shape of one sample.
            options: Options of the matching.
            order: Order in which each sweep visits the models, of shape (sweeps,
                models).
        """
        structure = structure_of(self.models[0].spec, input_shape)
        group = structure.groups[len(self.units)]
        if group.name in held_groups(structure, self.models[0]):
            units, width = torch.arange(group.size).expand(len(self.models), -1).clone(), group.size
        else:
            known = set(self.units)
            layers = [
                layer
                for layer in structure.layers
                if layer.weight in group.layers and _sources(structure, layer) <= known
            ]
            rows = [self._rows(number, structure, layers) for number in range(len(self.models))]
            biases = sum(layer.bias is not None for layer in layers)
            mu0 = torch.zeros_like(rows[0][0])
            mu0[len(mu0) - biases :] = BIAS_MEAN

            q = rows[0].new_full((len(rows), len(mu0)), 1 / options.sigma)
            found = match(rows, q, mu0, options, order)
            units, width = torch.stack(found.units), len(found.members)

        return replace(
            self,
            units={**self.units, group.name: units},
            pending={**self.pending, group.name: width},
        )

    def laid_out(self, input_shape: tuple[int, ...], options: BetaBernoulli) -> PartlyMatched:
        """Lay out all models over the common units of the groups matched so far.

        Hidden layers whose inputs and outputs are then common (`common_layers`) are
        replaced by their posterior means over the models. Frozen layers are not.
        """
        spec = self.models[0].spec
        small = structure_of(spec, input_shape)
        if any(group.size != self.pending.get(group.name, group.size) for group in small.groups):
            spec = with_widths(spec, input_shape, self.pending)

        large = structure_of(spec, input_shape)
        embeddings = (
            Embedding(small, large, {name: self.units[name][number] for name in self.pending})
            for number in range(len(self.models))
        )
        models = [
            embedding.lay_out(model)
            for embedding, model in zip(embeddings, self.models, strict=True)
        ]
        before = common_layers(large, set(self.units) - set(self.pending))
        agreed: Tree = {}

        for layer in common_layers(large, set(self.units)):
            if layer not in before and layer.weight not in models[0].frozen:
                units = self.units[_owner(large, layer)].flatten()
                agreed |= _posterior_means(models, layer, units, options)

        return PartlyMatched(
            [Weights(m.spec, {**m.params, **agreed}, m.buffers) for m in models], self.units
        )

    def _rows(self, number: int, structure: Structure, layers: Sequence[Layer]) -> Tensor:
        """Collect incoming weights of each unit of one model, followed by its biases.

        Returns:
            Rows of shape (n, d), float64.
        """
        params = self.models[number].params
        weights = [
            self._over_common(number, params[x.weight], structure.inputs(x.weight)) for x in layers
        ]
        return torch.cat(
            [*weights, *(params[x.bias][:, None].double() for x in layers if x.bias is not None)], 1
        )

    def _over_common(self, number: int, weight: Tensor, inputs: Sequence[UnitAxis]) -> Tensor:
        """Return a layer's weight with one input per common unit of `pending` groups.

        Returns:
            Weights of shape (out, d), float64.
        """
        columns = weight.double()
        columns = columns.flatten(2) if columns.dim() > 2 else columns[..., None]
        others = torch.ones(columns.shape[1], dtype=torch.bool)
        parts = []

        for unit_axis in inputs:
            positions = unit_axis.positions.flatten()
            others[positions] = False
            part = columns[:, positions.to(columns.device)].reshape(
                len(columns), len(unit_axis.positions), -1
            )
            if unit_axis.group in self.pending:
                wide = part.new_zeros(len(part), self.pending[unit_axis.group], part.shape[2])
                part = wide.index_copy_(
                    1, self.units[unit_axis.group][number].to(part.device), part
                )
            parts.append(part.flatten(1))

        return torch.cat([*parts, columns[:, others.to(columns.device)].flatten(1)], 1)


def common_layers(structure: Structure, groups: set[str]) -> list[Layer]:
    """Return the hidden layers whose units and inputs all belong to `groups`.

    A layer that reads the network's input is included if its units belong to `groups`.
    """
    return [
        layer
        for layer in structure.layers
        if {_owner(structure, layer), *_sources(structure, layer)} <= groups
    ]


def _owner(structure: Structure, layer: Layer) -> str:
    """Return the group of a layer's units."""
    return next(
        group.name
        for group in (*structure.groups, structure.output)
        if layer.weight in group.layers
    )


def _sources(structure: Structure, layer: Layer) -> set[str]:
    """Return the groups that a layer reads."""
    return {unit_axis.group for unit_axis in structure.inputs(layer.weight)}


def _posterior_means(
    models: Sequence[Weights], layer: Layer, units: Tensor, options: BetaBernoulli
) -> Tree:
    """Compute the posterior mean of the weight and the bias of a layer.

    The layer is already laid out over the common units in all models. The means are
    computed in float64 and rounded once.

    Args:
        models: The models.
        layer: The layer.
        units: Common units of the n units of the first model, then of the second model,
            and so on, of shape (models * n,).
        options: Options of the matching.
    """
    first, means = models[0].params, {}
    p0, q = 1 / options.sigma0, 1 / options.sigma
    members = torch.bincount(units, minlength=len(first[layer.weight])).double()
    for name, mu0 in ((layer.weight, 0.0), (layer.bias, BIAS_MEAN)):
        if name is None:
            continue
        total = sum((model.params[name].double() for model in models), torch.zeros(()))
        precision = (p0 + q * members).to(total.device).reshape(-1, *[1] * (total.dim() - 1))
        means[name] = ((mu0 * p0 + q * total) / precision).to(first[name])
    return means
