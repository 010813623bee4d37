"""Weight matching: permutations that maximise the inner product of two networks.

Reference: Ainsworth, Hayase & Srinivasa, Git Re-Basin, ICLR 2023: coordinate descent
    over layers for two models (Algorithm 1), and matching to the mean of the others for
    many (Algorithm 3).

A larger inner product of the parameters means a smaller Euclidean distance. If the
inputs and the outputs of a layer are the same group of units (as in a gate), the
objective is quadratic in the permutation of this group. It is linearised at the present
permutation, and a step is taken only if the objective itself rises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import torch_generator
from fedexp.core.trees import Tree
from fedexp.matching.assignment import assignments
from fedexp.matching.structure import Group, Structure, UnitAxis


@dataclass(frozen=True)
class WeightMatching:
    """The conditions that end the search.

    Args:
        tolerance: A group of units is moved only if the move raises the inner product
            by more than this.
        sweeps: Largest number of sweeps over all groups. The search ends earlier once
            no group moves.
        passes: Largest number of passes over the models if there are more than two. The
            search ends earlier once no model moves.
    """

    tolerance: float = 1e-12
    sweeps: int = 100
    passes: int = 100

    def __post_init__(self) -> None:
        require(self.tolerance >= 0, f"tolerance must not be negative, got {self.tolerance}")
        require(self.sweeps > 0, f"sweeps must be positive, got {self.sweeps}")
        require(self.passes > 0, f"passes must be positive, got {self.passes}")


@dataclass(frozen=True, eq=False)
class FoundPermutations:
    """The result of a search.

    Args:
        maps: The maps of each model by unit group (`fedexp.matching.structure.Maps`),
            on the CPU.
        sweeps: Number of sweeps over all groups, summed over models and passes.
    """

    maps: list[dict[str, Tensor]]
    sweeps: int


def match_pair(
    model: Tree,
    reference: Tree,
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    *names: object,
) -> FoundPermutations:
    """Move `model` onto `reference`.

    Args:
        model: Parameters. Biases and norms count as weights do, buffers do not.
        reference: Parameters of the reference.
        structure: The structure of the network.
        groups: The groups that may move.
        options: The conditions that end the search.
        *names: Names of the stream from which the order of the groups is drawn.
    """
    target = {name: value.double() for name, value in reference.items()}
    moved = {name: value.double() for name, value in model.items()}
    unit_axes = {group.name: _unit_axes(structure, group, moved) for group in groups}
    maps = {group.name: torch.arange(group.size) for group in groups}

    for sweep in range(options.sweeps):
        improved = False
        for number in torch.randperm(
            len(groups), generator=torch_generator(*names, sweep)
        ).tolist():
            group = groups[number]
            order = assignments(-_similarities(moved, target, unit_axes[group.name])[None])[0]

            before = {name: moved[name] for name, _ in unit_axes[group.name]}
            after = structure.permute(before, {group.name: order})
            if inner_product(after, target) - inner_product(before, target) > options.tolerance:
                moved |= after
                maps[group.name] = maps[group.name][order]
                improved = True

        if not improved:
            return FoundPermutations([maps], sweep + 1)

    return FoundPermutations([maps], options.sweeps)


def match_many(
    models: Sequence[Tree],
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    *names: object,
) -> FoundPermutations:
    """Move each model onto the mean of the others, repeatedly and in random order.

    No model is the reference. Afterwards all models are moved alike so that the first
    one is again in its original order.
    """
    moved = [{name: value.double() for name, value in model.items()} for model in models]
    maps = [{group.name: torch.arange(group.size) for group in groups} for _ in models]
    sweeps = 0

    for turn in range(options.passes if len(models) > 1 else 0):
        improved = False
        total = {name: torch.stack([model[name] for model in moved]).sum(0) for name in moved[0]}
        for number in torch.randperm(
            len(models), generator=torch_generator(*names, "models", turn)
        ).tolist():
            own = moved[number]
            others = {
                name: (value - own[name]) / (len(models) - 1) for name, value in total.items()
            }
            found = match_pair(own, others, structure, groups, options, *names, turn, number)
            sweeps += found.sweeps
            orders = found.maps[0]
            if all(torch.equal(order, torch.arange(len(order))) for order in orders.values()):
                continue

            improved = True
            moved[number] = structure.permute(own, orders)
            total = {
                name: value + (moved[number][name] - own[name]) for name, value in total.items()
            }
            maps[number] = {name: order[orders[name]] for name, order in maps[number].items()}

        if not improved:
            break

    return FoundPermutations(as_the_first(maps), sweeps)


def as_the_first(maps: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the same matching, moved so that the first model keeps its order.

    All models are moved by the same permutations.
    """
    back = {name: order.argsort() for name, order in maps[0].items()}
    return [{name: order[back[name]] for name, order in own.items()} for own in maps]


def inner_product(one: Tree, other: Tree) -> float:
    """Compute the inner product over the tensors of `one`."""
    return float(sum((value * other[name]).sum() for name, value in one.items()))


def unit_rows(value: Tensor, unit_axis: UnitAxis) -> Tensor:
    """Return the entries of a tensor that belong to each unit of the axis's group.

    Returns:
        Entries of shape (units, entries).
    """
    positions = unit_axis.positions.flatten().to(value.device)
    picked = value.movedim(unit_axis.axis, 0).index_select(0, positions)
    return picked.reshape(len(unit_axis.positions), -1)


def _unit_axes(structure: Structure, group: Group, params: Tree) -> list[tuple[str, UnitAxis]]:
    """Return the axes of parameters that the group's units index."""
    return [
        (name, unit_axis)
        for name in params
        for unit_axis in structure.unit_axes.get(name, ())
        if unit_axis.group == group.name
    ]


def _similarities(moved: Tree, target: Tree, unit_axes: Sequence[tuple[str, UnitAxis]]) -> Tensor:
    """Compute the inner products of the units of `moved` and `target`.

    Returns:
        Products of shape (units, units). Entry [a, b] is for unit a of `moved` and unit
        b of `target`.
    """
    products = [
        unit_rows(moved[name], unit_axis) @ unit_rows(target[name], unit_axis).T
        for name, unit_axis in unit_axes
    ]
    return torch.stack(products).sum(0)
