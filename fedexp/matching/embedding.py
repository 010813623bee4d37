"""A small network inside a wider network of the same architecture.

The small network is laid out in the wider network, or cut out of it.
"""

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
    """The positions of the units of a small network in a large one.

    Args:
        small: Structure of the small network.
        large: Structure of the large network, of the same architecture. Only the widths
            may differ.
        units: For each group, the unit of `large` to which each unit of `small`
            corresponds, (n,) int64, without repetition. Groups that are not named have
            the same width in both networks and do not move.
    """

    small: Structure
    large: Structure
    units: Mapping[str, Tensor]

    def lay_out(self, weights: Weights) -> Weights:
        """Return a model of `small` as a model of `large`.

        Entries that belong to units which the small network lacks are zero.
        """
        shapes = _shapes(self.large.spec)

        def laid(name: str, value: Tensor) -> Tensor:
            for axis, places in self._places(name, shapes[name]):
                wide = value.new_zeros(
                    *value.shape[:axis], shapes[name][axis], *value.shape[axis + 1 :]
                )
                value = wide.index_copy_(axis, places.to(value.device), value)
            return value

        return _mapped(weights, self.large.spec, laid)

    def cut_out(self, weights: Weights) -> Weights:
        """Return the part of a model of `large` that is a model of `small`."""
        shapes = _shapes(self.large.spec)

        def part(name: str, value: Tensor) -> Tensor:
            for axis, places in self._places(name, shapes[name]):
                value = value.index_select(axis, places.to(value.device))
            return value

        return _mapped(weights, self.small.spec, part)

    def _places(self, name: str, shape: torch.Size) -> list[tuple[int, Tensor]]:
        """Return the positions of a small tensor's entries in the large tensor.

        There is one result per axis that belongs to groups in `units`.

        Returns:
            Pairs of an axis and a tensor of shape (n,), int64. The tensor contains, for
            each of the n positions along the axis of the small tensor, the position in
            the large tensor.
        """
        pairs = list(
            zip(self.small.unit_axes.get(name, ()), self.large.unit_axes.get(name, ()), strict=True)
        )
        found = []

        for axis in sorted({a.axis for a, _ in pairs if a.group in self.units}):
            here = [(a, b) for a, b in pairs if a.axis == axis]
            # Entries that belong to no unit keep their order
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
    """Return the common unit of each of a client's n units, of shape (n,), by group.

    A client that was not in the cohort gets the n common units that most models have.

    Args:
        client: The client.
        units: For each group, the common unit of each unit of each model in the cohort,
            of shape (models, n), int64.
        cohort: The clients that trained these models, in the same order.
    """
    return {
        name: own[cohort.index(client)] if client in cohort else _most_shared(own)
        for name, own in units.items()
    }


def _most_shared(units: Tensor) -> Tensor:
    """Return the n common units that most models have, in ascending order.

    `units` contains the common units of each model, of shape (models, n). If two units
    belong to equally many models, the unit with the lower number is preferred.
    """
    order = torch.bincount(units.flatten()).argsort(descending=True, stable=True)
    return order[: units.shape[1]].sort().values


def _mapped(weights: Weights, spec: ModelSpec, change: Callable[[str, Tensor], Tensor]) -> Weights:
    def over(tree: Tree) -> Tree:
        return {name: change(name, value) for name, value in tree.items()}

    return Weights(spec, over(weights.params), over(weights.buffers))


@by_spec
def _shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of every parameter and buffer."""
    module = spec.module_without_values()
    return {
        name: value.shape for name, value in (*module.named_parameters(), *module.named_buffers())
    }
