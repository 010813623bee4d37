"""Sinkhorn's normalisation of square matrices, in the log domain: exp(V / tau) with rows and columns that sum to one."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 20  # half-steps between two looks at range and error; even
_RANGE = 1e100  # of scalings, beyond which a block is done again with logarithms


def doubly_stochastic(
    V: Tensor, tau: float, iterations: int, tolerance: float | None = None
) -> Tensor:
    """exp(V / tau), its rows and its columns divided by their sums in turn, rows first.

    Half-steps are made with logarithms; or, which is the same function, as products with the matrix so far, as long as
    their scalings stay far from overflow.

    Args:
        V: (..., n, n) float64.
        iterations: half-steps, of rows or of columns.
        tolerance: stop once columns have been divided and no row's sum differs from one by more; None: never.
    """
    done = min(2, iterations)
    S = _with_logarithms(V / tau, done)  # which brings the matrix into range
    while done < iterations and not (tolerance is not None and _settled(S, tolerance)):
        steps = min(_BLOCK, iterations - done)
        S = _with_products(S, steps)
        done += steps
    return S.exp()


def _settled(S: Tensor, tolerance: float) -> bool:
    return bool(((S.exp().sum(-1) - 1).abs() <= tolerance).all())


def _with_logarithms(S: Tensor, steps: int) -> Tensor:
    for step in range(steps):
        S = S - S.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return S


def _with_products(S: Tensor, steps: int) -> Tensor:
    """The same half-steps: rows are scaled by u, columns by v."""
    K = S.exp()
    u = v = torch.ones_like(K[..., :1])
    for step in range(steps):
        if step % 2 == 0:
            u = (K @ v).reciprocal()
        else:
            v = (K.mT @ u).reciprocal()
    both = torch.cat([u, v])
    if not bool(((both < _RANGE) & (both > 1 / _RANGE)).all()):  # not a number is out of range, too
        return _with_logarithms(S, steps)
    return S + u.log() + v.log().mT
