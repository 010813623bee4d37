"""Beta-Bernoulli matching of the units of several models.

The units of the models are called local units. The matching infers the number of global
units, and which local units are noisy copies of the same global unit.

Reference: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural
    Networks, ICML 2019 (PFNM), Section 3, with the constants of the authors' code. The
    penalised assignment is that of Xiao & Cheng, Bayesian Federated Neural Matching
    that Completes Full Information, AAAI 2023 (NAFI), Eq. 14-15. The two variants in
    their code (2020 and 2022) are available, too.

Global unit theta_k has the prior ``N(mu_0, 1 / p_0)``. In each dimension, a unit w of
model s is drawn from ``N(theta_k, 1 / q_s)``. An Indian buffet process of mass gamma
determines which model has which global unit. Let v = q_s w and a_0 = p_0 mu_0. The
members of a global unit are the local units that are assigned to it. Three values
describe global unit k: its information ``G_k = a_0 + sum v``, the number c_k of its
members, and its precision ``S_k = p_0 + sum q_s``. The sums are over its members. The
posterior mean of theta_k is G_k / S_k. All values are float64.

Two dimensions are in the same block if every model has the same precision in both.
Precisions are stored once per block. The value of assigning a local unit to a global
unit is a reward minus lambda times a penalty. The reward is twice the gain in
log-likelihood, plus a term of the Indian buffet process. Rewards and penalties depend
on units only through sums over the dimensions of a block. The summands are v^2, v a_0,
G^2, G a_0 and v G.

The widest block is the block with the most dimensions. There the sum of v G is computed
as the sum of v a_0 plus the inner products of v with the v of each member of the global
unit. If the inner products of all pairs of local units fit into `_PRODUCTS_BYTES`, they
are computed only once. A sweep takes every model out and matches it again. With stored
products, the cost of a sweep does not depend on the size of the widest block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.errors import overflow

Penalty = Literal["paper", "code2020", "code2022"]

_MEMBERS, _UNITS = 10, 700  # the caps in the authors' code
# Largest size in bytes of the stored inner products. Products that need more memory are
# not stored, but computed again at each visit of a model.
_PRODUCTS_BYTES = 2**30


@dataclass(frozen=True)
class BetaBernoulli:
    """Options of the matching.

    Args:
        sigma: Variance of the noise (not the standard deviation), as in the authors'
            code.
        sigma0: Variance of the prior (not the standard deviation), as in the authors'
            code.
        gamma: Mass of the Indian buffet process.
        sweeps: How often every model is taken out and matched again.
        popularity: Coefficient b of ``log(c_k / (N - c_k))`` in the reward, for N
            models. It is 1 in all of the authors' code, and 2 in the papers.
        caps: Whether the two caps in the authors' code apply. First, c_k counts as at
            most 10 in the logarithm above. Second, a model may open new global units
            only until there are 700. As an exception, it may always open one, and as
            many as it needs if it has more units than there are global units.
        fixed: Whether a model opens new global units only if it has more units than
            there are global units. The number of global units is then the width of the
            widest model.
        penalty: The quantity that `strength` multiplies. ``paper`` is the
            Kullback-Leibler divergence between a global unit's posteriors before and
            after the assignment. ``code2020`` and ``code2022`` are the variants in the
            authors' code of 2020 and 2022.
        strength: Factor lambda of the penalty. With 0 no penalty is computed.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 5
    popularity: Literal[1, 2] = 1
    caps: bool = True
    fixed: bool = False
    penalty: Penalty = "paper"
    strength: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sigma", "sigma0", "gamma"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be positive, got {value}")
        require(self.sweeps >= 0, f"sweeps must not be negative, got {self.sweeps}")
        require(
            self.strength >= 0, f"the penalty's lambda must not be negative, got {self.strength}"
        )


