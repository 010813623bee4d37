"""Layer-wise alignment of networks by optimal transport.

Reference: Singh & Jaggi, Model Fusion via Optimal Transport, NeurIPS 2020, with the settings that MA-Echo (Su et al. 2023)
and NAFI (Xiao & Cheng 2023) use. Layer by layer in forward order, the rows of the moved model's weight, its input side
already moved, are assigned to the rows of the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.weights import Weights
from fedexp.matching.assignment import assignments, sinkhorn
from fedexp.matching.structure import Group, Maps, Structure

_COST_BYTES = 256 * 2**20  # of rows that are compared at once


@dataclass(frozen=True)
class Alignment:
    """How units are compared and moved. The defaults are MA-Echo's.

    Args:
        normalize: divide rows by their Euclidean norm (+ 1e-9).
        distance: ``euclidean`` or ``squared``, of rows.
        transform: of the distances D: ``none``, ``log1p`` (log(1 + D)), or D divided by its ``max``, ``median`` or ``mean``.
        solver: ``exact`` moves every unit to one place; ``sinkhorn`` mixes units by an entropic plan.
        regularization: of ``sinkhorn``, in units of the (transformed) distance.
        output: ``inputs`` moves the input side of the last layer only; ``transported`` its rows, the classes, as well.
        biases: ``aligned`` moves them with their units; ``unaligned`` leaves biases of layers where they were (NAFI).
    """

    normalize: bool = True
    distance: Literal["euclidean", "squared"] = "euclidean"
    transform: Literal["none", "log1p", "max", "median", "mean"] = "none"
    solver: Literal["exact", "sinkhorn"] = "exact"
    regularization: float = 0.05
    output: Literal["inputs", "transported"] = "inputs"
    biases: Literal["aligned", "unaligned"] = "aligned"

    def __post_init__(self) -> None:
        require(
            self.regularization > 0, f"regularization must be positive, got {self.regularization}"
        )

    def apply(self, weights: Weights, structure: Structure, maps: Maps) -> Weights:
        """A model with its units moved."""
        moved = structure.permute_weights(weights, maps)
        if self.biases == "aligned":
            return moved
        kept = {
            layer.bias: weights.params[layer.bias]
            for layer in structure.layers
            if layer.bias is not None
        }
        return Weights(moved.spec, {**moved.params, **kept}, moved.buffers)


def align(
    models: Sequence[Weights], reference: Weights, structure: Structure, options: Alignment
) -> list[dict[str, Tensor]]:
    """What moves each of `models` onto `reference`, by unit group (`fedexp.matching.structure.Maps`, on the CPU).

    A group of several layers, tied by sums, is compared by those whose input side is already decided when its first
    layer is met. Units of frozen layers, which all models share, stay and have no map.
    """
    maps: list[dict[str, Tensor]] = [{} for _ in models]
    groups = movable(structure, reference)
    decided = {group.name for group in structure.groups if group not in groups}
    if options.output == "transported":
        groups = (*groups, structure.output)
    for group in groups:
        weights = [
            name
            for name in group.layers
            if all(slot.group in decided for slot in structure.inputs(name))
        ]
        solved = _solved(models, reference, structure, weights, maps, options)
        for own, moves in zip(maps, solved, strict=True):
            own[group.name] = moves
        decided.add(group.name)
    return maps


def movable(structure: Structure, weights: Weights) -> tuple[Group, ...]:
    """Hidden groups that no frozen layer belongs to."""
    frozen = weights.frozen
    return tuple(group for group in structure.groups if frozen.isdisjoint(group.layers))


def moved_share(structure: Structure, maps: Sequence[Maps]) -> float:
    """The share of hidden units, over models and their maps, that did not stay where they were; 0 without any."""

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
    """One group's permutation, or matrix, for every model. Compares as many models at once as memory allows."""
    rows = _rows([reference.params[name] for name in weights])
    at_once = max(1, _COST_BYTES // (8 * rows.numel()))
    solved: list[Tensor] = []
    for first in range(0, len(models), at_once):
        part = slice(first, first + at_once)
        moved = [
            _rows([structure.move_inputs(name, model.params[name], own) for name in weights])
            for model, own in zip(models[part], maps[part], strict=True)
        ]
        costs = ground_costs(torch.stack(moved), rows, options)
        solved += (
            assignments(costs)
            if options.solver == "exact"
            else sinkhorn(costs, options.regularization)
        )
    return solved


def _rows(weights: Sequence[Tensor]) -> Tensor:
    """(n, d) float64: all that comes into each unit."""
    return torch.cat([value.flatten(1) for value in weights], 1).double()


def ground_costs(moved: Tensor, reference: Tensor, options: Alignment) -> Tensor:
    """Distances of rows.

    Args:
        moved: (models, n, d) float64; reference: (n, d).

    Returns:
        (models, n, n): entry [i, a, b] for row a of model i and row b of the reference.
    """
    if options.normalize:
        moved = moved / (moved.norm(dim=2, keepdim=True) + 1e-9)
        reference = reference / (reference.norm(dim=1, keepdim=True) + 1e-9)
    products = (moved.reshape(-1, moved.shape[2]) @ reference.T).reshape(*moved.shape[:2], -1)
    cost = moved.square().sum(2)[:, :, None] + reference.square().sum(1) - 2 * products
    cost = cost.clamp(min=0)
    if options.distance == "euclidean":
        cost = cost.sqrt()
    if options.transform == "log1p":
        return cost.log1p()
    if options.transform == "none":
        return cost
    flat = cost.flatten(1)
    scale = {
        "max": lambda: flat.amax(1),
        "median": lambda: flat.median(1).values,
        "mean": lambda: flat.mean(1),
    }
    return cost / (scale[options.transform]()[:, None, None] + torch.finfo(cost.dtype).tiny)
