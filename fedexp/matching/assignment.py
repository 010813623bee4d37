"""Optimal transport between equally many units of equal mass.

The plan is exact (a permutation) or smoothed (Sinkhorn).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedexp.core.errors import overflow


def assignments(costs: Tensor) -> Tensor:
    """Find the permutations of least cost.

    Singh & Jaggi (NeurIPS 2020) solve a transport problem. With uniform marginals, an
    optimal plan is a permutation divided by n. Therefore a linear assignment problem
    has the same solution, except for ties.

    Args:
        costs: Costs of shape (models, n, n), float64. ``costs[i, a, b]`` is the cost of
            moving unit a of model i to position b.

    Returns:
        Permutations of shape (models, n), int64, on the CPU. ``perm[i, b]`` is the unit
        that goes to position b.

    Raises:
        FedexpError: A cost is not finite.
    """
    from scipy.optimize import linear_sum_assignment

    if not bool(costs.isfinite().all()):
        raise overflow("the costs of matching units")

    # In the transposed costs, rows are positions and columns are units
    def solve(cost: Tensor) -> Tensor:
        return torch.from_numpy(linear_sum_assignment(cost.T.numpy())[1])

    # The solver runs without the interpreter's lock
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return torch.stack(list(pool.map(solve, costs.double().cpu())))


def sinkhorn(costs: Tensor, regularization: float) -> Tensor:
    """Compute the maps T = n * plan of entropic transport.

    The plan is optimal for ``<plan, cost> - regularization * entropy``.

    Args:
        costs: Costs of shape (models, n, n), as in `assignments`.
        regularization: Factor of the entropy.

    Returns:
        Maps of shape (models, n, n), float64, on the CPU. A column holds the shares of
        the old units in one new unit, which sum to 1.
    """
    import ot

    def solve(cost: Tensor) -> Tensor:
        n = len(cost)
        mass = torch.full((n,), 1 / n, dtype=torch.float64)
        plan: Tensor = ot.sinkhorn(
            mass, mass, cost, regularization, method="sinkhorn_log", numItermax=10_000
        )
        return plan / plan.sum(0)

    return torch.stack([solve(cost) for cost in costs.double().cpu()])
