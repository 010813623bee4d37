"""The Lorentz model of hyperbolic space, used to compare representations.

Reference:
    Law et al., Lorentzian Distance Learning for Hyperbolic Representations, ICML 2019.

Update:
    z in R^d is lifted to ``L(z) = (sqrt(beta + ||z||^2), z)``. The Lorentzian product
    is ``<x, y> = -x_0 y_0 + sum_i x_i y_i``. Among the points (x_0, z) with a positive
    x_0, L(z) is the only one with ``<L(z), L(z)> = -beta``. The squared distance of z
    and a is ``-2 beta - 2 <L(z), L(a)>``. Nickel & Kiela 2018 lift by the exponential
    map at the origin, which overflows for vectors with the norms of usual features.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def squared_distance(z: Tensor, a: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Compute squared Lorentzian distances and their gradients with respect to z.

    z_0 and a_0 are the first coordinates of L(z) and L(a). The squared distance is
    computed as ``||z - a||^2 - (z_0 - a_0)^2`` with
    ``z_0 - a_0 = (||z - a||^2 + 2 (z - a) a) / (z_0 + a_0)``, because the definition
    loses all digits of a small distance in float32. The squared distance is at most the
    squared Euclidean distance of z and a, which it approaches as beta grows.

    The gradient with respect to z is ``2 (a_0 / z_0) z - 2 a``. It is computed as
    ``2 (z - a) - 2 ((z_0 - a_0) / z_0) z``, again to keep the digits of small values.
    This closed form is used, because autograd takes three times as many operations on
    small tensors.

    Args:
        z: Representations, (..., b, d).
        a: Anchors, (..., b, d).
        beta: Parameter of the Lorentz model.

    Returns:
        Squared distances d2 of the lifted rows, (..., b), and their gradients in z.
    """
    gap = z - a
    both = torch.stack([z, a])
    z_0, a_0 = torch.linalg.vecdot(both, both).add(beta).sqrt()
    squared = torch.linalg.vecdot(gap, gap)
    gap_0 = torch.add(squared, torch.linalg.vecdot(gap, a), alpha=2) / (z_0 + a_0)
    # Rounding may make the difference negative
    d2 = squared.sub(gap_0.square()).clamp(min=0)
    return d2, torch.addcmul(gap, (gap_0 / z_0).unsqueeze(-1), z, value=-1).mul_(2)
