"""Beta-Bernoulli matching: which units of several models are noisy copies of the same one, and how many there are in all.

Reference: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (PFNM), Section 3, with
the constants of the authors' code; the penalised assignment of Xiao & Cheng, Bayesian Federated Neural Matching that
Completes Full Information, AAAI 2023 (NAFI), Eq. 14-15 and the two forms of their code.

Global unit k has the prior N(mu_0, 1 / p_0), unit j of model s is drawn from N(theta_k, 1 / q_s), by dimension; who has which
unit follows an Indian buffet process of mass gamma. With v = q_s w and a_0 = p_0 mu_0, a global unit is known by its
information G_k = a_0 + sum v, its precision S_k = p_0 + sum q_s and the number c_k of its members; its posterior mean is
G_k / S_k. Everything is float64. Dimensions in which all models have the same precisions are a block: precisions are kept
once a block, and every reward and penalty is one matrix product besides sums over blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedexp.core.build import require

Penalty = Literal["paper", "code2020", "code2022"]

_MEMBERS, _UNITS = 10, 700  # the caps of the code


@dataclass(frozen=True)
class BetaBernoulli:
    """How units are matched.

    Args:
        sigma, sigma0: variances of the noise and of the prior, as the code has them.
        gamma: mass of the Indian buffet process.
        sweeps: how often every model is taken out and matched again.
        popularity: coefficient b of log(c_k / (N - c_k)): 1 in all code, 2 in the papers.
        caps: c_k counts as 10 at most in that logarithm, and beyond 700 units a model opens one more at most (but as many
            as it needs).
        fixed: no model opens a unit that it need not: there are as many as the widest has.
        penalty: what `strength` (lambda) multiplies: the Kullback-Leibler divergence of a global unit's posterior before
            and after (``paper``), or what the code has for it in 2020 and 2022. Nothing of it is computed at 0.
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
        require(self.strength >= 0, f"the penalty's lambda must not be negative, got {self.strength}")


@dataclass(frozen=True, eq=False)
class Space:
    """The dimensions that units live in.

    Args:
        a0: (D,) prior information mu_0 p_0; p0: the prior's precision, the same in all dimensions.
        blocks: (D, B) one in the block of each dimension, else zero.
    """

    a0: Tensor
    p0: float
    blocks: Tensor

    @property
    def sizes(self) -> Tensor:
        """(B,) dimensions of each block."""
        return self.blocks.sum(0)

    def sums(self, values: Tensor) -> Tensor:
        """(..., D) -> (..., B): summed over each block."""
        return values @ self.blocks

    def wide(self, values: Tensor) -> Tensor:
        """(..., B) -> (..., D)."""
        if values.shape[-1] == 1:
            return values.expand(*values.shape[:-1], len(self.blocks))
        return values.index_select(-1, self.blocks.argmax(1))


@dataclass(frozen=True, eq=False)
class Posterior:
    """What is known of the global units: information G (K, D), precision S (K, B), members c (K,)."""

    G: Tensor
    S: Tensor
    c: Tensor

    @classmethod
    def prior(cls, space: Space, units: int) -> Posterior:
        """Of units without members."""
        G = space.a0.expand(units, -1).clone()
        return cls(G, G.new_full((units, space.blocks.shape[1]), space.p0), G.new_zeros(units))

    def mean(self, space: Space) -> Tensor:
        """(K, D) theta."""
        return self.G / space.wide(self.S)

    def move_(self, units: Tensor, v: Tensor, q: Tensor, sign: int) -> None:
        """One model's units become members (sign 1) of global units `units`, or are taken out of them (-1), in place."""
        self.G.index_add_(0, units, v, alpha=sign)
        self.S.index_add_(0, units, q.expand(len(v), -1), alpha=sign)
        self.c.index_add_(0, units, torch.ones_like(v[:, 0]), alpha=sign)

    def kept(self, units: Tensor) -> Posterior:
        """Of these units alone."""
        return Posterior(self.G[units], self.S[units], self.c[units])

    def with_new(self, space: Space, units: int) -> Posterior:
        """With `units` more, without members, behind the others."""
        if not units:
            return self
        more = Posterior.prior(space, units)
        return Posterior(torch.cat([self.G, more.G]), torch.cat([self.S, more.S]), torch.cat([self.c, more.c]))


