"""A network inside a wider one of the same architecture: laid out in it, or cut out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.matching.structure import Structure


@dataclass(frozen=True, eq=False)
class Embedding:
    """Which units of `large` those of `small` are.

    Args:
        small, large: of one architecture; only the widths may differ.
        units: (n,) int64 by group, without repetition; groups that are not named are as wide in both, and stay.
    """

    small: Structure
    large: Structure
    units: Mapping[str, Tensor]

    def lay_out(self, weights: Weights) -> Weights:
        """A model of `small` as one of `large`; zeros wherever a unit of another model would be."""
        shapes = _shapes(self.large.spec)

        def laid(name: str, value: Tensor) -> Tensor:
            for axis, places in self._places(name, shapes[name]):
                size = shapes[name][axis]
                wide = value.new_zeros(*value.shape[:axis], size, *value.shape[axis + 1 :])
                value = wide.index_copy_(axis, places.to(value.device), value)
            return value

        return _mapped(weights, self.large.spec, laid)

    def cut_out(self, weights: Weights) -> Weights:
        """The part of a model of `large` that is a model of `small`."""
        shapes = _shapes(self.large.spec)

        def part(name: str, value: Tensor) -> Tensor:
            for axis, places in self._places(name, shapes[name]):
                value = value.index_select(axis, places.to(value.device))
            return value

        return _mapped(weights, self.small.spec, part)

    def _places(self, name: str, shape: torch.Size) -> list[tuple[int, Tensor]]:
        """(axis, (n,) int64 place in the large tensor of each entry of the small one's) wherever units move."""
        pairs = list(
            zip(self.small.slots.get(name, ()), self.large.slots.get(name, ()), strict=True)
        )
        found = []
        for axis in sorted({a.axis for a, _ in pairs if a.group in self.units}):
            here = [(a, b) for a, b in pairs if a.axis == axis]
            # What belongs to no unit keeps its order
            others = torch.ones(shape[axis], dtype=torch.bool)
            for _, b in here:
                others[b.positions.flatten()] = False
            places = torch.full(
                (int(others.sum()) + sum(a.positions.numel() for a, _ in here),), -1
            )
            for a, b in here:
                units = self.units.get(a.group, torch.arange(len(a.positions)))
                places[a.positions.flatten()] = b.positions[units].flatten()
            places[places < 0] = others.nonzero()[:, 0]
            found.append((axis, places))
        return found


def units_of(client: int, units: Mapping[str, Tensor], cohort: Sequence[int]) -> dict[str, Tensor]:
    """(n,) a group, the common units that a client was assigned to; of one that was not there, those that most models have.

    Args:
        units: (models, n) int64 by group, the common unit of each of a model's own; cohort: whose models these were.
    """
    if client in cohort:
        return {name: own[cohort.index(client)] for name, own in units.items()}
    return {name: _most_shared(own) for name, own in units.items()}


def _most_shared(units: Tensor) -> Tensor:
    """(n,) ascending; of units that as many of the models, (models, n), have, those with lower numbers."""
    order = torch.bincount(units.flatten()).argsort(descending=True, stable=True)
    return order[: units.shape[1]].sort().values


def _mapped(weights: Weights, spec: ModelSpec, change: Callable[[str, Tensor], Tensor]) -> Weights:
    def over(tree: Tree) -> Tree:
        return {name: change(name, value) for name, value in tree.items()}

    return Weights(spec, over(weights.params), over(weights.buffers))


@by_spec
def _shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Of every parameter and buffer."""
    with torch.device("meta"):
        module = spec.module()
    return {
        name: value.shape for name, value in (*module.named_parameters(), *module.named_buffers())
    }
