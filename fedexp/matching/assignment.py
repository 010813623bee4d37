"""Optimal transport between two sets of n units, all of which have the same mass.

The transport plan is exact (a permutation) or smoothed (Sinkhorn).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedexp.core.errors import overflow


def assignments(costs: Tensor) -> Tensor:
    """Find the permutations of least cost.

    Singh & Jaggi (NeurIPS 2020) solve a transport problem. If all n units have the same
    mass, an optimal plan is a permutation matrix divided by n. A linear assignment
    problem therefore has the same solution, except for ties.

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

    _check_finite(costs)

    # In the transposed costs, rows are positions and columns are units
    def solve(cost: Tensor) -> Tensor:
        return torch.from_numpy(linear_sum_assignment(cost.T.numpy())[1])

    # The solver releases Python's interpreter lock, so threads run in parallel
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return torch.stack(list(pool.map(solve, costs.double().cpu())))


def sinkhorn(costs: Tensor, regularization: float) -> Tensor:
    """Compute the maps T = n * plan of entropy-regularised transport for n units.

    The plan minimises ``<plan, cost> - regularization * entropy(plan)``.

    Args:
        costs: Costs of shape (models, n, n), as in `assignments`.
        regularization: Factor of the entropy.

    Returns:
        Maps of shape (models, n, n), float64, on the CPU. A column contains the shares
        of the old units in one new unit. These shares sum to 1.

    Raises:
        FedexpError: A cost is not finite.
    """
    import ot

    _check_finite(costs)

    def solve(cost: Tensor) -> Tensor:
        n = len(cost)
        mass = torch.full((n,), 1 / n, dtype=torch.float64)
        plan: Tensor = ot.sinkhorn(
            mass, mass, cost, regularization, method="sinkhorn_log", numItermax=10_000
        )
        return plan / plan.sum(0)

    return torch.stack([solve(cost) for cost in costs.double().cpu()])


def _check_finite(costs: Tensor) -> None:
    if not bool(costs.isfinite().all()):
        raise overflow("the costs of matching units")