@dataclass(frozen=True, eq=False)
class Space:
    """The D dimensions of the units, divided into B blocks of equal precision.

    Args:
        a0: Prior information mu_0 p_0, of shape (D,).
        p0: Precision of the prior, the same in all dimensions.
        blocks: Block of each dimension as a one-hot row, of shape (D, B).
        widest: Index of the block with the most dimensions.
        rest: Indices of the dimensions in all other blocks, of shape (R,), int64.
        square: Sums of a_0^2 over each block, of shape (B,).
    """

    a0: Tensor
    p0: float
    blocks: Tensor
    widest: int
    rest: Tensor
    square: Tensor

    @classmethod
    def of(cls, q: Tensor, mu0: Tensor, sigma0: float) -> tuple[Space, Tensor]:
        """Return the space of N models with precisions q (N, D), and q by block."""
        distinct, block = q.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
        widest, p0 = int(block.bincount().argmax()), 1 / sigma0
        blocks, a0 = torch.nn.functional.one_hot(block, distinct.shape[1]).to(q), mu0 * p0
        return cls(
            a0, p0, blocks, widest, (block != widest).nonzero()[:, 0], a0.square() @ blocks
        ), distinct

    def sums(self, values: Tensor) -> Tensor:
        """Sum values over each block, from (..., D) to (..., B)."""
        return values @ self.blocks

    def inner(self, wide: Tensor, rest: Tensor) -> Tensor:
        """Assemble the sum over each block, of shape (..., B).

        Args:
            wide: Sums over the widest block, of shape (...,).
            rest: Values in the dimensions of the other blocks, of shape (..., R).
        """
        sums = rest @ self.blocks[self.rest]
        sums[..., self.widest] = wide
        return sums


@dataclass(frozen=True, eq=False)
class LocalUnits:
    """The J units of one model, as v = q w (precision times weight).

    Args:
        q: Precisions, of shape (B,).
        square: Sums of v^2 over each of the B blocks, of shape (J, B).
        prior: Sums of v a_0 over each block, of shape (J, B).
        rest: Values of v in the R dimensions outside the widest block, of shape (J, R).
    """

    q: Tensor
    square: Tensor
    prior: Tensor
    rest: Tensor

    @classmethod
    def of(cls, v: Tensor, q: Tensor, space: Space) -> LocalUnits:
        return cls(q, space.sums(v.square()), space.sums(v * space.a0), v[:, space.rest])


