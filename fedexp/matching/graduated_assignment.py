"""Graduated assignment: annealed matching of the units of two or more networks.

Reference: Liu et al., Deep Neural Network Fusion via Graph Matching (GAMF), ICML 2022,
    with the schedules of the authors' code.

For each group of n units, every model i has a matrix U_i of shape (n, n) that assigns
its units to common units. U_i U_j^T maps the units of model i to those of model j. The
affinity of two units with weights x and y is ``K(x, y) = exp(-||x - y||_4 / 2)``, where
``||.||_4`` is the 4-norm. It is computed once for incoming and once for outgoing
weights. Before the comparison with model j, the weights of model i are moved by the
current maps U_i U_j^T of the neighbouring groups. Each of the two affinities is divided
by its mean.

The reference covers chains of layers without biases. Here a group can have several
layers, whose outputs are summed (ResNet). Its units are compared by the weights of all
these layers. Biases and norms move with their units and are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import torch_generator
from fedexp.core.weights import Weights
from fedexp.matching.assignment import assignments
from fedexp.matching.doubly_stochastic import doubly_stochastic
from fedexp.matching.structure import Group, Structure
from fedexp.matching.unit_graphs import Edges, check_equal, edges_of

Assignments = dict[str, Tensor]  # U of shape (models, n, n), float64, by group


@dataclass(frozen=True)
class Joint:
    """The schedule of the joint mode, which matches all models at once.

    A sweep updates the assignments of all groups. A stage is a series of sweeps in
    which Sinkhorn's iterations have the same temperature tau. The next stage has a
    lower tau. The last stage uses the Hungarian method instead.

    Args:
        sweeps: Largest number of sweeps over all stages.
        final: Once more than ``sweeps - final`` sweeps are finished, the Hungarian
            method is used, whatever the stage.
        tau: Temperature of the first stage.
        cooling: Factor by which tau is multiplied for the next stage.
        floor: Once tau is at most this, the next stage uses the Hungarian method.
        iterations: Sinkhorn's half-steps at the first temperature.
        further: Number of half-steps that are added at every further temperature.
        tolerance: A stage ends if the squared change of U, summed over groups and
            averaged over models, is below this number.
        patience: A stage has at most ``patience + 2`` sweeps, even if U still changes.
        noise: Every entry of the first U is 1 / n plus a uniform number in [-noise,
            noise].
    """

    sweeps: int = 2000
    final: int = 75
    tau: float = 0.05
    cooling: float = 0.9
    floor: float = 0.005
    iterations: int = 200
    further: int = 100
    tolerance: float = 2e-3
    patience: int = 50
    noise: float = 0.05

    def __post_init__(self) -> None:
        require(
            2 <= self.final < self.sweeps,
            f"final must be in [2, sweeps), got {self.final} of {self.sweeps}",
        )
        _check_schedule(self.tau, self.cooling, self.floor, self.iterations, self.further)
        require(self.tolerance > 0, f"tolerance must be positive, got {self.tolerance}")
        require(self.patience >= 0, f"patience must not be negative, got {self.patience}")
        require(self.noise > 0, f"noise must be positive, got {self.noise}")


@dataclass(frozen=True)
class Pairwise:
    """The schedule of the pairwise mode, which matches each model only with the first.

    The units are moved by soft assignments, as Sinkhorn's iterations give them. The
    Hungarian method is not used.

    Args:
        sweeps: Number of sweeps over the groups in forward order. When a group is
            updated, the updates of the groups before it already count.
        tau: First temperature of Sinkhorn's iterations.
        cooling: Factor by which tau is multiplied after every sweep.
        floor: Lowest temperature.
        iterations: Sinkhorn's half-steps in the first sweep.
        further: Number of half-steps that are added in every further sweep until tau
            reaches `floor`.
        divide: Whether affinities are divided by their mean.
    """

    sweeps: int = 50
    tau: float = 10.0
    cooling: float = 0.8
    floor: float = 0.01
    iterations: int = 20
    further: int = 50
    divide: bool = True

    def __post_init__(self) -> None:
        require(self.sweeps > 0, f"sweeps must be positive, got {self.sweeps}")
        _check_schedule(self.tau, self.cooling, self.floor, self.iterations, self.further)


def _check_schedule(
    tau: float, cooling: float, floor: float, iterations: int, further: int
) -> None:
    require(0 < floor <= tau, f"floor must be positive and at most tau, got {floor} and {tau}")
    require(0 < cooling < 1, f"cooling must be between 0 and 1, got {cooling}")
    require(
        iterations > 0 and further >= 0,
        f"half-steps must be positive, got {iterations} and {further}",
    )


def match_jointly(
    models: Sequence[Weights],
    structure: Structure,
    groups: Sequence[Group],
    options: Joint,
    early_stop: float | None,
    start: Assignments,
) -> tuple[list[dict[str, Tensor]], int]:
    """Find the permutations that move each model to common units.

    With two models, the common units are those of the first model, and its U stays the
    identity. The reason is that a sweep updates each U from the old value of the other
    U. If both changed, the updates would form two independent sequences, and the common
    units would be ordered differently in each.

    Args:
        models: The models.
        structure: Their structure.
        groups: The groups that may move.
        options: The schedule.
        early_stop: Tolerance at which Sinkhorn's iterations stop early, or None (see
            `doubly_stochastic`).
        start: The first assignments, from `random_start` or `identities`.

    Returns:
        The permutations of each model (the first model's are identities), and the
        number of sweeps.
    """
    check_equal(models)
    if len(models) == 1:
        return [{group.name: torch.arange(group.size) for group in groups}], 0

    # The first `num_fixed` models keep their U
    num_fixed = int(len(models) == 2)
    if num_fixed:
        start = {
            name: torch.cat([torch.eye(u.shape[1]).to(u)[None], u[1:]]) for name, u in start.items()
        }

    affinity = Affinity(edges_of(models, structure, groups), divide=True)
    U, before = start, start
    tau, iterations, hungarian, count, sweep = options.tau, options.iterations, False, 0, 0

    # Turn affinities into assignments, in the way of the current stage
    def solved(V: Tensor) -> Tensor:
        return (
            permutation_matrices(V)
            if hungarian
            else doubly_stochastic(V, tau, iterations, early_stop)
        )

    for sweep in range(1, options.sweeps + 1) if groups else ():
        new = {
            name: torch.cat([u[:num_fixed], solved(affinity.votes(name, U, num_fixed))])
            for name, u in U.items()
        }
        change = sum(_change(new[name], U[name], before[name]) for name in U)
        before, U = U, new

        if float(change) >= options.tolerance and count <= options.patience:
            count += 1
        elif hungarian:
            break
        else:
            count = 0
            if tau > options.floor:
                tau, iterations = tau * options.cooling, iterations + options.further
            else:
                hungarian = True

        if sweep > options.sweeps - options.final:
            hungarian = True

    # The common units are put into the order of the first model's units
    orders = {name: torch.einsum("iab,cb->iac", u, u[0]).argmax(1) for name, u in U.items()}
    return [
        {name: order[i].cpu() for name, order in orders.items()} for i in range(len(models))
    ], sweep


def match_pairwise(
    model: Weights,
    reference: Weights,
    structure: Structure,
    groups: Sequence[Group],
    options: Pairwise,
    early_stop: float | None,
    *names: object,
) -> dict[str, Tensor]:
    """Find the matrices that move `model` onto `reference`, by group.

    Args:
        model: The model to move.
        reference: The reference.
        structure: Their structure.
        groups: The groups that may move.
        options: The schedule.
        early_stop: Tolerance at which Sinkhorn's iterations stop early, or None (see
            `doubly_stochastic`).
        *names: Names of the random stream from which the first assignment is drawn.

    Returns:
        Matrices T, where ``T[a, b]`` is the share of unit a in new unit b.
    """
    check_equal([reference, model])
    affinity = Affinity(edges_of([reference, model], structure, groups), divide=options.divide)
    device = next(iter(model.params.values())).device
    U: Assignments = {}

    for group in groups:
        values = 0.4 + 0.2 * _uniform(group, 1, *names)[0]
        start = doubly_stochastic(values.to(device), tau=10.0, iterations=1)
        U[group.name] = torch.stack([torch.eye(group.size).to(start), start])

    tau, iterations = options.tau, options.iterations
    for _ in range(options.sweeps):
        for name, u in U.items():
            # Affinity to the reference, whose U is the identity
            V = affinity.between(name, U, 1)[0]
            U[name] = torch.stack([u[0], doubly_stochastic(V, tau, iterations, early_stop)])
        if tau > options.floor:
            tau = max(tau * options.cooling, options.floor)
            iterations = iterations + options.further

    return {name: u[1].cpu() for name, u in U.items()}


def random_start(
    groups: Sequence[Group], count: int, noise: float, device: torch.device, *names: object
) -> Assignments:
    """Draw the first assignments from the random stream `names`.

    Every entry is 1 / n plus uniform noise in [-noise, noise], for a group of n units.

    Returns:
        Assignments of shape (models, n, n) by group.
    """
    return {
        group.name: 1 / group.size + noise * (2 * _uniform(group, count, *names).to(device) - 1)
        for group in groups
    }


def _uniform(group: Group, count: int, *names: object) -> Tensor:
    """Draw uniform numbers in [0, 1) from the stream of `names` and the group's name.

    Returns:
        Numbers of shape (count, n, n), float64, for n units.
    """
    generator = torch_generator(*names, group.name)
    return torch.rand(count, group.size, group.size, generator=generator, dtype=torch.float64)


def identities(groups: Sequence[Group], count: int, device: torch.device) -> Assignments:
    """Return the assignments in which no unit moves."""
    return {
        g.name: torch.eye(g.size, dtype=torch.float64, device=device).repeat(count, 1, 1)
        for g in groups
    }


def permutation_matrices(V: Tensor) -> Tensor:
    """Find the assignments of largest value by the Hungarian method.

    Args:
        V: Values of shape (models, n, n). Entry [i, a, b] is the value of assigning
            unit a of model i to common unit b.
    """
    orders = assignments(-V).to(V.device)
    return torch.zeros_like(V).scatter_(1, orders[:, None, :], 1.0)


def _change(new: Tensor, old: Tensor, older: Tensor) -> Tensor:
    """Compute the squared change of U, averaged over the models.

    For each model, the squared changes from `old` and from `older` are computed, and
    the smaller of them counts. A cycle of two alternating values therefore counts as no
    change.
    """
    steps = torch.stack([(new - other).square().sum((1, 2)) for other in (old, older)])
    return steps.amin(0).mean()


@dataclass(frozen=True, eq=False)
class _Side:
    """The incoming or outgoing weights of one layer, by which units are compared.

    Args:
        neighbour: The neighbouring group, whose assignments permute the last axis of x.
            It is None if no assignment permutes this axis.
        x: Weights of shape (models, n, k, m) for n units, k weights per connection, and
            m units of the neighbouring group.
        powers: x, x^2 and x^3 of every model as (models, n, k * m), and the sums of x^4
            over the last axis.
    """

    neighbour: str | None
    x: Tensor
    powers: tuple[Tensor, Tensor, Tensor, Tensor]


class Affinity:
    """Affinities of units, given the current assignments.

    Parts that do not depend on assignments are computed only once.

    Args:
        edges: The weights of all layers.
        divide: Whether each of the two affinities is divided by its mean.
    """

    def __init__(self, edges: Sequence[Edges], divide: bool) -> None:
        self._divide = divide
        self._sides: dict[str, tuple[list[_Side], list[_Side]]] = {}
        self._fixed: dict[tuple[str, int, int], Tensor] = {}

        for edge in edges:
            # Values are laid out as (models, n, k, m), see `_Side`
            for group, neighbour, x, side in (
                (edge.target, edge.source, edge.values.permute(0, 1, 3, 2), 0),
                (edge.source, edge.target, edge.values.permute(0, 2, 3, 1), 1),
            ):
                if group is not None:
                    flat = x.flatten(2)
                    powers = (flat, flat.square(), flat**3, (flat**4).sum(2))
                    self._sides.setdefault(group, ([], []))[side].append(
                        _Side(neighbour, x.contiguous(), powers)
                    )

    def votes(self, group: str, U: Assignments, first: int = 0) -> Tensor:
        """Compute V_i, the sum of A_ij U_j over the other models j (see `between`).

        Args:
            group: Name of the group.
            U: The current assignments.
            first: Index of the first model for which V_i is computed.

        Returns:
            Sums of shape (models, n, n) for the models from number `first` on.
        """
        u = U[group]
        return torch.stack(
            [(self.between(group, U, i) @ _without(u, i)).sum(0) for i in range(first, len(u))]
        )

    def between(self, group: str, U: Assignments, i: int) -> Tensor:
        """Compute A_ij, the affinity of model i's units to those of the other models j.

        Returns:
            Affinities of shape (other models, n, n), with the other models in order.
        """
        affinities = []
        for number, sides in enumerate(self._sides[group]):
            if not sides:
                continue

            if (group, number, i) not in self._fixed:
                self._fixed[group, number, i] = sum(
                    (_fourth_powers(side, None, i) for side in sides if side.neighbour is None),
                    torch.zeros(()),
                )

            distance = self._fixed[group, number, i]
            for side in sides:
                if side.neighbour is not None:
                    distance = distance + _fourth_powers(side, U[side.neighbour], i)

            K = (-0.5 * distance.clamp(min=0).sqrt().sqrt()).exp()
            affinities.append(K / K.mean((1, 2), keepdim=True) if self._divide else K)

        return torch.stack(affinities).sum(0)


def _without(values: Tensor, i: int) -> Tensor:
    """Return `values` without entry i of the first axis."""
    return torch.cat([values[:i], values[i + 1 :]])


def _fourth_powers(side: _Side, U: Tensor | None, i: int) -> Tensor:
    """Compute the sums of (x - y)^4 over entries, of shape (other models, n, n).

    x are the entries of model i's units, after the maps to model j have been applied. y
    are the entries of model j's units.
    ``(x - y)^4 = x^4 - 4 x^3 y + 6 x^2 y^2 - 4 x y^3 + y^4`` is computed by products of
    matrices, in float64.
    """
    x = side.x[i]
    if U is not None:
        maps = U[i] @ _without(U, i).mT  # (others, m, m): U_i U_j^T
        x = (x.flatten(0, 1) @ maps).reshape(len(maps), *x.shape)
    else:
        x = x[None]
    x = x.flatten(2)
    y, y2, y3, y4 = (_without(power, i) for power in side.powers)
    x2 = x.square()
    crossed = 6 * x2 @ y2.mT - 4 * (x2 * x @ y.mT + x @ y3.mT)
    return x2.square().sum(2)[:, :, None] + crossed + y4[:, None, :]
