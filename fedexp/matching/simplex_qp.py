"""The quadratic program that gives the weights of a common descent direction.

It is ``min_a a^T G a / 2`` subject to ``sum a = 1`` and ``0 <= a_i <= C``. There are N
weights a_i, G is a positive semidefinite matrix of shape (N, N), and C is a bound.

Reference: MA-Echo, Eq. 6-7.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import FedexpError, overflow

_JITTER = 1e-12  # added to the diagonal, because the scaled matrix may be singular
_GAP = 1e-6  # largest accepted duality gap of the scaled objective


def capped_simplex_qp(G: Tensor, C: float) -> Tensor:
    """Find the minimiser a of this program, in float64 by an interior-point method.

    Args:
        G: Matrix of shape (N, N), positive semidefinite.
        C: Upper bound of every a_i, at least 1 / N. If C is 1 / N, all a_i are equal.

    Returns:
        a of shape (N,), in the dtype of G and on the device of G.

    Raises:
        FedexpError: G is not finite, or the solver's result is not optimal.
    """
    N = len(G)
    g = G.detach().double().cpu().numpy()
    scale = float(np.abs(g).max())
    if not math.isfinite(scale):
        raise overflow("the entries of MA-Echo's quadratic program")
    # With G = 0 every a is optimal. With C = 1 / N only one a is feasible.
    if scale == 0.0 or C * N <= 1.0:
        return torch.full((N,), 1 / N, dtype=G.dtype, device=G.device)

    g = g / scale + _JITTER * np.eye(N)
    a = _solve(g, C)
    gradient = g @ a
    gap = float(gradient @ a - _least(gradient, C))
    if not gap <= _GAP:
        raise FedexpError(
            "the weights of MA-Echo's quadratic program are not optimal",
            where="aggregator.weights=qp",
            expected=f"a duality gap of at most {_GAP:g}",
            got=f"{gap:g}",
            do="use aggregator.weights=uniform",
        )

    return torch.from_numpy(a).to(G)


def _solve(g: np.ndarray, C: float) -> np.ndarray:
    from cvxopt import matrix, solvers

    N = len(g)
    bounds = np.concatenate([-np.eye(N), np.eye(N)])
    limits = np.concatenate([np.zeros(N), np.full(N, min(C, 1.0))])
    options = {"show_progress": False, "abstol": 1e-12, "reltol": 1e-12, "feastol": 1e-12}

    solution = solvers.qp(
        matrix(g),
        matrix(np.zeros(N)),
        matrix(bounds),
        matrix(limits),
        matrix(np.ones((1, N))),
        matrix(1.0),
        options=options,
    )
    a: np.ndarray = np.clip(np.array(solution["x"]).ravel(), 0.0, C)
    a /= a.sum()
    return a


def _least(gradient: np.ndarray, C: float) -> float:
    """Compute the minimum of <gradient, a> over the feasible set.

    The minimum is found by setting the coordinates with the smallest gradient entries
    to C, one after another, until the sum of a is 1.
    """
    left, total = 1.0, 0.0
    for value in np.sort(gradient):
        share = min(C, left)
        total += share * float(value)
        left -= share
        if left <= 0:
            break
    return total
