"""Layer-wise alignment of networks by optimal transport.

Reference: Singh & Jaggi, Model Fusion via Optimal Transport, NeurIPS 2020, with the
    settings of MA-Echo (Su et al. 2023) and NAFI (Xiao & Cheng 2023).

The units of one model are reordered to match those of another model. Layers are visited
in forward order. The columns of a layer's weight first get the new order of the units
of the layer below. Then the weight's rows, one per unit, are assigned to the rows of
the other model's weight. As an alternative, units are compared by their activations
instead of their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Samples
from fedexp.core.weights import Weights
from fedexp.matching.activations import ActivationProducts, activation_products
from fedexp.matching.assignment import assignments, sinkhorn
from fedexp.matching.structure import Group, Maps, Structure

_COST_BYTES = 256 * 2**20  # maximum size of the rows that are compared at once


@dataclass(frozen=True)
class Alignment:
    """The options of comparing and moving units. The defaults are MA-Echo's.

    Args:
        normalize: Whether rows are divided by their Euclidean norm plus 1e-9.
        distance: ``euclidean`` or ``squared`` distances of rows.
        transform: Transform of the matrix D of distances: ``none``, ``log1p`` (log(1 +
            D)), or division of D by its ``max``, ``median`` or ``mean``.
        solver: ``exact`` moves every unit to one position. ``sinkhorn`` mixes units by
            an entropy-regularised transport plan.
        regularization: Regularisation of ``sinkhorn``, in units of the (transformed)
            distance.
        output: ``inputs`` moves only the input columns of the last layer.
            ``transported`` also moves the last layer's rows, which are the classes.
        biases: ``aligned`` moves biases with their units. ``unaligned`` leaves the
            biases of layers in place (NAFI).
        support: The quantity by which units are compared: incoming ``weights``, or
            ``activations`` on the server's data (`fedexp.matching.activations`).
    """

    normalize: bool = True
    distance: Literal["euclidean", "squared"] = "euclidean"
    transform: Literal["none", "log1p", "max", "median", "mean"] = "none"
    solver: Literal["exact", "sinkhorn"] = "exact"
    regularization: float = 0.05
    output: Literal["inputs", "transported"] = "inputs"
    biases: Literal["aligned", "unaligned"] = "aligned"
    support: Literal["weights", "activations"] = "weights"

    def __post_init__(self) -> None:
        require(
            self.regularization > 0, f"regularization must be positive, got {self.regularization}"
        )

    def apply(self, weights: Weights, structure: Structure, maps: Maps) -> Weights:
        """Return a model with its units moved."""
        moved = structure.permute_weights(weights, maps)
        if self.biases == "aligned":
            return moved
        biases = {
            layer.bias: weights.params[layer.bias]
            for layer in structure.layers
            if layer.bias is not None
        }
        return Weights(moved.spec, {**moved.params, **biases}, moved.buffers)


def align(
    models: Sequence[Weights],
    reference: Weights,
    structure: Structure,
    options: Alignment,
    samples: Samples | None = None,
) -> list[dict[str, Tensor]]:
    """Find the map that moves each of `models` onto `reference`.

    Units of a frozen tensor stay in place and have no map (`held_groups`). A group has
    several layers if their outputs are summed. Some of these layers may read units
    whose maps are not known yet. The group's units are compared only by its other
    layers.

    Args:
        models: The models to move.
        reference: The reference.
        structure: The structure of the network.
        options: How units are compared and moved.
        samples: Inputs of the networks. Only ``support=activations`` needs them.

    Returns:
        For each model its maps by unit group (`fedexp.matching.structure.Maps`), on the
        CPU.
    """
    # A cohort of one client has only the reference
    if not models:
        return []

    maps: list[dict[str, Tensor]] = [{} for _ in models]
    groups = movable(structure, reference)
    held = held_groups(structure, reference)
    decided = {group.name for group in structure.groups if group.name in held}
    if options.output == "transported" and structure.output.name not in held:
        groups = (*groups, structure.output)

    if options.support == "activations":
        assert samples is not None
        found = activation_products(models, reference, structure, groups, samples)
        for group in groups:
            plans = _solve(activation_costs(found[group.name], options), options)
            for own, moves in zip(maps, plans, strict=True):
                own[group.name] = moves
        return maps

    for group in groups:
        weights = [
            name
            for name in group.layers
            if all(unit_axis.group in decided for unit_axis in structure.inputs(name))
        ]
        solved = _solved(models, reference, structure, weights, maps, options)
        for own, moves in zip(maps, solved, strict=True):
            own[group.name] = moves
        decided.add(group.name)

    return maps


def movable(structure: Structure, weights: Weights) -> tuple[Group, ...]:
    """Return the hidden groups that are not in `held_groups`."""
    held = held_groups(structure, weights)
    return tuple(group for group in structure.groups if group.name not in held)


def held_groups(structure: Structure, weights: Weights) -> set[str]:
    """Return the names of the groups to which a frozen tensor has an axis.

    The tensor computes, normalises or reads the group's units. Frozen tensors are
    copied from one model to the fused model, so these units must stay in place.
    """
    return {
        unit_axis.group
        for name in weights.frozen
        for unit_axis in structure.unit_axes.get(name, ())
    }


def moved_share(structure: Structure, maps: Sequence[Maps]) -> float:
    """Compute the share of hidden units that moved, over all models.

    Units without a map are not counted. If there are no units with a map, the share is
    0.
    """

    def stayed(group: Group, by: Tensor) -> float:
        if by.is_floating_point():
            return float(by.trace())
        return float((by == torch.arange(group.size, device=by.device)).sum())

    pairs = [
        (group, own[group.name]) for own in maps for group in structure.groups if group.name in own
    ]
    total = sum(group.size for group, _ in pairs)
    return 1 - sum(stayed(group, by) for group, by in pairs) / total if total else 0.0


def _solved(
    models: Sequence[Weights],
    reference: Weights,
    structure: Structure,
    weights: Sequence[str],
    maps: Sequence[Maps],
    options: Alignment,
) -> list[Tensor]:
    """Find one group's permutation or matrix for every model.

    Models are compared several at a time. The memory limit `_COST_BYTES` determines how
    many.
    """
    rows = _rows([reference.params[name] for name in weights])
    at_once = max(1, _COST_BYTES // (8 * rows.numel()))
    solved: list[Tensor] = []

    for first in range(0, len(models), at_once):
        part = slice(first, first + at_once)
        moved = [
            _rows([structure.move_inputs(name, model.params[name], own) for name in weights])
            for model, own in zip(models[part], maps[part], strict=True)
        ]
        solved += _solve(ground_costs(torch.stack(moved), rows, options), options)

    return solved


def _solve(costs: Tensor, options: Alignment) -> Tensor:
    """Return each model's permutation or matrix for costs (models, n, n)."""
    if options.solver == "exact":
        return assignments(costs)
    return sinkhorn(costs, options.regularization)


