"""The Lorentz model of hyperbolic space, used to compare representations.

Reference:
    Law et al., Lorentzian Distance Learning for Hyperbolic Representations, ICML 2019.

Update:
    A representation z in R^d is lifted to ``L(z) = (sqrt(beta + ||z||^2), z)``, where
    beta > 0 is a parameter. The Lorentzian product of x and y in R^(d+1) is
    ``<x, y> = -x_0 y_0 + sum_{i=1}^d x_i y_i``. L(z) is the only point x = (x_0, z)
    with positive x_0 and ``<x, x> = -beta``. The squared distance of z and a is
    ``-2 beta - 2 <L(z), L(a)>``. Nickel & Kiela 2018 use another lift, the exponential
    map at the origin. It overflows for vectors with the norms of usual features.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def squared_distance(z: Tensor, a: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Compute squared Lorentzian distances and their gradients with respect to z.

    The definition ``-2 beta - 2 <L(z), L(a)>`` loses all digits of a small distance in
    float32. Let ``z_0 = sqrt(beta + ||z||^2)`` and ``a_0 = sqrt(beta + ||a||^2)`` be
    the first coordinates of L(z) and L(a). The squared distance is computed as
    ``||z - a||^2 - (z_0 - a_0)^2`` with
    ``z_0 - a_0 = (||z - a||^2 + 2 <z - a, a>) / (z_0 + a_0)``. Here <z - a, a> is the
    Euclidean product. The squared distance is at most ||z - a||^2, and it approaches
    this value as beta grows.

    The gradient with respect to z is ``2 (a_0 / z_0) z - 2 a``. It is computed as
    ``2 (z - a) - 2 ((z_0 - a_0) / z_0) z``, again to keep the digits of small values.
    Autograd is not used, because it takes three times as many operations on small
    tensors.

    Args:
        z: Representations, of shape (..., b, d).
        a: Representations with which those in `z` are compared, of shape (..., b, d).
        beta: Parameter of the Lorentz model.

    Returns:
        Squared distances of the rows of `z` and `a`, of shape (..., b), and their
        gradients with respect to `z`, of shape (..., b, d).
    """
    gap = z - a
    both = torch.stack([z, a])
    z_0, a_0 = torch.linalg.vecdot(both, both).add(beta).sqrt()
    squared = torch.linalg.vecdot(gap, gap)
    gap_0 = torch.add(squared, torch.linalg.vecdot(gap, a), alpha=2) / (z_0 + a_0)
    # Clamp the squared distance, because rounding may make it negative
    d2 = squared.sub(gap_0.square()).clamp(min=0)
    return d2, torch.addcmul(gap, (gap_0 / z_0).unsqueeze(-1), z, value=-1).mul_(2)
