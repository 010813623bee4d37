"""Networks as graphs: units are nodes, and weights are attributes of edges.

An edge connects a unit that a layer reads with a unit that the layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.errors import ConfigError
from fedexp.core.weights import Weights
from fedexp.matching.structure import Group, Structure


@dataclass(frozen=True, eq=False)
class Edges:
    """The weights of one layer, as edges from the units it reads to those it computes.

    Args:
        target: Name of the group to which the weight's rows belong. None if these units
            cannot move: the network's output and units of frozen tensors.
        source: Name of the group to which the weight's columns belong. None if these
            columns cannot move: the network's input and units of frozen tensors.
        values: Weights of shape (models, rows, columns, k), float64. An edge has k
            weights: the entries of a convolution's kernel, or the positions of a
            flattened feature map. Otherwise k is 1.
    """

    target: str | None
    source: str | None
    values: Tensor


def check_equal(models: Sequence[Weights]) -> None:
    """Check that all models have the same layers and widths."""
    first = {name: tuple(value.shape) for name, value in models[0].params.items()}

    for number, model in enumerate(models):
        shapes = {name: tuple(value.shape) for name, value in model.params.items()}
        if shapes != first:
            name = next(name for name in {**first, **shapes} if first.get(name) != shapes.get(name))
            raise ConfigError(
                "models of different widths cannot be matched unit by unit: "
                "every unit needs a partner in every model",
                where="aggregator",
                expected=f"'{name}' of {first.get(name)} in all models",
                got=f"{shapes.get(name)} in model {number}",
                do="give all clients one architecture",
            )


def edges_of(
    models: Sequence[Weights], structure: Structure, groups: Sequence[Group]
) -> list[Edges]:
    """Return all weights of linear and convolutional layers as edges, each weight once.

    Biases, norms and buffers are not edges.

    Args:
        models: The models.
        structure: Their structure.
        groups: The groups that may move.
    """
    names = {group.name for group in groups}
    rows = {weight: group.name for group in groups for weight in group.layers}
    found = []

    for layer in structure.layers:
        stacked = torch.stack([model.params[layer.weight].double() for model in models])
        values = stacked.flatten(3) if stacked.dim() > 3 else stacked[..., None]
        rest = torch.ones(values.shape[2], dtype=torch.bool)
        for unit_axis in structure.inputs(layer.weight):
            rest[unit_axis.positions.flatten()] = False
            part = values[:, :, unit_axis.positions.flatten().to(values.device)]
            part = part.reshape(*values.shape[:2], len(unit_axis.positions), -1)
            found.append(
                Edges(
                    rows.get(layer.weight),
                    unit_axis.group if unit_axis.group in names else None,
                    part,
                )
            )

        if bool(rest.any()):
            found.append(Edges(rows.get(layer.weight), None, values[:, :, rest.to(values.device)]))

    return found