def _rows(weights: Sequence[Tensor]) -> Tensor:
    """Collect all incoming weights of each unit, (n, d) float64."""
    return torch.cat([value.flatten(1) for value in weights], 1).double()


def ground_costs(moved: Tensor, reference: Tensor, options: Alignment) -> Tensor:
    """Compute distances of rows.

    Args:
        moved: Rows of shape (models, n, d), float64.
        reference: Rows of shape (n, d).
        options: How rows are compared.

    Returns:
        Distances of shape (models, n, n). Entry [i, a, b] is for row a of model i and
        row b of the reference.
    """
    if options.normalize:
        moved = moved / (moved.norm(dim=2, keepdim=True) + 1e-9)
        reference = reference / (reference.norm(dim=1, keepdim=True) + 1e-9)

    products = (moved.reshape(-1, moved.shape[2]) @ reference.T).reshape(*moved.shape[:2], -1)
    squared = moved.square().sum(2)[:, :, None] + reference.square().sum(1) - 2 * products
    return _transformed(squared, options)


def activation_costs(products: ActivationProducts, options: Alignment) -> Tensor:
    """Compute distances of activations, as `ground_costs` does for rows.

    Returns:
        Distances of shape (models, n, n).
    """
    cross, moved, reference = products.cross, products.moved, products.reference
    if options.normalize:
        lengths, length = moved.sqrt() + 1e-9, reference.sqrt() + 1e-9
        cross = cross / (lengths[:, :, None] * length)
        moved, reference = moved / lengths**2, reference / length**2
    return _transformed(moved[:, :, None] + reference - 2 * cross, options)


def _transformed(squared: Tensor, options: Alignment) -> Tensor:
    """Turn squared distances (models, n, n) into the distances of `options`."""
    cost = squared.clamp(min=0)
    if options.distance == "euclidean":
        cost = cost.sqrt()

    if options.transform == "log1p":
        return cost.log1p()
    if options.transform == "none":
        return cost

    flat = cost.flatten(1)
    scale = {
        "max": lambda: flat.amax(1),
        # The lower median. On CUDA, `deterministic=true` refuses `Tensor.median`.
        "median": lambda: flat.sort(1).values[:, (flat.shape[1] - 1) // 2],
        "mean": lambda: flat.mean(1),
    }

    return cost / (scale[options.transform]()[:, None, None] + torch.finfo(cost.dtype).tiny)
