"""Weight matching: permutations that maximise the inner product of two networks.

Reference: Ainsworth, Hayase & Srinivasa, Git Re-Basin, ICLR 2023. Two models are
    matched by coordinate descent over layers (Algorithm 1). With more models, each
    model is matched to the mean of the other models (Algorithm 3).

Permutations do not change the norm of the parameters. A larger inner product of two
networks therefore means a smaller Euclidean distance. If the inputs and the outputs of
a layer are the same group of units (as in a gate), the objective is quadratic in the
permutation of this group. The objective is then linearised at the current permutation,
and a step is taken only if the true objective rises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.trees import Tree
from fedexp.matching.assignment import assignments
from fedexp.matching.structure import Group, Structure, UnitAxis


@dataclass(frozen=True)
class WeightMatching:
    """The options of the search: when it ends, and how often it is restarted.

    Args:
        tolerance: A group of units is moved only if the move raises the inner product
            by more than this number.
        sweeps: Largest number of sweeps over all groups. The search ends earlier once
            no group moves.
        passes: Largest number of passes over the models if there are more than two. The
            search ends earlier once no model moves.
        restarts: Number of searches. The first search starts with the units in their
            original order. Every further search starts with random permutations and
            visits groups and models in other random orders. The result with the largest
            total similarity is returned. Among equal results, the first is returned.
            The paper has one search, which finds a local optimum.
    """

    tolerance: float = 1e-12
    sweeps: int = 100
    passes: int = 100
    restarts: int = 1

    def __post_init__(self) -> None:
        require(self.tolerance >= 0, f"tolerance must not be negative, got {self.tolerance}")
        require(self.sweeps > 0, f"sweeps must be positive, got {self.sweeps}")
        require(self.passes > 0, f"passes must be positive, got {self.passes}")
        require(self.restarts > 0, f"restarts must be positive, got {self.restarts}")


@dataclass(frozen=True, eq=False)
class FoundPermutations:
    """The result of a search.

    Args:
        maps: The maps of each model by unit group (`fedexp.matching.structure.Maps`),
            on the CPU.
        sweeps: Number of sweeps over all groups, summed over models, passes and
            restarts.
        similarity: Total similarity of the moved models. For two models it is their
            inner product. For more models it is the squared norm of their sum. Up to a
            constant, this squared norm is twice the sum of the inner products of all
            pairs.
    """

    maps: list[dict[str, Tensor]]
    sweeps: int
    similarity: float


def match_pair(
    model: Tree,
    reference: Tree,
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    *names: object,
) -> FoundPermutations:
    """Find the permutations that move `model` onto `reference`.

    Args:
        model: Parameters of the model to move. Biases and the parameters of norms are
            compared in the same way as weights. Buffers are not compared.
        reference: Parameters of the reference.
        structure: The structure of the network.
        groups: The groups that may move.
        options: The conditions that end the search.
        *names: Names of the random stream from which the order of the groups is drawn.
    """
    return _best(
        _search_pair(model, reference, structure, groups, options, maps, *stream)
        for (maps,), stream in _beginnings(1, structure, groups, options, *names)
    )


def _search_pair(
    model: Tree,
    reference: Tree,
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    maps: dict[str, Tensor],
    *names: object,
) -> FoundPermutations:
    """Run one search of `match_pair`, which starts with `maps`."""
    target = {name: value.double() for name, value in reference.items()}
    moved = structure.permute({name: value.double() for name, value in model.items()}, maps)
    unit_axes = {group.name: _unit_axes(structure, group, moved) for group in groups}

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
            break

    return FoundPermutations([maps], sweep + 1, inner_product(moved, target))


def match_many(
    models: Sequence[Tree],
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    *names: object,
) -> FoundPermutations:
    """Move each model onto the mean of the others, repeatedly and in random order.

    No model serves as a fixed reference. At the end, the same permutations are applied
    to all models, so that the first model is again in its original order.
    """
    return _best(
        _search_many(models, structure, groups, options, maps, *stream)
        for maps, stream in _beginnings(len(models), structure, groups, options, *names)
    )


def _search_many(
    models: Sequence[Tree],
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    maps: list[dict[str, Tensor]],
    *names: object,
) -> FoundPermutations:
    """Run one search of `match_many`, which starts with `maps`."""
    moved = [
        structure.permute({name: value.double() for name, value in model.items()}, own)
        for model, own in zip(models, maps, strict=True)
    ]
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
            identities = _identities(groups)
            found = _search_pair(
                own, others, structure, groups, options, identities, *names, turn, number
            )
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

    total = {name: torch.stack([model[name] for model in moved]).sum(0) for name in moved[0]}
    return FoundPermutations(as_the_first(maps), sweeps, inner_product(total, total))


def _beginnings(
    count: int,
    structure: Structure,
    groups: Sequence[Group],
    options: WeightMatching,
    *names: object,
) -> Iterator[tuple[list[dict[str, Tensor]], tuple[object, ...]]]:
    """Yield the first maps and the random stream of each search.

    Args:
        count: Number of models that are moved.
        structure: The structure of the network.
        groups: The groups that may move.
        options: The conditions that end the search, and the number of searches.
        *names: Names of the random stream of the first search.

    Yields:
        The first maps of each model, and the names of the search's random stream.
    """
    yield [_identities(groups) for _ in range(count)], names
    for number in range(1, options.restarts):
        starts = [
            structure.random(seed_of(*names, "restart", number, "start", model))
            for model in range(count)
        ]
        maps = [{group.name: own[group.name] for group in groups} for own in starts]
        yield maps, (*names, "restart", number)


def _identities(groups: Sequence[Group]) -> dict[str, Tensor]:
    return {group.name: torch.arange(group.size) for group in groups}


def _best(found: Iterable[FoundPermutations]) -> FoundPermutations:
    """Return the result with the highest similarity.

    Its number of sweeps is the sum over all results.
    """
    results = list(found)
    best = max(results, key=lambda result: result.similarity)
    return replace(best, sweeps=sum(result.sweeps for result in results))


def as_the_first(maps: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the same matching, with the first model's units in their original order.

    The same permutation is applied to all models, so their units still correspond.
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
    """Return the names and axes of the parameters that belong to the group's units."""
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
