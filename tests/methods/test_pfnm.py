"""Tests of Bayesian matching.

The results are compared with closed forms, an independent loop form and brute force.
Configurations that cannot work are refused.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from fedexp.config.compose import compose
from fedexp.config.pinning import pin
from fedexp.core.build import build
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError
from fedexp.core.outcome import Outcome
from fedexp.core.weights import ModelSpec, Weights
from fedexp.evaluation.evaluate import Evaluator
from fedexp.matching.beta_bernoulli import (
    BetaBernoulli,
    Posterior,
    QuadraticForm,
    _Branch,
    _State,
    _UnitPool,
    assign,
    gains,
    match,
    penalty,
    reward,
)
from fedexp.matching.chains import Fused, fuse_chains
from fedexp.matching.structure import structure_of
from fedexp.methods.nafi import NAFI
from fedexp.methods.pfnm import PFNM, class_shares
from fedexp.running.experiment import Experiment
from fedexp.storage.files import file_sha256
from fedexp.storage.model_folder import ModelFolder, save_outcome
from tests.matching.nets import CLASSES, IMAGE, MODELS, REFUSED, spec_of, weights_of
from tests.methods.fusion_world import fused, models_of, results_of, tensors, world_of
from tests.reference.matching_loops import PENALTIES as LOOPED
from tests.reference.matching_loops import Constants
from tests.reference.matching_loops import fused as looped
from tests.world import MLP, World, assert_same, make_data, make_world

COUNTS = [[5, 2, 0], [3, 9, 1], [0, 2, 2], [4, 4, 4]]
MLPS = {
    "one": spec_of("fedexp.models.mlp.MLP", hidden=[6]),
    "one, no biases": spec_of("fedexp.models.mlp.MLP", hidden=[6], bias=False),
    "two": MODELS["mlp"],
    "two, no biases, dropout": MODELS["mlp without biases, with dropout"],
    "three": spec_of("fedexp.models.mlp.MLP", hidden=[5, 4, 6]),
}
METHODS = ("pfnm", "nafi")
PENALTIES = ("paper", "code2020", "code2022")


AGGREGATORS = {"pfnm": PFNM, "nafi": NAFI}


@cache
def composed() -> World:
    return world_of(MLPS["one"], "method=pfnm")


def matching(spec: ModelSpec, method: str, **options) -> World:
    """Return a world of `spec` and `method` without composing it again."""
    world = composed()
    experiment = replace(
        world.experiment, aggregator=build(AGGREGATORS[method], options, "aggregator")
    )
    return World(experiment, replace(world.env, specs=Specs(spec)), world.data)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chains(widths: list[tuple[int, ...]], biased: bool = True, scale: float = 1.0, seed: int = 0):
    """Return random networks with 4 inputs, 3 classes and half of the units alike."""
    rng = generator(seed)
    top = [max(w) for w in zip(*widths, strict=True)]
    common = [
        torch.randn(b, a, generator=rng).double() for a, b in itertools.pairwise([4, *top, 3])
    ]
    models = []
    for hidden in widths:
        model = []
        for (a, b), shared in zip(itertools.pairwise([4, *hidden, 3]), common, strict=True):
            weight = shared[:b, :a] + 0.7 * torch.randn(b, a, generator=rng).double()
            bias = 0.1 + 0.3 * torch.randn(b, generator=rng).double()
            model.append((scale * weight, bias if biased else None))
        models.append(model)
    return models


def visits(layers: int, sweeps: int, models: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array(
        [[rng.permutation(models) for _ in range(sweeps)] for _ in range(layers)]
    ).reshape(layers, sweeps, models)


def fuse_one(models, shares, frequency: bool, options: BetaBernoulli, orders: np.ndarray) -> Fused:
    """Fuse the models for the value of lambda in the options."""
    return fuse_chains(models, shares, frequency, options, [options.strength], orders[None])[0]


def pool_of(
    models, q: torch.Tensor, mu0: torch.Tensor, options: BetaBernoulli, *assigned: int
) -> tuple[_UnitPool, _State]:
    """Return a pool and its state after the models `assigned` were assigned in turn."""
    pool = _UnitPool(models, q, mu0, options)
    state = pool.initial_state(None)
    for s in assigned:
        state = add(pool, state, s)
    return pool, state


def add(pool: _UnitPool, state: _State, s: int) -> _State:
    (branch,) = pool.visited(_Branch((0,), state), s, [pool.options.strength], map)
    return branch.state


def values_of(
    pool: _UnitPool, form: QuadraticForm, posterior: Posterior, units, s: int
) -> torch.Tensor:
    """Return the values of a form for model s, with shape (J, K)."""
    products = pool.products(units, len(posterior.c), s)
    return form(pool.local[s], posterior, products, pool.space).T


def sums_of(pool: _UnitPool, units, known: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return G and S, each with shape (K, D), as sums over the members one by one."""
    G, S = (
        pool.space.a0.repeat(known, 1),
        torch.full((known, len(pool.space.a0)), pool.space.p0, dtype=torch.float64),
    )
    for s, places in units.items():
        for j, k in enumerate(places.tolist()):
            G[k] += pool.v[s][j]
            S[k] += pool.q[s][pool.space.blocks.argmax(1)]
    return G, S


