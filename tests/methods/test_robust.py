"""Byzantine-robust rules: median, trimmed mean and Krum against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.trees import Tree
from fedexp.engines.serial import Serial
from fedexp.methods.bases.averaging import Collecting
from fedexp.methods.krum import Krum
from fedexp.methods.median import Median
from fedexp.methods.trimmed_mean import TrimmedMean
from fedexp.running.experiment import Experiment
from tests.world import SOFTMAX, make_data, make_world


def updates(n: int) -> list[Tree]:
    rng = np.random.default_rng(n)
    return [
        {
            "a": torch.from_numpy(rng.normal(size=(2, 3))),
            "b": torch.from_numpy(rng.normal(size=4)),
            "scalar": torch.tensor(rng.normal(), dtype=torch.float64),
        }
        for _ in range(n)
    ]


def flat(tree: Tree) -> np.ndarray:
    return np.concatenate([value.numpy().ravel() for value in tree.values()])


def trimmed(u: np.ndarray, k: int) -> np.ndarray:
    return np.array([np.mean(sorted(column)[k : len(column) - k]) for column in u.T])


def krum(u: np.ndarray, f: int, m: int) -> np.ndarray:
    """Return Krum's mean, with scores by brute force.

    Each score is the least sum over all sets of n - f - 2 others.
    """
    others = [[j for j in range(len(u)) if j != i] for i in range(len(u))]
    scores = [
        min(
            sum(((u[i] - u[j]) ** 2).sum() for j in near)
            for near in combinations(others[i], len(u) - f - 2)
        )
        for i in range(len(u))
    ]
    return u[sorted(range(len(u)), key=scores.__getitem__)[:m]].mean(0)


CASES: dict[str, tuple[Collecting, int, Callable[[np.ndarray], np.ndarray]]] = {
    "median of 5": (Median(), 5, lambda u: np.median(u, 0)),
    "median of 4": (Median(), 4, lambda u: np.median(u, 0)),
    "trimmed, 0.2 of 5": (TrimmedMean(beta=0.2), 5, lambda u: trimmed(u, 1)),
    "trimmed, 0.25 of 6": (TrimmedMean(beta=0.25), 6, lambda u: trimmed(u, 2)),
    "trimmed, fewer than planned": (TrimmedMean(beta=0.4), 2, lambda u: u.mean(0)),
    "Krum": (Krum(f=1), 6, lambda u: krum(u, 1, 1)),
    "Krum, a fraction": (Krum(f=0.3), 7, lambda u: krum(u, 2, 1)),
    "Multi-Krum": (Krum(f=1, m=3), 6, lambda u: krum(u, 1, 3)),
    "Multi-Krum of all": (Krum(f=1, m=6), 6, lambda u: u.mean(0)),
}


@pytest.mark.parametrize("case", CASES)
def test_robust_rules_equal_their_formulas(case: str) -> None:
    """Robust rules equal their formulas for any weights and order of the clients."""
    rule, n, plain = CASES[case]
    trees = updates(n)
    expected = plain(np.stack([flat(tree) for tree in trees]))
    p = [(i + 1) / (n * (n + 1) / 2) for i in range(n)]
    for order in list(permutations(range(n)))[:: 7 if n > 4 else 1][:40]:
        ordered = [trees[i] for i in order]
        merged = rule.merged(ordered, rule.shares(ordered, p))
        np.testing.assert_allclose(flat(merged), expected, rtol=1e-12, atol=1e-15)


def test_krum_gives_the_clients_that_it_rejects_no_weight() -> None:
    trees = updates(6)
    merged = krum(np.stack([flat(tree) for tree in trees]), 1, 2)
    shares = Krum(f=1, m=2).shares(trees, [1 / 6] * 6)
    assert sorted(shares) == [0, 0, 0, 0, 1, 1]
    weighted = sum(share * flat(tree) for share, tree in zip(shares, trees, strict=True)) / 2
    np.testing.assert_allclose(weighted, merged, rtol=1e-12)


@pytest.mark.parametrize(("rule", "steps"), [
    ("krum", None), ("median", "mean"), ("trimmed_mean", "mean"), ("fedavg", "weighted"),
])  # fmt: skip
def test_momentum_is_divided_by_the_steps_of_the_merged_clients(
    rule: str, steps: str | None
) -> None:
    """FedCM's Delta is the merged update per step and per step size.

    The clients take unequal numbers of steps. Krum merges the update of one client.
    """
    sizes = (40, 6, 12, 24, 18)
    overrides = [f"method={rule}", "trainer=fedcm", "rounds=1", "local.batch_size=6"]
    overrides += ["local.epochs=1", "local.steps=null", "local.lr=0.1", "dtype=float64"]
    world = make_world(*overrides, data=make_data(sizes), model=SOFTMAX)
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    after, _ = world.aggregator.update(state, results, world.env)
    old = state["weights"].params
    moved = flat({k: after["weights"].params[k] - old[k] for k in old})
    tau = np.array([result.num_steps for result in results])
    assert len(set(tau)) > 2
    own = [flat({k: result.weights.params[k] - old[k] for k in old}) for result in results]
    weights = {
        None: [float(np.allclose(update, moved, rtol=1e-12)) for update in own],
        "mean": [1 / 5] * 5,
        "weighted": np.array(sizes) / sum(sizes),
    }[steps]
    assert sum(weights) == pytest.approx(1)
    expected = -moved / (np.dot(weights, tau) * 0.1)
    np.testing.assert_allclose(flat(after["shared"]["Delta"]), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("method", ["median", "trimmed_mean", "krum"])
def test_robust_rules_bound_the_effect_of_one_byzantine_client(method: str) -> None:
    overrides = [f"method={method}", "rounds=1", "local.batch_size=100"]
    world = make_world(*overrides, data=make_data((20, 12, 17, 9, 15)), model=SOFTMAX)
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    honest = torch.stack([result.weights.params["fc.weight"] for result in results[1:]])
    for far in (1e9, -1e9):
        params = {"fc.weight": torch.full((3, 4), far).double()}
        astray = replace(results[0], weights=replace(results[0].weights, params=params))
        after = world.aggregator.update(state, [astray, *results[1:]], world.env)[0][
            "weights"
        ].params["fc.weight"]
        assert (after >= honest.min(0).values - 1e-12).all() and (
            after <= honest.max(0).values + 1e-12
        ).all()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("method=krum clients=6 aggregator.f=2", "needs 2 f . 3 = 7 participants"),
        ("method=krum clients_per_round=2", "needs 2 f . 3 = 3 participants"),
        ("method=krum aggregator.m=11", "more updates would be averaged"),
        ("method=krum aggregator.f=0.5", "a fraction below one half"),
        ("method=krum sampling=bernoulli clients_per_round=0.5", "in every round"),
        ("method=trimmed_mean clients_per_round=2", "leaves none of 2 participants"),
        # 7 / 15 = 0.46666... must not be rounded up, because 0.466667 is refused, too
        ("method=trimmed_mean clients=15 aggregator.beta=0.49", "at most 0.466666,"),
        ("method=trimmed_mean aggregator.beta=0.5", r"beta must be in \[0, 1/2\)"),
    ],
)
def test_what_cannot_be_withstood_is_refused_before_training(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.of(compose(overrides.split()))


def test_the_last_that_fits_is_accepted_and_a_split_with_empty_clients_counts_those_who_have_data() -> (
    None
):
    for fits in (
        "method=krum clients=7 aggregator.f=2",
        "method=trimmed_mean clients_per_round=3",
        "debug=smoke method=krum",
    ):
        Experiment.of(compose(fits.split()))
    world = make_world("method=krum", "aggregator.f=1", data=make_data((10, 0, 5, 7, 3)))
    with pytest.raises(ConfigError, match=r"needs 2 f \+ 3 = 5") as error:
        world.aggregator.init(world.env)
    assert "4 of a round's clients have data" in str(error.value)
