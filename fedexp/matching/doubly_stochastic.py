"""Sinkhorn's normalisation of square matrices, in the log domain.

The rows and columns of exp(V / tau) are scaled to sum to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A half-step scales the rows or the columns. After this many half-steps, overflow and
# convergence are checked. The number must be even
_BLOCK = 20
# If a scaling factor is larger than _RANGE or smaller than 1 / _RANGE, the half-steps
# since the last check are repeated with logarithms
_RANGE = 1e100


def doubly_stochastic(
    V: Tensor, tau: float, iterations: int, tolerance: float | None = None
) -> Tensor:
    """Divide the rows and columns of exp(V / tau) by their sums in turn, rows first.

    One division of all rows, or of all columns, is a half-step. The first two
    half-steps are computed with logarithms. The others are computed with matrix
    products, which is mathematically the same. If scaling factors come near overflow,
    these half-steps are repeated with logarithms.

    Args:
        V: Matrices of shape (..., n, n), float64.
        tau: Temperature.
        iterations: Number of half-steps, those of rows and of columns together.
        tolerance: Stop once no row sum differs from 1 by more than this number. It is
            checked after half-steps that divide columns. If None, never stop early.
    """
    done = min(2, iterations)
    # The first half-steps bring the entries into the range of floating-point numbers
    S = _with_logarithms(V / tau, done)
    while done < iterations and not (tolerance is not None and _is_converged(S, tolerance)):
        steps = min(_BLOCK, iterations - done)
        S = _with_products(S, steps)
        done += steps
    return S.exp()


def _is_converged(S: Tensor, tolerance: float) -> bool:
    return bool(((S.exp().sum(-1) - 1).abs() <= tolerance).all())


def _with_logarithms(S: Tensor, steps: int) -> Tensor:
    for step in range(steps):
        S = S - S.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    return S


def _with_products(S: Tensor, steps: int) -> Tensor:
    """Compute `_with_logarithms` with row factors u and column factors v."""
    K = S.exp()
    u = v = torch.ones_like(K[..., :1])
    for step in range(steps):
        if step % 2 == 0:
            u = (K @ v).reciprocal()
        else:
            v = (K.mT @ u).reciprocal()
    both = torch.cat([u, v])
    # The comparisons are also false for NaN
    if not bool(((both < _RANGE) & (both > 1 / _RANGE)).all()):
        return _with_logarithms(S, steps)
    return S + u.log() + v.log().mT