def output_of(chain, x: torch.Tensor) -> torch.Tensor:
    for number, (weight, bias) in enumerate(chain):
        x = x @ weight.T if bias is None else x @ weight.T + bias
        x = x.relu() if number < len(chain) - 1 else x
    return x


def function_of(weights: Weights) -> torch.Tensor:
    with torch.no_grad():
        return weights.module()(torch.randn(9, *IMAGE, generator=generator(), dtype=torch.float64))


@pytest.mark.parametrize(
    ("widths", "biased"),
    [
        ([(5,), (5,), (5,)], True),
        ([(3,), (6,), (1,), (4,)], True),
        ([(5,), (4,), (5,)], False),
        ([(4, 3), (5, 2), (4, 4)], True),
        ([(3, 4, 3)] * 3, True),
        ([(3, 2, 3), (2, 4, 2)], False),
        ([(4,)], True),
    ],
)
@pytest.mark.parametrize(
    ("options", "frequency"),
    [
        ({}, False),
        ({"popularity": 2, "gamma": 7.0}, True),
        ({"caps": True, "sigma": 1.0, "sigma0": 1.0}, True),
        ({"penalty": "paper", "strength": 0.02}, False),
        ({"penalty": "code2020", "strength": 0.3}, True),
        ({"penalty": "code2022", "strength": 0.3}, False),
    ],
)
def test_the_loop_form_agrees(widths, biased, options, frequency) -> None:
    """The network and the order of its units agree with the loop form.

    Widths are unequal, clients lack classes, and all penalties are tested.
    """
    models = chains(widths, biased)
    shares = class_shares(torch.tensor(COUNTS[: len(models)]))
    own = BetaBernoulli(**{"sigma": 0.9, "sigma0": 3.0, "caps": False, "sweeps": 3, **options})
    constants = Constants(
        own.sigma,
        own.sigma0,
        own.gamma,
        own.popularity,
        own.caps,
        own.penalty,
        options.get("strength", 0.0),
    )
    orders = visits(len(widths[0]), 3, len(models))
    plain = [[(w.numpy(), None if b is None else b.numpy()) for w, b in model] for model in models]
    expected = looped(plain, shares.numpy(), frequency, constants, orders)
    found = fuse_one(models, shares, frequency, own, orders)
    if own.gamma == 1 and len(models) > 1:
        assert any(
            len(layer.members) < sum(w[i] for w in widths) for i, layer in enumerate(found.matched)
        )
    for (weight, bias), (weight_, bias_) in zip(found.chain, expected, strict=True):
        np.testing.assert_allclose(weight.numpy(), weight_, rtol=1e-9, atol=1e-12)
        assert (bias is None) == (bias_ is None)
        if bias is not None:
            np.testing.assert_allclose(bias.numpy(), bias_, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strength", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_assignment_is_better(seed: int, strength: float) -> None:
    """No other assignment is better than the assignment that was found.

    The test tries all injections of 3 units into 3 global units and 3 new units.
    """
    options = BetaBernoulli(0.9, 3.0, caps=False, strength=strength)
    models = [torch.randn(3, 2, generator=generator(seed + 10 * s)).double() for s in range(2)]
    q = torch.full((2, 2), 1 / 0.9, dtype=torch.float64)
    pool, state = pool_of(models, q, torch.zeros(2).double(), options, 0)
    products = pool.products(state.units, 3, 1)
    rewards, penalties = gains(
        pool.local[1], state.posterior, products, pool.space, 2, options, True
    )
    assert penalties is not None
    values = rewards - strength * penalties
    assert values.shape == (6, 3)
    best = max(
        sum(float(values[k, j]) for j, k in enumerate(choice))
        for choice in itertools.permutations(range(6), 3)
    )
    found = assign(values, 3)
    assert len(set(found.tolist())) == 3
    assert float(values[found, torch.arange(3)].sum()) == pytest.approx(best, abs=1e-12)


def test_units_left_out_of_the_problem_would_not_have_been_chosen() -> None:
    rng = np.random.default_rng(0)
    for known in (0, 3, 40):
        values = rng.normal(size=(6, known + 6)) - 1
        values[:, known:] = rng.normal(size=(6, 1)) - 2 * np.log(np.arange(1, 7))
        rows, columns = linear_sum_assignment(values, maximize=True)
        found = assign(torch.from_numpy(values.T.copy()), known)
        assert len(set(found.tolist())) == 6
        assert values[np.arange(6), found].sum() == pytest.approx(
            values[rows, columns].sum(), abs=1e-12
        )
        if known == 40:
            assert (found < known).any() and (found >= known).any()


def test_rewards_are_distances_to_posterior_means() -> None:
    """Rewards equal distances to posterior means.

    Precisions differ by dimension.

    sum_d (q w + G)^2 / (q + S) - G^2 / S = sum_d q w^2 - (S q / (S + q)) (w - G / S)^2.
    """
    options, rng = BetaBernoulli(0.9, 3.0, gamma=2.0, caps=False), generator()
    q = torch.tensor([[1, 1, 0.3, 0.5], [1, 1, 0.7, 0.4], [1, 1, 0.1, 0.6]], dtype=torch.float64)
    mu0 = torch.tensor([0, 0.1, 0, 0], dtype=torch.float64)
    pool, state = pool_of(
        [torch.randn(n, 4, generator=rng).double() for n in (3, 2, 4)], q, mu0, options, 0, 1
    )
    w, (G, S) = pool.v[2] / q[2], sums_of(pool, state.units, len(state.posterior.c))
    S = torch.cat([S, torch.full((4, 4), 1 / 3, dtype=torch.float64)])
    G = torch.cat([G, (mu0 / 3).expand(4, 4)])
    kappa = S * q[2] / (S + q[2])
    distances = (kappa * (w[:, None] - G / S).square()).sum(2)  # shape (4, K + T)
    expected = (q[2] * w.square()).sum(1)[:, None] - distances
    c = state.posterior.c
    bonus = torch.cat(
        [(c / (3 - c)).log(), 2 * np.log(2 / 3) - 2 * torch.arange(1, 5).double().log()]
    )
    products = pool.products(state.units, len(c), 2)
    found = gains(pool.local[2], state.posterior, products, pool.space, 3, options, False)[0].T
    torch.testing.assert_close(found, expected + bonus, rtol=1e-12, atol=1e-12)


def test_the_papers_penalty_is_the_divergence() -> None:
    """The paper's penalty equals the divergence that torch.distributions computes.

    The prior mean and the precisions differ by dimension. One precision is 0. The
    penalty is never negative. At its mean it falls with the number of members.
    """
    options, rng = BetaBernoulli(0.9, 3.0, caps=False), generator()
    q = torch.rand(4, 5, generator=rng).double() + 0.1
    q[3, 2] = 0
    mu0 = torch.tensor([0.1, 0, 0, 0, 0.0]).double()
    models = [torch.randn(n, 5, generator=rng).double() for n in (2, 3, 2, 4)]
    pool, state = pool_of(models, q, mu0, options, 0, 1, 2)
    v, own = pool.v[3], pool.q[3]
    for before, units in (
        (state.posterior, state.units),
        (Posterior.without_members(pool.space, 1), {}),
    ):
        found = values_of(pool, penalty("paper", before, own, pool.space), before, units, 3)
        G, S = sums_of(pool, units, len(before.c))
        for j, k in itertools.product(range(4), range(len(S))):
            old = torch.distributions.Normal(G[k] / S[k], S[k] ** -0.5)
            new = torch.distributions.Normal((G[k] + v[j]) / (S[k] + q[3]), (S[k] + q[3]) ** -0.5)
            expected = torch.distributions.kl_divergence(old, new).sum()
            assert float(found[j, k]) == pytest.approx(float(expected), rel=1e-11)
            assert found[j, k] >= 0
    w, at_mean = torch.randn(1, 5, generator=rng).double(), []
    # The prior's mean is w. Therefore every posterior's mean is w too.
    pool = _UnitPool([w] * 6, torch.ones(6, 5).double(), w[0], options)
    state = pool.recomputed({0: torch.zeros(1).long()})
    for s in range(1, 6):
        form = penalty("paper", state.posterior, pool.q[s], pool.space)
        at_mean.append(float(values_of(pool, form, state.posterior, state.units, s)))
        state = pool.recomputed({**state.units, s: torch.zeros(1).long()})
    assert at_mean == sorted(at_mean, reverse=True) and at_mean[-1] < at_mean[0]


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_pair_by_pair(kind: str) -> None:
    """The penalties of pairs equal those of the loop form.

    The units have up to 12 members, and one unit is new. The prior mean is not small.
    """
    options, rng = BetaBernoulli(0.9, 3.0, caps=False), generator()
    mu0 = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    q = torch.rand(14, 3, generator=rng, dtype=torch.float64) + 0.2
    sizes = [3, *[1] * 11, 3, 3]
    pool = _UnitPool(
        [torch.randn(n, 3, generator=rng, dtype=torch.float64) for n in sizes], q, mu0, options
    )
    known = pool.recomputed(
        {0: torch.arange(3), **{s: torch.zeros(1).long() for s in range(1, 12)}}
    )
    v, w, a0 = pool.v[13].numpy(), (pool.v[13] / q[13]).numpy(), (mu0 / 3).numpy()
    for state, units in (
        (known.posterior, known.units),
        (Posterior.without_members(pool.space, 1), {}),
    ):
        found = values_of(pool, penalty(kind, state, pool.q[13], pool.space), state, units, 13)
        G, S = (sums.numpy() for sums in sums_of(pool, units, len(state.c)))
        for j, k in itertools.product(range(3), range(len(S))):
            expected = LOOPED[kind](v[j], w[j], q[13].numpy(), G[k], S[k], int(state.c[k]), a0)
            assert float(found[j, k]) == pytest.approx(expected, rel=1e-11)
    c, products = known.posterior.c, pool.products(known.units, 3, 13)
    assert c.tolist() == [12, 1, 1]
    off, on = (
        gains(
            pool.local[13],
            known.posterior,
            products,
            pool.space,
            14,
            replace(options, penalty=kind),
            asked,
        )
        for asked in (False, True)
    )
    assert off[1] is None and torch.equal(off[0], on[0])
    values = values_of(
        pool, reward(known.posterior, pool.q[13], pool.space), known.posterior, known.units, 13
    )
    torch.testing.assert_close(
        off[0].T[:, :3], values + (c / (14 - c)).log(), rtol=1e-13, atol=1e-13
    )
    values = values_of(
        pool,
        penalty(kind, known.posterior, pool.q[13], pool.space),
        known.posterior,
        known.units,
        13,
    )
    torch.testing.assert_close(
        (on[0] - 0.3 * on[1]).T[:, :3], off[0].T[:, :3] - 0.3 * values, rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("widths", [(4, 6, 3), (5, 5, 5)])
def test_pfnm_limits_of_gamma_decide_the_width(widths: tuple[int, ...]) -> None:
    models = [torch.randn(n, 4, generator=generator(n)).double() for n in widths]
    q, mu0 = torch.ones(3, 4).double(), torch.zeros(4).double()
    for gamma, width in ((1e-200, max(widths)), (1e200, sum(widths))):
        for caps in (True, False):
            found = match(models, q, mu0, BetaBernoulli(gamma=gamma, caps=caps), visits(1, 5, 3)[0])
            assert len(found.members) == width
            assert int(found.members.sum()) == sum(widths)


def test_sums_after_many_moves_are_those_of_the_members() -> None:
    options = BetaBernoulli(0.9, 3.0, caps=False)
    rng = generator()
    models = [torch.randn(n, 6, generator=rng).double() for n in (4, 7, 5, 6)]
    q = torch.rand(4, 6, generator=rng).double() + 0.2
    pool, state = pool_of(
        models, q, torch.full((6,), 0.1, dtype=torch.float64), options, 0, 1, 2, 3
    )
    for number in range(40):
        state = add(pool, state, number * 3 % 4)
        fresh = pool.recomputed(state.units).posterior
        for own, anew in zip(vars(state.posterior).values(), vars(fresh).values(), strict=True):
            torch.testing.assert_close(own, anew, rtol=1e-11, atol=1e-12)
        assert bool((fresh.c >= 1).all()) and int(fresh.c.sum()) == 22
    assert len(fresh.c) < 22
    G, S = sums_of(pool, state.units, len(fresh.c))  # as summed over the members
    for sums, summed in ((fresh.square, G.square()), (fresh.prior, G * pool.space.a0)):
        torch.testing.assert_close(sums, pool.space.sums(summed), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fresh.S[:, pool.space.blocks.argmax(1)], S, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pool.matched(state.units).mean, G / S, rtol=1e-12, atol=1e-12)


def test_pfnm_caps_bound_counts_and_new_units() -> None:
    """The caps of PFNM bound the counts and the number of new units.

    c_k counts as at most 10. New units are allowed until there are 700 units. After
    that, one new unit is allowed, or as many as a model needs to assign all its units.
    """
    capped, free = BetaBernoulli(caps=True), BetaBernoulli(caps=False)

    def values(
        known: int, units: int, options: BetaBernoulli, c: float = 12.0, N: int = 30
    ) -> torch.Tensor:
        pool = _UnitPool(
            [torch.zeros(units, 1).double()],
            torch.ones(1, 1).double(),
            torch.zeros(1).double(),
            options,
        )
        state = Posterior.without_members(pool.space, known)
        state = replace(state, c=state.c + c)
        products = pool.products({}, known, 0)
        return gains(pool.local[0], state, products, pool.space, N, options, False)[0].T

    difference = values(3, 2, free)[:, :3] - values(3, 2, capped)[:, :3]
    torch.testing.assert_close(
        difference, torch.full_like(difference, np.log(12 / 18) - np.log(10 / 20))
    )
    for known, units, new in (
        (3, 5, 5),
        (690, 20, 10),
        (700, 20, 1),
        (800, 20, 1),
        (100, 800, 700),
    ):
        assert values(known, units, capped).shape == (units, known + new)
        assert values(known, units, free).shape == (units, known + units)


def shrunk(
    model: Weights, copies: int, sigma: float, sigma0: float, frequency: bool
) -> list[dict[str, torch.Tensor]]:
    """Return the result of fusing N copies of a model with equal class counts."""
    last = f"output.{'weight'}"
    params = {}
    for name, value in model.params.items():
        by_class = name == "output.bias" or (name == last and frequency)
        seen = 1 if by_class else copies  # the shares of all copies sum to one
        mu0 = 0.1 if name.endswith("bias") else 0.0
        params[name] = (mu0 / sigma0 + seen * value / sigma) / (1 / sigma0 + seen / sigma)
    return [params]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MLPS)
def test_pfnm_of_copies_is_shrunk_by_the_prior(name: str, method: str) -> None:
    """Weights become w N / (N + sigma / sigma0), and biases are drawn to 0.1.

    With class shares, N copies count as one.
    """
    spec, model = MLPS[name], models_of(MLPS[name], 1)[0]
    for frequency, copies in itertools.product((False, True), (1, 4)):
        world = matching(spec, method, class_frequency=frequency, sigma=0.9, sigma0=3.0)
        result = fused(world, [model] * copies, [[2, 3, 4]] * copies)
        assert_same(tensors(result), shrunk(model, copies, 0.9, 3.0, frequency), 1e-12)
        assert result.spec == spec
        expected = model.params["hidden.0.weight"] * copies / (copies + 0.3)
        torch.testing.assert_close(result.params["hidden.0.weight"], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MLPS)
def test_permuted_copies_are_recovered(name: str, method: str) -> None:
    spec, model = MLPS[name], models_of(MLPS[name], 1)[0]
    structure = structure_of(spec, IMAGE)
    world = matching(spec, method, class_frequency=False)
    copies = [
        model,
        *(structure.permute_weights(model, structure.random(seed)) for seed in range(3)),
    ]
    result, metrics = world.aggregator.fuse(results_of(copies, [[2, 3, 4]] * 4), world.env)
    options = world.aggregator
    (params,) = shrunk(model, 4, options.sigma, options.sigma0, False)
    torch.testing.assert_close(
        function_of(result), function_of(Weights(spec, params, {})), rtol=1e-12, atol=1e-12
    )
    assert result.spec == spec and metrics["fusion/matched"] == 1
    assert metrics["fusion/log_ratio"] == pytest.approx(-np.log(4))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MLPS)
