"""The structure of a network: which tensor axes belong to which hidden units.

The structure says which entries must move if hidden units are permuted. It is derived
from the network and then checked: a network with random parameters and a copy with
randomly permuted units must compute the same function. Otherwise an error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.errors import ConfigError, suggest
from fedexp.core.layers import Layer, layers_of
from fedexp.core.net import Net
from fedexp.core.seeds import seed_of, torch_generator
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights, by_spec
from fedexp.matching.tainting import Flows, flows_of, refusal

Maps = Mapping[str, Tensor]
"""One map per group of units, by the group's name. A group without a map does not move.

A map of a group of n units is a permutation or a matrix. A permutation `perm` of shape
(n,), int64, means ``new_unit[j] = old_unit[perm[j]]``. Column j of a matrix T of shape
(n, n) contains the shares of the old units in new unit j:
``new_unit[j] = sum_a T[a, j] old_unit[a]``. A permutation equals the matrix with
``T[perm[j], j] = 1`` and zeros elsewhere.
"""

_TOLERANCE = 1e-10  # relative tolerance in float64


@dataclass(frozen=True)
class Group:
    """Units that must be permuted in the same way in one or several layers.

    Args:
        name: Name of the weight of the group's first layer.
        size: Number of units.
        layers: Names of the weights whose rows (axis 0) are these units, in forward
            order. There are several if the outputs of several layers are summed
            (ResNet).
    """

    name: str
    size: int
    layers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class UnitAxis:
    """One axis of a tensor whose positions belong to the units of a group.

    Args:
        axis: Index of the axis.
        group: Name of the group.
        positions: Positions of each unit along `axis`, of shape (size, k), int64. Each
            unit has k = 1 position. After a flattened feature map of height h and width
            w, it has k = h * w positions.
    """

    axis: int
    group: str
    positions: Tensor


@dataclass(frozen=True, eq=False)
class Structure:
    """The hidden units of a network.

    Args:
        spec: The network.
        layers: Linear and convolutional layers of the network in forward order.
        groups: Groups of hidden units, in forward order.
        output: The units of the last layer. They can be moved as well, but then the
            logits belong to other classes.
        unit_axes: For each parameter and buffer, the axes that belong to units.
        columns: Number of input features or channels of each layer, by name of its
            weight.
    """

    spec: ModelSpec
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    output: Group
    unit_axes: Mapping[str, tuple[UnitAxis, ...]]
    columns: Mapping[str, int]

    def permute(self, tree: Tree, maps: Maps) -> Tree:
        """Return parameters or buffers with their units moved.

        Tensors without moved units are returned without a copy. If all maps are
        permutations of hidden groups, the network's function does not change.
        """
        return {
            name: self._moved(value, self.unit_axes.get(name, ()), maps)
            for name, value in tree.items()
        }

    def permute_weights(self, weights: Weights, maps: Maps) -> Weights:
        """Apply `permute` to a whole model."""
        return Weights(
            weights.spec, self.permute(weights.params, maps), self.permute(weights.buffers, maps)
        )

    def move_inputs(self, weight: str, value: Tensor, maps: Maps) -> Tensor:
        """Move only the inputs (axis 1) of a layer's weight."""
        return self._moved(value, self.inputs(weight), maps)

    def permute_inputs(self, weight: str, rows: Tensor, maps: Maps) -> Tensor:
        """Move rows in the same way as the input columns of a layer.

        Row i of `rows` belongs to input column i. For example, let K be the `rows`, and
        ``Q = K K^T`` a matrix over the input columns. If a matrix T moves the columns,
        Q becomes ``T^T Q T``, and this method returns ``T^T K``.

        Args:
            weight: Name of the layer's weight, (out, in) or (out, channels, kh, kw).
            rows: Rows of r entries each: (in, r), or (channels * kh * kw, r) in the
                order of the flattened kernel.
            maps: Maps of the units.
        """
        for unit_axis in self.inputs(weight):
            if unit_axis.group in maps:
                blocks = rows.reshape(self.columns[weight], -1)
                rows = _moved(blocks, 0, unit_axis.positions, maps[unit_axis.group]).reshape(
                    rows.shape
                )
        return rows

    def inputs(self, weight: str) -> tuple[UnitAxis, ...]:
        """Return the input axes of a layer's weight. The first layer has none."""
        return tuple(
            unit_axis for unit_axis in self.unit_axes.get(weight, ()) if unit_axis.axis == 1
        )

    def random(self, seed: int) -> dict[str, Tensor]:
        """Draw a permutation of every hidden group.

        Permutations are drawn so that only a group with a single unit gets the
        identity.
        """
        maps = {}
        for group in self.groups:
            permutation = torch.randperm(group.size, generator=torch_generator(seed, group.name))
            is_identity = torch.equal(permutation, torch.arange(group.size))
            maps[group.name] = permutation.flip(0) if is_identity else permutation
        return maps

    @staticmethod
    def _moved(value: Tensor, unit_axes: tuple[UnitAxis, ...], maps: Maps) -> Tensor:
        for unit_axis in unit_axes:
            if unit_axis.group in maps:
                value = _moved(value, unit_axis.axis, unit_axis.positions, maps[unit_axis.group])
        return value


