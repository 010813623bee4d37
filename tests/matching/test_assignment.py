"""Assignments are compared with brute force and a solver of transport problems."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from fedexp.core.errors import FedexpError
from fedexp.matching.assignment import assignments, sinkhorn


def costs(count, n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random((count, n, n)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_least_of_all_permutations(n):
    for cost, perm in zip(costs(6, n), assignments(costs(6, n)), strict=True):
        best = min(sum(float(cost[a, b]) for b, a in enumerate(p)) for p in permutations(range(n)))
        assert sorted(perm.tolist()) == list(range(n))
        assert sum(float(cost[a, b]) for b, a in enumerate(perm)) == pytest.approx(best, rel=1e-12)


def test_exact_transport_is_the_assignment():
    import ot

    for cost, perm in zip(costs(4, 40), assignments(costs(4, 40)), strict=True):
        plan = ot.emd(np.full(40, 1 / 40), np.full(40, 1 / 40), cost.numpy())
        np.testing.assert_allclose(plan * 40, np.eye(40)[:, perm], atol=1e-12)


def test_sinkhorn_maps_are_stochastic_and_tend_to_the_assignment():
    cost = costs(2, 12)
    soft = sinkhorn(cost, 0.1)
    torch.testing.assert_close(
        soft.sum(1), torch.ones(2, 12, dtype=torch.float64), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        soft.sum(2), torch.ones(2, 12, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    planted = torch.eye(12, dtype=torch.float64)[
        :, torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ]
    # The cost of the best assignment is far below that of the second best
    apart = cost - 2 * planted
    expected = torch.stack([torch.eye(12, dtype=torch.float64)[:, p] for p in assignments(apart)])
    assert torch.equal(expected, planted.expand(2, -1, -1))
    torch.testing.assert_close(sinkhorn(apart, 0.05), expected, rtol=0, atol=1e-6)


def test_sinkhorn_plan_has_the_entropic_form():
    """The sum log T + cost / reg consists of a row term and a column term."""
    cost, reg = costs(1, 6), 0.2
    rest = sinkhorn(cost, reg)[0].log() + cost[0] / reg
    centred = rest - rest.mean(0) - rest.mean(1, keepdim=True) + rest.mean()
    torch.testing.assert_close(centred, torch.zeros_like(centred), rtol=0, atol=1e-8)


@pytest.mark.parametrize("solve", [assignments, lambda costs: sinkhorn(costs, 0.1)])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_costs_that_are_not_finite_are_refused(solve, value: float) -> None:
    costs = torch.ones(1, 3, 3, dtype=torch.float64)
    costs[0, 1, 2] = value
    with pytest.raises(FedexpError, match="costs of matching units are not finite"):
        solve(costs)