def test_the_order_of_units_does_not_matter(name: str, method: str) -> None:
    """The fused function is the same for every order of a model's hidden units."""
    spec = MLPS[name]
    world, structure, models = matching(spec, method), structure_of(spec, IMAGE), models_of(spec, 4)
    moved = [
        structure.permute_weights(model, structure.random(seed))
        for seed, model in enumerate(models)
    ]
    a, b = (fused(world, these, COUNTS) for these in (models, moved))
    assert a.spec == b.spec
    torch.testing.assert_close(function_of(a), function_of(b), rtol=1e-11, atol=1e-11)


def test_other_numbers_for_the_models_and_their_visits_change_nothing() -> None:
    """Renumbering the models and their visits in the same way changes nothing.

    The models have different widths, so that the model that is matched first stays the
    same.
    """
    models = [chain for seed in range(6) for chain in chains([(8 + seed,)], seed=seed)]
    shares = class_shares(torch.tensor([*COUNTS, [1, 1, 0], [0, 6, 2]]))
    options, orders = BetaBernoulli(0.9, 3.0, caps=False), visits(1, 3, 6)
    order = [2, 0, 5, 3, 1, 4]
    number = np.argsort(order)
    a = fuse_one(models, shares, False, options, orders)
    b = fuse_one([models[s] for s in order], shares[order], False, options, number[orders])
    c = fuse_one(models, shares, False, options, visits(1, 3, 6, seed=1))
    x = torch.randn(8, 4, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(output_of(a.chain, x), output_of(b.chain, x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(output_of(a.chain, x), output_of(c.chain, x))  # visits do matter


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("name", ["one", "two"])
def test_lambda_0_is_pfnm_to_the_bit_and_a_small_one_changes_no_assignment(
    name: str, kind: str
) -> None:
    spec, models = MLPS[name], models_of(MLPS[name], 4)
    shared = {"sigma": 0.8, "sigma0": 2.0, "caps": False, "class_frequency": True, "gamma": 3.0}
    plain = fused(matching(spec, "pfnm", **shared), models, COUNTS)
    penalised, tiny, large = (
        matching(spec, "nafi", **shared, penalty=kind, lam=lam) for lam in (0.0, 1e-12, 30.0)
    )
    for world in (penalised, tiny):
        result = fused(world, models, COUNTS)
        assert result.spec == plain.spec
        assert_same(tensors(result), tensors(plain))
    other = fused(large, models, COUNTS)
    assert other.spec != plain.spec or not torch.equal(
        other.params["output.weight"], plain.params["output.weight"]
    )


def test_a_large_literal_divergence_forbids_new_units() -> None:
    """A large literal divergence forbids new units.

    Therefore widths fall to the local width. The terms of the divergence that contain
    no weights are largest for a new unit.
    """
    models = [chain for seed in range(3) for chain in chains([(6,)], seed=seed)]
    shares = torch.full((3, 3), 1 / 3).double()
    widths = []
    for strength in (0.0, 1.0, 100.0):
        options = BetaBernoulli(0.9, 3.0, caps=False, strength=strength)
        widths.append(
            len(fuse_one(models, shares, False, options, visits(1, 5, 3)).matched[0].members)
        )
    assert widths[0] > widths[1] >= widths[2] == 6


def test_without_hidden_layers_and_prior_it_is_the_average() -> None:
    """Without hidden layers and a prior, the result is the average.

    With class shares, row c is weighted by the shares of class c.
    """
    spec = MODELS["linear"]
    models = models_of(spec, 4)
    mean = fused(world_of(spec, "method=average"), models)
    result = fused(
        matching(spec, "pfnm", sigma0=1e14, class_frequency=False), models, [[2, 3, 4]] * 4
    )
    assert_same(tensors(result), tensors(mean), 1e-11)
    shares = class_shares(torch.tensor(COUNTS))
    result = fused(matching(spec, "pfnm", sigma0=1e14), models, COUNTS)
    for name, value in result.params.items():
        expected = sum(
            torch.einsum("c,c...->c...", f, m.params[name])
            for f, m in zip(shares, models, strict=True)
        )
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_a_class_absent_at_some_or_at_all(method: str) -> None:
    """A client without a class does not contribute to the class.

    All clients count uniformly for a class that no client has.
    """
    shares = class_shares(torch.tensor([[1, 0, 0], [3, 0, 5]]))
    assert torch.equal(shares, torch.tensor([[0.25, 0.5, 0], [0.75, 0.5, 1]]).double())
    spec = MLPS["one"]
    world = matching(spec, method, class_frequency=True)
    base = models_of(spec, 1)[0]
    other = {k: v.clone() for k, v in base.params.items()}
    other["output.weight"][2] += 50.0  # the client has no sample of this class
    other["output.bias"][2] += 50.0
    counts = [[4, 2, 0], [4, 2, 6]]
    changed = fused(world, [Weights(spec, other, {}), base], counts)
    assert_same(tensors(changed), tensors(fused(world, [base, base], counts)), 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_dead_units_are_matched_with_each_other(method: str) -> None:
    """If every model has units of zeros, the numbers stay finite.

    These units add nothing to the function.
    """
    spec = MLPS["one"]
    models = []
    for model in models_of(spec, 3):
        params = {k: v.clone() for k, v in model.params.items()}
        params["hidden.0.weight"][1:3] = 0
        params["hidden.0.bias"][1:3] = 0
        params["output.weight"][:, 1:3] = 0
        models.append(Weights(spec, params, {}))
    result = fused(matching(spec, method), models, COUNTS[:3])
    dead = (result.params["hidden.0.weight"] == 0).all(1)
    assert dead.sum() == 2
    assert bool((result.params["output.weight"][:, dead] == 0).all())
    assert all(bool(value.isfinite().all()) for value in result.params.values())


def test_pfnm_logs_widths_and_matched_share() -> None:
    spec = MLPS["two"]
    world, models = matching(spec, "nafi", gamma=1e200), models_of(spec, 3)
    metrics = world.aggregator.fuse(results_of(models, COUNTS[:3]), world.env)[1]
    assert metrics == {
        "fusion/width_1": 21,
        "fusion/width_2": 15,
        "fusion/log_ratio": 0.0,
        "fusion/matched": 0.0,
    }
    linear = matching(MODELS["linear"], "nafi")
    assert (
        linear.aggregator.fuse(results_of(models_of(MODELS["linear"], 2), COUNTS[:2]), linear.env)[
            1
        ]
        == {}
    )


@pytest.mark.parametrize("method", METHODS)
def test_float32_models_are_matched_in_float64(method: str) -> None:
    spec, models = MLPS["one"], models_of(MLPS["one"], 3)
    single = [Weights(spec, {k: v.float() for k, v in m.params.items()}, {}) for m in models]
    double = [Weights(spec, {k: v.double() for k, v in m.params.items()}, {}) for m in single]
    world = matching(spec, method)
    found, expected = fused(world, single, COUNTS[:3]), fused(world, double, COUNTS[:3])
    for name, value in found.params.items():
        assert value.dtype == torch.float32 and torch.equal(value, expected.params[name].float())


@pytest.mark.parametrize("method", METHODS)
def test_a_grown_model_is_evaluated_stored_and_trained_on(method: str, tmp_path: Path) -> None:
    """A model that grew is evaluated, stored and trained on.

    In three rounds, the starts and the parts of the grown network differ. The stored
    model is the evaluated one.
    """
    world = make_world(
        f"method={method}", "init=different", "aggregator.gamma=1e30", data=make_data((20, 12, 17))
    )
    grown = world.run().state["weights"]
    (width,) = dict(grown.spec.kwargs)["hidden"]
    assert width == 8 * 3
    test = world.data.test
    measured = Evaluator(world.env.task, 7)(Outcome((grown,), "global"), test, "test")[
        "test/global/loss"
    ]
    with torch.no_grad():
        output = grown.module()(test.inputs(slice(None)))
    assert measured == pytest.approx(float(torch.nn.functional.cross_entropy(output, test.y)))
    save_outcome(Outcome((grown,), "global"), None, tmp_path)
    stored = ModelFolder.open(tmp_path).weights(0)
    assert stored.spec == grown.spec
    assert_same(tensors(stored), tensors(grown))


def test_given_orders_are_followed_and_drawn_ones_follow_seed_round_and_layer(
    tmp_path: Path,
) -> None:
    spec, file, counts = MLPS["two"], tmp_path / "orders.npy", [[2, 3, 4]] * 6
    rng = generator()
    like = weights_of(spec).params.items()
    draws = [
        {k: torch.randn(v.shape, generator=rng, dtype=torch.float64) for k, v in like}
        for _ in range(6)
    ]
    models = [Weights(spec, params, {}) for params in draws]
    drawn = matching(spec, "pfnm")
    (orders,) = drawn.aggregator._orders(drawn.env, 6, [0], False)
    assert orders.shape == (2, 5, 6)
    np.save(file, orders)
    expected = tensors(fused(drawn, models, counts))
    given, other_seed = matching(spec, "pfnm", orders=str(file)), replace(drawn.env, seed=5)
    given.env = other_seed
    assert_same(tensors(fused(given, models, counts)), expected)
    assert not np.array_equal(orders[0], orders[1])
    for env in (other_seed, drawn.env.at(1)):
        assert not np.array_equal(drawn.aggregator._orders(env, 6, [0], False)[0], orders)
    node = {"_target_": "fedexp.methods.nafi.NAFI", "orders": str(file)}
    # The content of the file is part of the run's identity.
    assert pin({"aggregator": node}) == {"aggregator.orders": file_sha256(file)}
    np.save(file, orders[:, :, ::-1])
    other = fused(given, models, counts).params
    assert any(
        v.shape != other[k].shape or not torch.equal(v, other[k]) for k, v in expected[0].items()
    )


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        (np.zeros((1, 5, 2), dtype=int), "not permutations"),
        (np.zeros((1, 5, 2)), "not integers"),
        (np.array([[[0, 2]] * 5]), "not permutations"),
        (np.array([[[0, 1]] * 4]), "the wrong shape"),
        (np.array([[0, 1]] * 5), "the wrong shape"),
        (np.array([[[0, 1]] * 5] * 2), "the wrong shape"),
        (np.array([[["a", "b"]] * 5], dtype=object), "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_orders_that_are_none_are_refused(orders, words: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.npy"
    if orders is not None:
        np.save(file, orders)
    with pytest.raises(ConfigError, match=words) as error:
        PFNM(orders=str(file)).check(MLPS["one"], IMAGE)
    assert error.value.facts["where"] == "aggregator.orders"


def test_orders_for_another_cohort_are_refused_before_training(tmp_path: Path) -> None:
    np.save(tmp_path / "orders.npy", visits(1, 5, 3))
    world = make_world("method=pfnm", f"aggregator.orders={tmp_path / 'orders.npy'}", model=MLP)
    state = world.aggregator.init(world.env)
    with pytest.raises(ConfigError, match="another number of models"):
        world.aggregator.plan(state, world.env)


def test_orders_are_for_the_clients_that_do_not_drop_out(tmp_path: Path) -> None:
    file = tmp_path / "orders.npy"
    np.save(file, visits(1, 5, 4))
    world = make_world("method=pfnm", f"aggregator.orders={file}", model=MLP)
    state = world.aggregator.init(world.env)
    env = replace(world.env, client_dropout=0.4)
    present = sum(not env.job(client, state["weights"], {}).drops_out for client in range(4))
    assert 1 < present < 4
    np.save(file, visits(1, 5, present))
    assert len(world.aggregator.plan(state, env)) == 4
    np.save(file, visits(1, 5, 4))
    with pytest.raises(ConfigError, match="another number of models") as error:
        world.aggregator.plan(state, env)
    assert error.value.facts["expected"] == f"{present} in the cohort"


class Fixed(nn.Module):
    """A chain that cannot be built with other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, 6), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(x.flatten(1))))


class Rectified(Fixed):
    """A network whose slope belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.slope(self.hidden(x.flatten(1))))


class Residual(Fixed):
    """A network with two layers that share their units."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.hidden(x.flatten(1)))
        return self.output(x + torch.relu(self.second(x)))


class Skipping(Fixed):
    """A network whose last layer also reads the input."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6 + 128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.output(torch.cat([torch.relu(self.hidden(x)), x], 1))


HERE = "tests.methods.test_pfnm."
CHAINLESS = {
    "cnn": (MODELS["cnn"], "only chains of linear layers.*convolution"),
    "BatchNorm": (MODELS["cnn, BatchNorm"], "is a norm layer"),
    "resnet": (MODELS["resnet, BatchNorm"], "is a norm layer"),
    "frozen": (spec_of("FrozenHead"), "'output.bias' is frozen"),
    "LayerNorm": (MODELS["gated"], "is a norm layer"),
    "residual": (
        spec_of(f"{HERE}Residual"),
        "only chains of linear layers.*layers other than the one before",
    ),
    "skip": (
        spec_of(f"{HERE}Skipping"),
        "only chains of linear layers.*more than the layer before",
    ),
    "slope": (
        spec_of(f"{HERE}Rectified"),
        "only chains of linear layers.*does not belong to a layer",
    ),
    "fixed": (spec_of(f"{HERE}Fixed"), "widths cannot be changed"),
    **{
        name: (spec, name if "groups" not in name else "is a norm layer")
        for name, spec in REFUSED.items()
    },
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHAINLESS)
def test_pfnm_with_other_networks_is_refused(name: str, method: str) -> None:
    spec, words = CHAINLESS[name]
    with pytest.raises(ConfigError, match=words):
        AGGREGATORS[method]().check(spec, IMAGE)


@pytest.mark.parametrize("name", [*MLPS, "linear"])
def test_pfnm_accepts_multi_layer_perceptrons(name: str) -> None:
    spec: ModelSpec = {**MLPS, **MODELS}[name]
    PFNM().check(spec, IMAGE)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lam", -0.1),
        ("sigma", 0),
        ("sigma0", 0),
        ("sigma", -1),
        ("gamma", 0),
        ("sweeps", -1),
        ("popularity", 3),
        ("penalty", "kl"),
    ],
)
def test_settings_without_meaning_are_refused(key: str, value) -> None:
    with pytest.raises(ConfigError, match="lambda" if key == "lam" else key):
        build(NAFI, {key: value}, "aggregator")


def test_a_config_with_another_network_is_refused() -> None:
    with pytest.raises(ConfigError, match="only chains of linear layers"):
        Experiment.of(compose(["method=nafi", "model=lenet", "dataset=mnist"]))


def test_preset_with_nafis_constants_is_nafi_without_its_penalty() -> None:
    preset, nafi = (
        Experiment.of(compose([f"method={method}", "model.hidden=[5]"])).aggregator
        for method in ("pfnm_nafi", "nafi")
    )
    assert isinstance(preset, PFNM) and isinstance(nafi, NAFI)
    for field in fields(preset):
        assert getattr(preset, field.name) == getattr(nafi, field.name), field.name