def _moved(value: Tensor, axis: int, positions: Tensor, by: Tensor) -> Tensor:
    """Move the units at `positions` along `axis` by a permutation or a matrix."""
    if not by.is_floating_point():
        by = by.to(positions.device)
        index = torch.arange(value.shape[axis])
        index[positions.flatten()] = positions[by].flatten()
        return value.index_select(axis, index.to(value.device))
    flat = positions.flatten().to(value.device)
    units = value.movedim(axis, 0)
    mixed = by.to(value).T @ units.index_select(0, flat).reshape(len(positions), -1)
    moved = units.clone().index_copy_(0, flat, mixed.reshape(len(flat), *units.shape[1:]))
    return moved.movedim(0, axis).contiguous()


@by_spec
def structure_of(spec: ModelSpec, input_shape: tuple[int, ...]) -> Structure:
    """Derive and check the structure of a network.

    A network may consist of:

    - linear and convolutional layers,
    - between them, any operations that treat units one by one (activations, pools,
      flattening, sums as in ResNets, products),
    - BatchNorm and InstanceNorm,
    - GroupNorm with one group, or with one group per channel,
    - LayerNorm over all units.

    Raises:
        ConfigError: The network has no such structure.
    """
    layers = layers_of(spec, input_shape)
    flows = flows_of(spec, input_shape)
    last = layers[-1].weight
    if [_weight(name) for name in flows.outputs] != [last]:
        raise refusal("the network's output is not only that of its last layer")

    group_of = _tied(flows)
    members: dict[str, list[str]] = {}
    # In forward order
    for name in flows.sizes:
        members.setdefault(group_of[name], []).append(name)

    groups = {
        key: Group(_weight(names[0]), flows.sizes[names[0]], tuple(map(_weight, names)))
        for key, names in members.items()
    }
    unit_axes: dict[str, tuple[UnitAxis, ...]] = {
        tensor: (UnitAxis(0, groups[group_of[name]].name, torch.arange(size)[:, None]),)
        for name, size in flows.sizes.items()
        for tensor in flows.tensors[name]
    }

    for reader, sources in flows.reads.items():
        found: dict[str, Tensor] = {}
        for source, units in sources.items():
            found[group_of[source]] = torch.maximum(found.get(group_of[source], units), units)

        for key, units in found.items():
            group = groups[key]
            counts = torch.bincount(units[units >= 0], minlength=group.size)
            if not bool((counts == counts[0]).all()):
                raise refusal(
                    f"layer '{reader}' reads some units of '{group.name}' more often than others"
                )
            order = units.argsort(stable=True)[int((units < 0).sum()) :]
            is_layer = reader in flows.sizes
            for tensor in [_weight(reader)] if is_layer else flows.tensors[reader]:
                unit_axis = UnitAxis(
                    1 if is_layer else 0, group.name, order.reshape(group.size, -1)
                )
                unit_axes[tensor] = (*unit_axes.get(tensor, ()), unit_axis)

    output = next(group for group in groups.values() if last in group.layers)
    hidden = tuple(group for group in groups.values() if group is not output)
    columns = {_weight(name): count for name, count in flows.columns.items()}
    structure = Structure(spec, layers, hidden, output, unit_axes, columns)
    _check(structure, input_shape)

    return structure