@dataclass(frozen=True, eq=False)
class Form:
    """For v and a global unit: the sum over dimensions of ``square v^2 + cross v G + prior v a_0``, plus a constant.

    Args:
        square, cross, prior: (K, B); constant: (K,).
    """

    square: Tensor
    cross: Tensor
    prior: Tensor
    constant: Tensor

    def minus(self, strength: float, other: Form) -> Form:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Form(*(own - strength * theirs for own, theirs in pairs))

    def __call__(self, v: Tensor, G: Tensor, space: Space) -> Tensor:
        """(J, K) for all units v (J, D) and all global units with information G (K, D)."""
        values = v @ (G * space.wide(self.cross)).T
        values += space.sums(v.square()) @ self.square.T
        if bool(self.prior.any()):
            values += space.sums(v * space.a0) @ self.prior.T
        return values + self.constant


def reward(posterior: Posterior, q: Tensor, space: Space) -> Form:
    """sum_d (v + G)^2 / (q + S) - G^2 / S: twice the gain in log-likelihood, up to what all global units share."""
    S = posterior.S
    A = 1 / (q + S)
    constant = -(space.sums(posterior.G.square()) * q * A / S).sum(1)
    return Form(A, 2 * A, torch.zeros_like(A), constant)


def penalty(kind: Penalty, posterior: Posterior, q: Tensor, space: Space) -> Form:
    """What NAFI adds to the cost, without its lambda.

    ``paper``: KL(before || after) = 1/2 sum_d [q/S - log(1 + q/S) + q^2 (w - G/S)^2 / (S + q)]. ``code2020``:
    sum_d q [(c' + 1) (v - a_0 + G - c a_0)^2 / (q + S)^2 - c' (G - c a_0)^2 / S^2] with c' = min(c, 10); of a new unit
    sum_d q (v - a_0)^2 / (q + p_0)^2. ``code2022`` adds sum_d q^2 (w - G/S)^2 / (S + q)^3 to it.
    """
    if kind == "code2020":
        return _surrogate(posterior, q, space)
    A = 1 / (q + posterior.S)
    if kind == "code2022":
        return _surrogate(posterior, q, space).minus(-1.0, _shift(A**3, posterior, q, space))
    ratio = q / posterior.S
    shift = _shift(A / 2, posterior, q, space)
    spread = ((ratio - ratio.log1p()) * space.sizes).sum(1) / 2
    return Form(shift.square, shift.cross, shift.prior, shift.constant + spread)


def _shift(scale: Tensor, posterior: Posterior, q: Tensor, space: Space) -> Form:
    """sum_d scale q^2 (w - G/S)^2, `scale` (K, B)."""
    ratio = q / posterior.S
    constant = (space.sums(posterior.G.square()) * scale * ratio.square()).sum(1)
    return Form(scale, -2 * scale * ratio, torch.zeros_like(scale), constant)


def _surrogate(posterior: Posterior, q: Tensor, space: Space) -> Form:
    """The penalty of 2020. A new unit is one without members whose a_0 is taken off once as well: (v - a_0 + 0)^2."""
    S, G = posterior.S, posterior.G
    once = posterior.c.clamp(min=1)[:, None]
    capped = posterior.c.clamp(max=_MEMBERS)[:, None]
    A = (capped + 1) * q / (q + S).square()
    GG, Ga, aa = space.sums(G.square()), space.sums(G * space.a0), space.sums(space.a0.square())

    def squared(times: Tensor) -> Tensor:  # sum over a block of (G - times a_0)^2
        return GG - 2 * times * Ga + times.square() * aa

    constant = (A * squared(once + 1) - capped * q / S.square() * squared(once)).sum(1)
    return Form(A, 2 * A, -2 * A * (once + 1), constant)


def gains(v: Tensor, q: Tensor, posterior: Posterior, space: Space, models: int, options: BetaBernoulli) -> Tensor:
    """(J, K + T): what assigning each unit of one model to each global unit, or to a new one t = 1 ... T, is worth.

    Args:
        v: (J, D) and q: (B,) of a model that is no part of `posterior`.
        models: N.
    """

    def worth(of: Posterior) -> Tensor:
        form = reward(of, q, space)
        if options.strength:
            form = form.minus(options.strength, penalty(options.penalty, of, q, space))
        return form(v, of.G, space)

    units, known = len(v), len(posterior.c)
    c = posterior.c.clamp(max=_MEMBERS) if options.caps else posterior.c
    existing = worth(posterior) + options.popularity * (c / (models - c)).log()
    new = units
    if options.fixed:
        new = max(units - known, 0)
    elif options.caps:
        new = max(min(units, max(_UNITS - known, 1)), units - known)
    t = torch.arange(1, new + 1, dtype=v.dtype, device=v.device)
    opened = worth(Posterior.prior(space, 1)) - 2 * t.log() + 2 * float(np.log(options.gamma / models))
    return torch.cat([existing, opened], 1)


