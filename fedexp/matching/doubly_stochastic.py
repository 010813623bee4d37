"""Sinkhorn's normalisation of square matrices, in the log domain.

The rows and columns of exp(V / tau) are scaled to sum to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Half-steps between two checks of range and error, an even number
_BLOCK = 20
# Bound of scalings, beyond which a block is repeated with logarithms
_RANGE = 1e100


def doubly_stochastic(
    V: Tensor, tau: float, iterations: int, tolerance: float | None = None
) -> Tensor:
    """Divide the rows and columns of exp(V / tau) by their sums in turn, rows first.

    The first two half-steps use logarithms. Further half-steps use products with the
    matrix so far, which is the same function. If their scalings come near overflow,
    these half-steps are repeated with logarithms.

    Args:
        V: Matrices of shape (..., n, n), float64.
        tau: Temperature.
        iterations: Number of half-steps, of rows or of columns.
        tolerance: Stop once columns have been divided and no row's sum differs from one
            by more than this. None: never stop early.
    """
    done = min(2, iterations)
    # The first half-steps bring the matrix into range
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
    """Compute half-steps as `_with_logarithms`: rows are scaled by u, columns by v."""
    K = S.exp()
    u = v = torch.ones_like(K[..., :1])
    for step in range(steps):
        if step % 2 == 0:
            u = (K @ v).reciprocal()
        else:
            v = (K.mT @ u).reciprocal()
    both = torch.cat([u, v])
    # NaN is out of range, too
    if not bool(((both < _RANGE) & (both > 1 / _RANGE)).all()):
        return _with_logarithms(S, steps)
    return S + u.log() + v.log().mT