@dataclass(frozen=True, eq=False)
class Posterior:
    """The values of the K global units that determine assignments.

    Args:
        S: Precisions, of shape (K, B).
        c: Numbers of members, of shape (K,).
        square: Sums of G^2 over each block, of shape (K, B).
        prior: Sums of G a_0 over each block, of shape (K, B).
        rest: Values of the information G in the R dimensions outside the widest block,
            of shape (K, R).
    """

    S: Tensor
    c: Tensor
    square: Tensor
    prior: Tensor
    rest: Tensor

    @classmethod
    def without_members(cls, space: Space, units: int) -> Posterior:
        """Return the values of `units` global units that have no members."""
        own = space.square.expand(units, -1)
        rest = space.a0[space.rest].expand(units, -1)
        return cls(torch.full_like(own, space.p0), own.new_zeros(units), own, own, rest)

    def moved(
        self, units: Tensor, model: LocalUnits, products: Tensor, space: Space, sign: int
    ) -> Posterior:
        """Add one model's units to the global units `units`, or take them out.

        Args:
            units: Global unit of each of the model's units.
            model: The model's units.
            products: One number per unit of the model, of shape (J,): the sum of v G
                over the widest block. v is that of the unit. G is that of its global
                unit, computed without this model's units.
            space: The dimensions.
            sign: 1 adds the units, -1 takes them out.
        """
        rest = self.rest.index_add(0, units, model.rest, alpha=sign)
        others = self.rest if sign > 0 else rest
        change = 2 * space.inner(products, model.rest * others[units]) + model.square
        return Posterior(
            self.S.index_add(0, units, model.q.expand(len(units), -1), alpha=sign),
            self.c.index_add(0, units, torch.ones_like(products), alpha=sign),
            self.square.index_add(0, units, change, alpha=sign),
            self.prior.index_add(0, units, model.prior, alpha=sign),
            rest,
        )

    def select(self, units: Tensor) -> Posterior:
        """Return the values of only these global units."""
        return Posterior(*(value[units] for value in vars(self).values()))

    def with_new(self, space: Space, units: int) -> Posterior:
        """Append `units` global units without members."""
        more = Posterior.without_members(space, units)
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return Posterior(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True, eq=False)
class QuadraticForm:
    """A quadratic function of a local unit's v, for each of K global units.

    Its value is the sum over dimensions of ``square v^2 + cross v G + prior v a_0``,
    plus a constant.

    Args:
        square: Coefficients of v^2, of shape (K, B).
        cross: Coefficients of v G, of shape (K, B).
        prior: Coefficients of v a_0, of shape (K, B).
        constant: Constants, of shape (K,).
    """

    square: Tensor
    cross: Tensor
    prior: Tensor
    constant: Tensor

    def plus(self, other: QuadraticForm) -> QuadraticForm:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return QuadraticForm(*(own + theirs for own, theirs in pairs))

    def __call__(
        self,
        model: LocalUnits,
        posterior: Posterior,
        products: Tensor,
        space: Space,
        out: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the function for all J units of a model and all K global units.

        Args:
            model: The model's units.
            posterior: The global units.
            products: Sums of v G over the widest block, of shape (K, J).
            space: The dimensions.
            out: Tensor for the result, or None.

        Returns:
            Values of shape (K, J).
        """
        terms = [self.square, self.prior, self.constant[:, None]]
        of_model = [model.square, model.prior, torch.ones_like(model.square[:, :1])]
        if model.rest.shape[1]:
            terms.append(posterior.rest * (self.cross @ space.blocks[space.rest].T))
            of_model.append(model.rest)
        values: Tensor = torch.mm(torch.cat(terms, 1), torch.cat(of_model, 1).T, out=out)
        return values.addcmul_(self.cross[:, space.widest, None], products)


def reward(posterior: Posterior, q: Tensor, space: Space) -> QuadraticForm:
    """Return twice the gain in log-likelihood as a quadratic function of v.

    It is ``sum_d (v + G)^2 / (q + S) - G^2 / S`` over the dimensions d. A term that is
    equal for all global units is left out.
    """
    S = posterior.S
    A = 1 / (q + S)
    return QuadraticForm(A, 2 * A, torch.zeros_like(A), -(posterior.square * q * A / S).sum(1))


def penalty(kind: Penalty, posterior: Posterior, q: Tensor, space: Space) -> QuadraticForm:
    """Return NAFI's penalty as a quadratic function of v, without the factor lambda.

    Sums are over the dimensions d, w = v / q is the local unit, and c is the number of
    members.

    - ``paper``: ``KL(before || after)``, which is
      ``1/2 sum_d [q/S - log(1 + q/S) + q^2 (w - G/S)^2 / (S + q)]``.
    - ``code2020``: ``sum_d q [(c' + 1) (v - a_0 + G - c a_0)^2 / (q + S)^2
      - c' (G - c a_0)^2 / S^2]`` with ``c' = min(c, 10)``.
      For a new unit it is ``sum_d q (v - a_0)^2 / (q + p_0)^2``.
    - ``code2022``: ``code2020`` plus ``sum_d q^2 (w - G/S)^2 / (S + q)^3``.
    """
    if kind == "code2020":
        return _surrogate(posterior, q, space)
    A = 1 / (q + posterior.S)
    if kind == "code2022":
        return _surrogate(posterior, q, space).plus(_shift(A**3, posterior, q))
    ratio = q / posterior.S
    shift = _shift(A / 2, posterior, q)
    # `space.blocks.sum(0)` is the number of dimensions of each block
    spread = ((ratio - ratio.log1p()) * space.blocks.sum(0)).sum(1) / 2
    return replace(shift, constant=shift.constant + spread)


def _shift(scale: Tensor, posterior: Posterior, q: Tensor) -> QuadraticForm:
    """Return ``sum_d scale q^2 (w - G/S)^2``, where `scale` has shape (K, B)."""
    ratio = q / posterior.S
    return QuadraticForm(
        scale,
        -2 * scale * ratio,
        torch.zeros_like(scale),
        (posterior.square * scale * ratio.square()).sum(1),
    )


def _surrogate(posterior: Posterior, q: Tensor, space: Space) -> QuadraticForm:
    """Return the penalty ``code2020`` of `penalty`.

    c is the number of local units that are assigned to a global unit. A new global unit
    has none, but counts as one with c = 1. Its G is a_0, so ``G - c a_0`` is 0, and the
    squared term is ``(v - a_0)^2``.
    """
    S = posterior.S
    once = posterior.c.clamp(min=1)[:, None]
    capped = posterior.c.clamp(max=_MEMBERS)[:, None]
    A = (capped + 1) * q / (q + S).square()

    # For each block of dimensions, the sum of (G - t a_0)^2, where t is `times`
    def squared(times: Tensor) -> Tensor:
        return posterior.square - 2 * times * posterior.prior + times.square() * space.square

    constant = (A * squared(once + 1) - capped * q / S.square() * squared(once)).sum(1)
    return QuadraticForm(A, 2 * A, -2 * A * (once + 1), constant)


def gains(
    model: LocalUnits,
    posterior: Posterior,
    products: Tensor,
    space: Space,
    models: int,
    options: BetaBernoulli,
    penalised: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gains of assigning each of a model's J units to each column.

    The columns are the K global units, followed by T new global units. `posterior`
    does not contain the model's own units.

    Args:
        model: The model's units.
        posterior: The global units.
        products: Sums of v G over the widest block, of shape (K, J).
        space: The dimensions.
        models: Number N of models.
        options: Options of the matching.
        penalised: Whether the penalties are computed.

    Returns:
        The rewards and the penalties by column, both of shape (K + T, J). The penalties
        are None if `penalised` is False.
    """
    units, known = len(model.square), len(posterior.c)
    count = units
    if options.fixed:
        count = max(units - known, 0)
    elif options.caps:
        count = max(min(units, max(_UNITS - known, 1)), units - known)

    new = Posterior.without_members(space, 1)
    opened = model.prior[None, :, space.widest]

    def worth(of_known: QuadraticForm, of_new: QuadraticForm) -> Tensor:
        values = products.new_empty(known + count, units)
        of_known(model, posterior, products, space, values[:known])
        values[known:] = of_new(model, new, opened, space)
        return values

    c = np.arange(models).clip(max=_MEMBERS) if options.caps else np.arange(models)
    # log(0) is never used, because every global unit has members
    with np.errstate(divide="ignore"):
        popularity = options.popularity * np.log(c / (models - c))

    orders = 2 * float(np.log(options.gamma / models)) - 2 * np.log(np.arange(1, count + 1))
    bonus = torch.from_numpy(popularity).to(products.device)[posterior.c.long()]
    of_known = reward(posterior, model.q, space)
    rewards = worth(
        replace(of_known, constant=of_known.constant + bonus), reward(new, model.q, space)
    )
    rewards[known:] += torch.from_numpy(orders).to(products.device)[:, None]

    if not penalised:
        return rewards, None
    return rewards, worth(
        penalty(options.penalty, posterior, model.q, space),
        penalty(options.penalty, new, model.q, space),
    )


def assign(values: Tensor, known: int = 0) -> Tensor:
    """Assign a different column to each of J units, with the largest sum of values.

    If there are at least J new columns, every unit can get a new column. A known column
    cannot be chosen then if, for every unit, its value is lower than the value of each
    new column. Such columns are left out to save time.

    Args:
        values: Values of shape (columns, J), with at least as many columns as units.
        known: Number of known columns, which belong to existing global units. They are
            the first columns.

    Returns:
        Columns of shape (J,), int64, on the CPU.

    Raises:
        FedexpError: A value is NaN or plus infinity. Minus infinity is allowed and
            marks a column that the unit may not have.
    """
    from scipy.optimize import linear_sum_assignment

    # The comparison is also false for NaN
    if not float(values.amax()) < math.inf:
        raise overflow("the gains of matching units")
    columns, units = values.shape
    useful = torch.arange(columns, device=values.device)
    if columns - known >= units:
        useful = (values >= values[known:].amin(0)).any(1).nonzero()[:, 0]
        values = values[useful]
    chosen, of = linear_sum_assignment(values.cpu().numpy(), maximize=True)
    found = torch.empty(units, dtype=torch.int64)
    found[torch.from_numpy(of)] = useful.cpu()[torch.from_numpy(chosen)]
    return found


@dataclass(frozen=True, eq=False)
class UnitAssignment:
    """The assignment of all models' units to global units.

    Args:
        units: For each model s, the global unit of each of its J_s units, of shape
            (J_s,), int64, on the CPU.
        members: Number of models that have each global unit, of shape (K,).
        mean: Posterior means, of shape (K, D), float64.
    """

    units: tuple[Tensor, ...]
    members: Tensor
    mean: Tensor


def match(
    models: Sequence[Tensor],
    q: Tensor,
    mu0: Tensor,
    options: BetaBernoulli,
    orders: np.ndarray,
    start: Sequence[Tensor] | None = None,
) -> UnitAssignment:
    """Match the units of at least one model.

    Args:
        models: For each model s, its J_s units as rows, of shape (J_s, D), float64. The
            models may have different numbers of units.
        q: Precisions of shape (N, D), not negative.
        mu0: Mean of the prior, of shape (D,).
        options: Options of the matching.
        orders: Order in which each sweep visits the models, of shape (sweeps, N).
        start: For each model s, the global units to which its units are assigned at the
            beginning, of shape (J_s,), int64. If None, models are assigned one by one,
            the widest first.
    """
    return match_each(models, q, mu0, options, [options.strength], orders[None], start)[0]


def match_each(
    models: Sequence[Tensor],
    q: Tensor,
    mu0: Tensor,
    options: BetaBernoulli,
    strengths: Sequence[float],
    orders: np.ndarray,
    start: Sequence[Tensor] | None = None,
) -> list[UnitAssignment]:
    """Run `match` for several lambdas, bit-identical to one run per lambda.

    Lambdas with the same assignment of all units share one state during the run, and
    one result at the end. Rewards and penalties are computed once per state. Inner
    products are computed only once. If there are at least as many states as threads,
    the states run in parallel. Otherwise the assignment problems of each state run in
    parallel. The number of threads is at most torch's own.

    Args:
        models: As in `match`.
        q: As in `match`.
        mu0: As in `match`.
        options: As in `match`.
        strengths: Lambdas that replace ``options.strength``.
        orders: Orders of shape (lambdas, sweeps, N).
        start: As in `match`.
    """
    pool = _UnitPool(models, q, mu0, options)
    with _parallel_threads(len(strengths)) as (num_threads, threaded_map):
        branches = [_Branch(tuple(range(len(strengths))), pool.initial_state(start))]

        def visit(visits: Sequence[int]) -> list[_Branch]:
            parts = [part for branch in branches for part in branch.by_model(visits)]
            outer, inner = (threaded_map, map) if len(parts) >= num_threads else (map, threaded_map)
            found = outer(lambda part: pool.visited(part[0], part[1], strengths, inner), parts)
            return list(itertools.chain.from_iterable(found))

        for s in sorted(range(len(models)), key=lambda s: -len(models[s])) if start is None else ():
            branches = visit([s] * len(strengths))
        for sweep in orders.transpose(1, 2, 0).tolist():
            branches = _join(branches, pool)
            # `visits` holds the model that each lambda visits next
            for visits in sweep:
                branches = visit(visits)
    found: dict[int, UnitAssignment] = {}
    for branch in _join(branches, pool):
        found |= dict.fromkeys(branch.numbers, pool.matched(branch.state.units))
    return [found[number] for number in range(len(strengths))]


@contextmanager
def _parallel_threads(tasks: int) -> Iterator[tuple[int, Callable[..., Iterable[Any]]]]:
    """Open a pool of threads, each of which runs torch single-threaded.

    The number of threads is at most `tasks` and at most torch's own number. The context
    manager yields this number, and a function like `map` that runs on the threads.

    A product or sum is always computed by a single thread. Its bits therefore do not
    depend on the number of threads. Torch and the solver release Python's interpreter
    lock, so the threads run in parallel.
    """
    threads = torch.get_num_threads()
    count = min(tasks, threads)
    torch.set_num_threads(1)

    try:
        if count == 1:
            yield 1, map
        else:
            with ThreadPoolExecutor(
                count, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                yield count, pool.map
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class _State:
    """The models assigned so far.

    Args:
        units: Global unit of every unit, by model.
        posterior: The global units.
    """

    units: Mapping[int, Tensor]
    posterior: Posterior


@dataclass(frozen=True, eq=False)
class _Branch:
    """The indices of lambdas with equal assignments so far, and their common state."""

    numbers: tuple[int, ...]
    state: _State

    def by_model(self, visits: Sequence[int]) -> list[tuple[_Branch, int]]:
        """Split the branch by the model that its lambdas visit next."""
        parts: dict[int, list[int]] = {}
        for number in self.numbers:
            parts.setdefault(visits[number], []).append(number)
        return [(_Branch(tuple(numbers), self.state), s) for s, numbers in parts.items()]


def _join(branches: Sequence[_Branch], pool: _UnitPool) -> list[_Branch]:
    """Join branches with equal assignments of all units, and recompute their sums.

    The sums of each global unit are recomputed from its members, so that rounding
    errors do not accumulate.
    """
    same: dict[bytes, list[_Branch]] = {}
    for branch in branches:
        flat = torch.cat([units for _, units in sorted(branch.state.units.items())])
        same.setdefault(flat.cpu().numpy().tobytes(), []).append(branch)
    return [
        _Branch(
            tuple(n for branch in alike for n in branch.numbers),
            pool.recomputed(alike[0].state.units),
        )
        for alike in same.values()
    ]


def _in_order(columns: Tensor, known: int) -> Tensor:
    """Renumber new columns in the order of the model's units, behind the known columns.

    New columns are interchangeable. The result, of shape (J,), is therefore the same
    for every choice of new columns.
    """
    new = columns >= known
    return columns.masked_scatter(new, known + torch.arange(int(new.sum())))


class _UnitPool:
    """The local units and the operations that assign them to global units.

    The units are the same for all values of the penalty's weight lambda.
    """

    def __init__(
        self, models: Sequence[Tensor], q: Tensor, mu0: Tensor, options: BetaBernoulli
    ) -> None:
        self.options = options
        self.space, self.q = Space.of(q, mu0, options.sigma0)
        v = torch.cat(list(models))
        self.v = torch.split(v, [len(w) for w in models])

        for own, row in zip(self.v, q, strict=True):
            own.mul_(row)

        self.local = [
            LocalUnits.of(own, row, self.space) for own, row in zip(self.v, self.q, strict=True)
        ]
        ends = [0, *np.cumsum([len(own) for own in self.v]).tolist()]
        self._rows = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self._wide = (
            v if not len(self.space.rest) else v[:, self.space.blocks[:, self.space.widest].bool()]
        )
        self._products = self._all_products() if 8 * len(v) ** 2 <= _PRODUCTS_BYTES else ()

    def _all_products(self) -> tuple[Tensor, ...]:
        """Compute the inner products of all pairs of local units over the widest block.

        Returns:
            For each model, the products of all n local units with its J_s units, of
            shape (n, J_s).
        """
        found: list[Tensor] = []
        for rows in self._rows:
            own = self._wide.new_empty(len(self._wide), rows.stop - rows.start)
            for other, theirs in enumerate(found):
                own[self._rows[other]] = theirs[rows].T
            torch.mm(self._wide[rows.start :], self._wide[rows].T, out=own[rows.start :])
            found.append(own)
        return tuple(found)

    def products(self, units: Mapping[int, Tensor], known: int, s: int) -> Tensor:
        """Compute the sums of v G over the widest block for the units of model s.

        Args:
            units: Global unit of each unit of the models assigned so far, by model.
            known: Number K of global units.
            s: Index of the model.

        Returns:
            Products of shape (K, J).
        """
        of_all = self._products[s] if self._products else self._wide @ self._wide[self._rows[s]].T
        total = self.local[s].prior[:, self.space.widest].repeat(known, 1)
        for other, places in sorted(units.items()):
            total.index_add_(0, places, of_all[self._rows[other]])
        return total

    def initial_state(self, start: Sequence[Tensor] | None) -> _State:
        """Return the state before the first visit.

        If `start` is None, the state has no global units. Otherwise, the global units
        in `start` are renumbered 0, 1 ... in ascending order.
        """
        if start is None:
            return _State({}, Posterior.without_members(self.space, 0))
        _, places = torch.cat(list(start)).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        parts = torch.split(places.to(self._wide.device), [len(units) for units in start])
        return self.recomputed(dict(enumerate(parts)))

    def recomputed(self, units: Mapping[int, Tensor]) -> _State:
        """Compute the state again from the assignments of all assigned models."""
        known = 1 + max(int(places.max()) for places in units.values())
        posterior, so_far = Posterior.without_members(self.space, known), dict[int, Tensor]()
        for s, places in sorted(units.items()):
            products = self.products(so_far, known, s)[
                places, torch.arange(len(places), device=places.device)
            ]
            posterior = posterior.moved(places, self.local[s], products, self.space, 1)
            so_far[s] = places
        return _State(units, posterior)

    def visited(
        self,
        branch: _Branch,
        s: int,
        strengths: Sequence[float],
        each: Callable[..., Iterable[Tensor]],
    ) -> list[_Branch]:
        """Take model s out if it is assigned, and assign it again for each lambda."""
        state, products = self.without(branch.state, s)
        # No global units remain: model s is the first model, or the only one
        if not len(products):
            return [
                _Branch(
                    branch.numbers,
                    self.with_model(state, s, torch.arange(products.shape[1]), products),
                )
            ]

        own = [strengths[number] for number in branch.numbers]
        model, penalised = self.local[s], any(map(bool, own))
        rewards, penalties = gains(
            model, state.posterior, products, self.space, len(self.v), self.options, penalised
        )

        def assigned(strength: float) -> Tensor:
            values = (
                rewards if penalties is None or not strength else rewards - strength * penalties
            )
            return _in_order(assign(values, len(products)), len(products))

        alike: dict[bytes, tuple[Tensor, list[int]]] = {}
        for number, columns in zip(branch.numbers, each(assigned, own), strict=True):
            alike.setdefault(columns.numpy().tobytes(), (columns, []))[1].append(number)

        return [
            _Branch(tuple(numbers), self.with_model(state, s, columns, products))
            for columns, numbers in alike.values()
        ]

    def without(self, state: _State, s: int) -> tuple[_State, Tensor]:
        """Take model s out, and remove global units that belong to no other model.

        Returns:
            The new state, and the `products` of model s with the remaining global
            units.
        """
        units, posterior = dict(state.units), state.posterior
        own_units = units.pop(s, None)
        if own_units is None:
            return state, self.products(units, len(posterior.c), s)

        left = (
            posterior.c.index_add(0, own_units, torch.ones_like(posterior.c[own_units]), alpha=-1)
            > 0
        )
        place = left.cumsum(0) - 1
        units = {other: place[places] for other, places in units.items()}
        products = self.products(units, int(left.sum()), s)
        # For each of the model's units, whether another model has its global unit, too
        shared = left[own_units]
        at = torch.arange(len(own_units), device=own_units.device)[shared]
        model = self.local[s]
        shared_units = LocalUnits(
            model.q, model.square[shared], model.prior[shared], model.rest[shared]
        )
        to = place[own_units[shared]]

        return _State(
            units, posterior.select(left).moved(to, shared_units, products[to, at], self.space, -1)
        ), products

    def with_model(self, state: _State, s: int, columns: Tensor, products: Tensor) -> _State:
        """Add model s, assigned to `columns` of shape (J,) on the CPU."""
        opened = int((columns >= len(products)).sum())
        units = columns.to(products.device)
        of_new = self.local[s].prior[:, self.space.widest].expand(opened, -1)
        chosen = torch.cat([products, of_new])[units, torch.arange(len(units), device=units.device)]
        posterior = state.posterior.with_new(self.space, opened)
        return _State(
            {**state.units, s: units},
            posterior.moved(units, self.local[s], chosen, self.space, 1),
        )

    def matched(self, units: Mapping[int, Tensor]) -> UnitAssignment:
        """Return the assignment with the posterior means of the global units.

        The means are computed from the local units, not from the running sums.
        """
        known = 1 + max(int(places.max()) for places in units.values())
        G = self.space.a0.repeat(known, 1)
        S = self.q.new_full((known, self.q.shape[1]), self.space.p0)
        members = self.q.new_zeros(known)
        for s, places in sorted(units.items()):
            G.index_add_(0, places, self.v[s])
            S.index_add_(0, places, self.q[s].expand(len(places), -1))
            members.index_add_(0, places, members.new_ones(len(places)))
        mean = G / S[:, self.space.blocks.argmax(1)]
        return UnitAssignment(tuple(units[s].cpu() for s in range(len(self.v))), members, mean)