def assign(values: Tensor, known: int = 0) -> Tensor:
    """(J,) int64 on the CPU: a column of its own for every row, of greatest sum.

    Args:
        known: columns before those of new units. Where there is a new one for every row, a row that has a known unit could
            have had the least of its new ones instead, so that units worth less than that to all rows are left out.
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = values.shape
    if columns - known < rows:
        return torch.from_numpy(linear_sum_assignment(values.cpu().numpy(), maximize=True)[1])
    useful = (values >= values[:, known:].amin(1, keepdim=True)).any(0).nonzero()[:, 0]
    chosen = linear_sum_assignment(values[:, useful].cpu().numpy(), maximize=True)[1]
    return useful.cpu()[torch.from_numpy(chosen)]


@dataclass(frozen=True, eq=False)
class Matched:
    """Who has which global unit.

    Args:
        units: for each model (J_s,) int64 on the CPU, the global unit of each of its own.
        members: (K,) how many models have each global unit.
        mean: (K, D) float64, the posterior mean.
    """

    units: tuple[Tensor, ...]
    members: Tensor
    mean: Tensor


def match(models: Sequence[Tensor], q: Tensor, mu0: Tensor, options: BetaBernoulli, orders: np.ndarray) -> Matched:
    """Match the units of at least one model.

    Args:
        models: (J_s, D) float64, units as rows; their numbers may differ.
        q: (N, D) precisions, not negative.
        mu0: (D,) the prior's mean.
        orders: (sweeps, N), the order in which each sweep visits the models.
    """
    return _Pool(models, q, mu0, options).run(orders)


class _Pool:
    """The global units while models come and go."""

    def __init__(self, models: Sequence[Tensor], q: Tensor, mu0: Tensor, options: BetaBernoulli) -> None:
        distinct, block = q.unique(dim=1, return_inverse=True)  # type: ignore[no-untyped-call]
        p0 = 1 / options.sigma0
        self.options = options
        self.space = Space(mu0 * p0, p0, torch.nn.functional.one_hot(block, distinct.shape[1]).to(q))
        self.q = distinct  # (N, B)
        self.v = [row * w for row, w in zip(q, models, strict=True)]
        self.units: dict[int, Tensor] = {}
        self.posterior = Posterior.prior(self.space, 0)

    def run(self, orders: np.ndarray) -> Matched:
        widest_first = sorted(range(len(self.v)), key=lambda s: -len(self.v[s]))
        for s in widest_first:
            self.add(s)
        for order in orders.tolist():
            self.posterior = self.recomputed()
            for s in order:
                self.remove(s)
                self.add(s)
        self.posterior = self.recomputed()
        units = tuple(self.units[s].cpu() for s in range(len(self.v)))
        return Matched(units, self.posterior.c, self.posterior.mean(self.space))

    def add(self, s: int) -> None:
        """Assign model s; new units stand behind the old in the order of its own."""
        v, q, known = self.v[s], self.q[s], len(self.posterior.c)
        columns = torch.arange(len(v))  # of the first model, or the only one
        if known:
            columns = assign(gains(v, q, self.posterior, self.space, len(self.v), self.options), known)
        new = columns >= known
        columns[new] = known + torch.arange(int(new.sum()))
        units = columns.to(v.device)
        self.posterior = self.posterior.with_new(self.space, int(new.sum()))
        self.posterior.move_(units, v, q, 1)
        self.units[s] = units

    def remove(self, s: int) -> None:
        """Take model s out, and with it the units that nobody else has."""
        self.posterior.move_(self.units.pop(s), self.v[s], self.q[s], -1)
        left = self.posterior.c > 0
        if bool(left.all()):
            return
        place = left.cumsum(0) - 1
        self.units = {other: place[units] for other, units in self.units.items()}
        self.posterior = self.posterior.kept(left)

    def recomputed(self) -> Posterior:
        """The posterior from its members alone: what additions and removals leave of rounding does not add up."""
        fresh = Posterior.prior(self.space, len(self.posterior.c))
        for s, units in sorted(self.units.items()):
            fresh.move_(units, self.v[s], self.q[s], 1)
        return fresh
