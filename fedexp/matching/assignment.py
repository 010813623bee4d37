"""Optimal transport between equally many units of equal mass: exact (a permutation) or smoothed (Sinkhorn)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from fedexp.core.errors import overflow


def assignments(costs: Tensor) -> Tensor:
    """Permutations of least cost.

    With uniform marginals an optimal transport plan is a permutation divided by n, so a linear assignment problem stands
    for it, up to ties (Singh & Jaggi, NeurIPS 2020, solve the transport problem).

    Args:
        costs: (models, n, n) float64; ``costs[i, a, b]`` is what moving unit a of model i to position b costs.

    Returns:
        (models, n) int64 on the CPU; ``perm[i, b]`` is the unit that goes to position b.

    Raises:
        FedexpError: a cost is not finite.
    """
    from scipy.optimize import linear_sum_assignment

    if not bool(costs.isfinite().all()):
        raise overflow("the costs of matching units")

    def solve(cost: Tensor) -> Tensor:
        return torch.from_numpy(linear_sum_assignment(cost.T.numpy())[1])  # positions choose units

    # The solver runs without the interpreter's lock
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        return torch.stack(list(pool.map(solve, costs.double().cpu())))


def sinkhorn(costs: Tensor, regularization: float) -> Tensor:
    """Maps T = n * plan of entropic transport, the plan being optimal for ``<plan, cost> - regularization * entropy``.

    Args:
        costs: (models, n, n), as for `assignments`.

    Returns:
        (models, n, n) float64 on the CPU; every column sums to 1: the shares of the old units in a new one.
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