def with_widths(
    spec: ModelSpec, input_shape: tuple[int, ...], widths: Mapping[str, int]
) -> ModelSpec:
    """Return the network with other numbers of hidden units.

    The network's class must have a static method ``with_widths(kwargs, widths)``. It
    receives all constructor arguments and the widths of all groups, and returns the
    arguments that change.

    Args:
        spec: The network.
        input_shape: Shape of one sample.
        widths: Widths by name of the group. A group that is not named keeps its width.
            With an empty mapping, the call only checks that widths can be changed,
            before anything is trained.

    Raises:
        ConfigError: The network has no such method, group or width.
    """
    groups = structure_of(spec, input_shape).groups
    sizes = {group.name: group.size for group in groups}
    for name in widths:
        if name not in sizes:
            raise ConfigError(
                f"'{name}' is not a group of hidden units", where="model", do=suggest(name, sizes)
            )

    sizes |= widths
    changed = spec.variant("with_widths", "the network's widths cannot be changed", sizes)
    module = changed.module_without_values()
    rows = {name: len(value) for name, value in module.named_parameters() if value.dim()}

    if any(rows.get(layer) != sizes[group.name] for group in groups for layer in group.layers):
        raise ConfigError(
            "`with_widths` does not return these widths", where=spec.arch, expected=sizes, got=rows
        )

    return changed


def _tied(flows: Flows) -> dict[str, str]:
    """Map the name of every layer to the name of one layer of its group.

    If an input column depends on units of several layers (a sum), these layers are in
    the same group.
    """
    group_of = {name: name for name in flows.sizes}
    for reader, sources in flows.reads.items():
        for number, (a, units_a) in enumerate(sources.items()):
            for b, units_b in list(sources.items())[:number]:
                both = (units_a >= 0) & (units_b >= 0)
                if not bool(both.any()):
                    continue
                if flows.sizes[a] != flows.sizes[b] or not torch.equal(
                    units_a[both], units_b[both]
                ):
                    raise refusal(
                        f"an input of layer '{reader}' mixes different units of "
                        f"layers '{a}' and '{b}'"
                    )

                old, new = group_of[a], group_of[b]
                group_of = {
                    name: new if group == old else group for name, group in group_of.items()
                }

    return group_of


def _weight(layer: str) -> str:
    return f"{layer}.weight".lstrip(".")


def _check(structure: Structure, input_shape: tuple[int, ...]) -> None:
    """Check the structure with random parameters.

    The network and its permuted copy must agree on random inputs, in float64.
    """
    seed = seed_of("structure")
    generator = torch_generator(seed, "values")
    weights = random_weights(structure.spec, generator)
    moved = structure.permute_weights(weights, structure.random(seed))
    if not same_function(weights, moved, input_shape, generator):
        raise refusal("the network computes another function once its hidden units are re-ordered")


def random_weights(spec: ModelSpec, generator: torch.Generator) -> Weights:
    """Draw weights for checks, in float64.

    No two units have equal weights, and the variances of norms are positive.
    """

    def noisy(tree: Tree) -> Tree:
        def draw(value: Tensor) -> Tensor:
            return torch.rand(value.shape, generator=generator, dtype=torch.float64)

        return {
            k: v * (0.5 + draw(v)) + 0.01 * draw(v) if v.is_floating_point() else v
            for k, v in tree.items()
        }

    weights = Weights.init(spec, seed_of("structure"), torch.device("cpu"), torch.float64)
    return Weights(spec, noisy(weights.params), noisy(weights.buffers))


def same_function(
    one: Weights, other: Weights, input_shape: tuple[int, ...], generator: torch.Generator
) -> bool:
    """Return whether two models in float64 agree on random inputs, up to rounding.

    Both run in evaluation mode.
    """
    x = torch.randn(2, *input_shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        a, b = (Net.for_evaluation(model)(model.params, model.buffers, x) for model in (one, other))
    return bool((a - b).abs().max() <= _TOLERANCE * a.abs().max())
