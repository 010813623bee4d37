"""Tests of several lambdas on one set of models, legacy orders and class counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.config.pinning import pin
from fedexp.core.build import build
from fedexp.core.data import Samples
from fedexp.core.errors import ConfigError
from fedexp.core.outcome import Outcome
from fedexp.core.trace import Trace
from fedexp.evaluation.evaluate import Evaluator
from fedexp.evaluation.tracing import Tracer
from fedexp.matching import beta_bernoulli
from fedexp.matching.beta_bernoulli import BetaBernoulli, match, match_each
from fedexp.matching.chains import fuse_chains
from fedexp.methods.nafi import NAFI
from fedexp.methods.pfnm import PFNM, class_shares
from fedexp.running.experiment import Experiment
from fedexp.storage.files import file_sha256
from tests.matching.nets import IMAGE
from tests.methods.fusion_world import fused, models_of, results_of, tensors
from tests.methods.test_pfnm import COUNTS, MLPS, chains, generator, matching, visits
from tests.reference.matching_loops import Constants
from tests.reference.matching_loops import fused as looped
from tests.world import assert_same, make_data, make_world

LAMBDAS = (0.0, 1e-8, 0.3, 0.0, 3.0, 100.0)


def problem(frequency: bool):
    """Return units of which a third are alike, with one precision or several."""
    rng = generator(1)
    common = 1.5 * torch.randn(14, 5, generator=rng, dtype=torch.float64)
    models = [common[torch.randperm(14, generator=rng)[:n]] for n in (8, 10, 7, 9)]
    models = [w + 1.2 * torch.randn(w.shape, generator=rng, dtype=torch.float64) for w in models]
    q = torch.ones(4, 5, dtype=torch.float64)
    if frequency:
        q[:, 3:] = torch.rand(4, 2, generator=rng, dtype=torch.float64)
    return models, q, torch.tensor([0, 0, 0.1, 0, 0], dtype=torch.float64)


def same(a, b) -> bool:
    pairs = [*zip(a.units, b.units, strict=True), (a.members, b.members), (a.mean, b.mean)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch use as many threads as the test's parameter `threads`."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kind", "frequency", "threads"),
    [("paper", True, 1), ("code2020", False, 3), ("code2022", True, 3)],
    indirect=["threads"],
)
def test_each_lambda_is_to_the_bit_what_it_is_alone(kind: str, frequency: bool) -> None:
    """For each lambda, the result is bit-identical to that of a separate matching.

    The lambdas diverge at different places. Visiting orders are common or separate.
    """
    models, q, mu0 = problem(frequency)
    options = BetaBernoulli(0.9, 3.0, caps=False, penalty=kind)
    own = np.stack([visits(1, 3, 4, seed)[0] for seed in range(len(LAMBDAS))])
    for orders in (own[:1].repeat(len(LAMBDAS), 0), own):
        found = match_each(models, q, mu0, options, LAMBDAS, orders)
        alone = [
            match(models, q, mu0, replace(options, strength=strength), order)
            for strength, order in zip(LAMBDAS, orders, strict=True)
        ]
        assert all(map(same, found, alone))
        assert len({m.mean.numpy().tobytes() for m in alone}) > 2
    assert not same(alone[0], alone[3])  # orders do matter
    shared = match_each(models, q, mu0, options, LAMBDAS, own[:1].repeat(len(LAMBDAS), 0))
    assert shared[0] is shared[1] is shared[3] is not shared[5]


def test_lambdas_that_agree_cost_one_posterior(monkeypatch) -> None:
    """Lambdas with the same state share one posterior.

    The products of a visit are computed once for all of them.
    """
    models, q, mu0 = problem(False)
    calls: list[int] = []
    products = beta_bernoulli._UnitPool.products
    spy = lambda pool, units, known, s: calls.append(s) or products(pool, units, known, s)  # noqa: E731
    monkeypatch.setattr(beta_bernoulli._UnitPool, "products", spy)
    orders = visits(1, 3, 4)
    counts = []
    for strengths in ([0.0], [0.0, 1e-12, 1e-11, 0.0]):
        calls.clear()
        match_each(
            models, q, mu0, BetaBernoulli(caps=False), strengths, orders.repeat(len(strengths), 0)
        )
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_lambdas_that_agree_again_have_one_state_whose_sums_are_new() -> None:
    """Lambdas that agree again share one state, whose sums are recomputed.

    This removes the rounding errors that differed between them.
    """
    models, q, mu0 = problem(True)
    pool = beta_bernoulli._UnitPool(models, q, mu0, BetaBernoulli(caps=False))
    state = pool.recomputed({s: torch.arange(len(w)) for s, w in enumerate(models)})
    drifted = replace(
        state, posterior=replace(state.posterior, square=state.posterior.square * (1 + 1e-9))
    )
    other = pool.recomputed({s: torch.arange(len(w)).flip(0) for s, w in enumerate(models)})
    branches = [
        beta_bernoulli._Branch(n, s) for n, s in (((0, 3), drifted), ((1,), other), ((2,), state))
    ]
    first, second = beta_bernoulli._join(branches, pool)
    assert (first.numbers, second.numbers) == ((0, 3, 2), (1,))
    for branch, expected in ((first, state), (second, other)):
        pairs = zip(
            vars(branch.state.posterior).values(), vars(expected.posterior).values(), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_products_that_are_not_kept_are_computed_at_each_visit(monkeypatch) -> None:
    models, q, mu0 = problem(True)
    options, orders = BetaBernoulli(0.9, 3.0, caps=False, strength=0.1), visits(1, 3, 4)[0]
    expected = match(models, q, mu0, options, orders)
    monkeypatch.setattr(beta_bernoulli, "_PRODUCTS_BYTES", 0)
    pool = beta_bernoulli._UnitPool(models, q, mu0, options)
    assert pool._products == ()
    found = match(models, q, mu0, options, orders)
    assert all(torch.equal(a, b) for a, b in zip(found.units, expected.units, strict=True))
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("widths", [[(6,)] * 4, [(4, 5), (5, 3), (4, 4), (6, 5)], [(3, 4, 3)] * 4])
def test_networks_of_each_lambda_are_those_alone(widths) -> None:
    """For each lambda, the network is bit-identical to that of a separate fusion.

    Each lambda continues with its results of the layers that were matched before.
    """
    models, shares = chains(widths, scale=2.0), class_shares(torch.tensor(COUNTS))
    options, depth = BetaBernoulli(0.9, 3.0, caps=False, penalty="code2020"), len(widths[0])
    orders = np.stack([visits(depth, 3, 4)] * len(LAMBDAS))
    found = fuse_chains(models, shares, True, options, LAMBDAS, orders)
    assert len({tuple(len(layer.members) for layer in f.matched) for f in found}) > 1
    for strength, order, network in zip(LAMBDAS, orders, found, strict=True):
        (alone,) = fuse_chains(models, shares, True, options, [strength], order[None])
        for (weight, bias), (weight_, bias_) in zip(network.chain, alone.chain, strict=True):
            assert torch.equal(weight, weight_) and torch.equal(bias, bias_)


class Recorder(Trace):
    """A trace that records the models and values of the iterations in `wanted`."""

    def __init__(self, *wanted: int) -> None:
        self.wanted, self.taken = wanted, {}

    def wants(self, iteration: int) -> bool:
        return iteration in self.wanted

    def __call__(self, iteration, outcomes, clients=(), values=None) -> None:
        self.taken[iteration] = outcomes["fused"].models[0], values


def test_a_grid_delivers_its_first_lambda_and_traces_those_that_are_looked_at(monkeypatch) -> None:
    spec, models = MLPS["two"], models_of(MLPS["two"], 4)
    world, trace, asked = matching(spec, "nafi", lam=[0.2, 0.0, 5.0, 50.0]), Recorder(0, 2, 3), []
    world.env = replace(world.env, trace=trace)
    monkeypatch.setattr(
        "fedexp.methods.pfnm.fuse_chains",
        lambda *args: asked.append(args[4]) or fuse_chains(*args),
    )
    delivered, metrics = world.aggregator.fuse(results_of(models, COUNTS), world.env)
    assert asked == [[0.2, 5.0, 50.0]] and sorted(trace.taken) == [0, 2, 3]
    for number, lam in ((0, 0.2), (2, 5.0), (3, 50.0)):
        one = matching(spec, "nafi", lam=lam)
        expected, logged = one.aggregator.fuse(results_of(models, COUNTS), one.env)
        model, values = trace.taken[number]
        assert model.spec == expected.spec and values == {"lam": lam, **logged}
        assert_same(tensors(model), tensors(expected))
    assert_same(tensors(delivered), tensors(trace.taken[0][0]))
    assert metrics == {k: v for k, v in trace.taken[0][1].items() if k != "lam"}


def test_a_grid_that_nothing_looks_at_is_refused() -> None:
    grid = ["method=nafi", "aggregator.lam=[0,0.1]"]
    with pytest.raises(ConfigError, match="several lambdas") as error:
        Experiment.of(compose(grid))
    assert error.value.facts["where"] == "trace.every"
    assert Experiment.of(compose([*grid, "trace.every=1"])).aggregator.strengths == (0.0, 0.1)


def test_traced_models_are_measured_on_the_validation_share_too() -> None:
    world = make_world("method=fedavg")
    val = Samples(world.data.train.x[:9], world.data.train.y[:9], dtype=torch.float64)
    data, evaluator = replace(world.data, val=val), Evaluator(world.experiment.task, 7)
    outcome = Outcome((world.env.initial_weights(),), "global")
    tracer = Tracer(evaluator, data, every=1, weights=())
    tracer(4, {"fused": outcome}, values={"lam": 0.5})
    (row,) = tracer.take().rows
    test, own = evaluator(outcome, data.test, "test"), evaluator(outcome, val, "val")
    assert row == {
        "iteration": 4,
        "lam": 0.5,
        **{f"fused/{name}": test[f"test/global/{name}"] for name in ("acc", "loss")},
        **{f"fused/val/{name}": own[f"val/global/{name}"] for name in ("acc", "loss")},
    }


def after(seed: int) -> dict:
    return np.random.RandomState(seed).get_state(legacy=False)


def test_raw_orders_are_the_legacy_generators_next_permutations() -> None:
    """Raw orders are the next permutations of the legacy generator.

    Layers follow each other, and the last hidden layer comes first. In a grid, the
    stream continues from one lambda to the next, or starts again for each lambda.
    """
    for continued in (True, False):
        world = matching(
            MLPS["two"], "nafi", visits="raw", lam=[0.0, 0.1, 1.0], continued=continued, sweeps=3
        )
        env = replace(world.env, rounds=1, legacy=after(5))
        rng = np.random.RandomState(5)
        stream = [rng.permutation(4) for _ in range(3 * 2 * 3)]
        expected = np.array(stream).reshape(3, 2, 3, 4)
        found = world.aggregator._orders(env, 4, [0, 2], False)
        assert np.array_equal(found, expected[[0, 2]] if continued else expected[[0, 0]])
    plain = matching(MLPS["one"], "pfnm", visits="raw")
    env = replace(plain.env, rounds=1, legacy=after(5))
    # Asking for orders does not advance the stream.
    a, b = (plain.aggregator._orders(env, 4, [0], False) for _ in range(2))
    assert np.array_equal(a, b) and np.array_equal(
        a[0, 0, 0], np.random.RandomState(5).permutation(4)
    )
    ascending = matching(MLPS["one"], "pfnm", visits="ascending")
    assert np.array_equal(
        ascending.aggregator._orders(env, 4, [0], False), np.tile(np.arange(4), (1, 1, 5, 1))
    )


def test_raw_orders_need_one_round_and_a_split() -> None:
    with pytest.raises(ConfigError, match="one matching") as error:
        Experiment.of(compose(["method=pfnm", "aggregator.visits=raw", "rounds=2"]))
    assert error.value.facts["where"] == "rounds"
    world = make_world("method=pfnm", "aggregator.visits=raw", "rounds=1")
    with pytest.raises(ConfigError, match="not drawn here"):
        world.aggregator.plan(world.aggregator.init(world.env), world.env)


def test_class_counts_from_a_file_are_those_of_the_clients_that_take_part(tmp_path: Path) -> None:
    spec, file, models = MLPS["one"], tmp_path / "counts.npy", models_of(MLPS["one"], 3)
    counts = np.array([[1, 1, 7], [5, 2, 0], [9, 9, 9], [3, 9, 1]])
    np.save(file, counts)
    cohort = [1, 3, 0]
    asked = matching(spec, "pfnm")
    expected = fused(asked, models, counts[cohort].tolist())
    told = matching(spec, "pfnm", class_counts=str(file))
    told.env = replace(told.env, sizes=np.ones(4, dtype=np.int64))
    assert told.aggregator.probes(told.env) == ()
    results = [replace(r, client=c) for r, c in zip(results_of(models), cohort, strict=True)]
    assert_same(tensors(told.aggregator.fuse(results, told.env)[0]), tensors(expected))
    node = {"_target_": "fedexp.methods.pfnm.PFNM", "class_counts": str(file)}
    assert pin({"aggregator": node}) == {"aggregator.class_counts": file_sha256(file)}


@pytest.mark.parametrize("kind", ["paper", "code2022"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_given_models_orders_and_counts_decide_everything(
    name: str, kind: str, tmp_path: Path
) -> None:
    """The given models, orders and counts determine the result.

    The loop form agrees to 1e-9 in float64. Seeds, the split and the clients' answers
    do not matter.
    """
    spec, models, depth = MLPS[name], models_of(MLPS[name], 4), 1 if name == "one" else 2
    orders, counts = visits(depth, 5, 4), np.array(COUNTS)
    np.save(tmp_path / "orders.npy", orders)
    np.save(tmp_path / "counts.npy", counts)
    files = {"orders": str(tmp_path / "orders.npy"), "class_counts": str(tmp_path / "counts.npy")}
    world = matching(spec, "nafi", **files, lam=0.3, penalty=kind, class_frequency=True)
    layers = [f"hidden.{layer}" for layer in range(depth)] + ["output"]
    plain = [
        [(m.params[f"{x}.weight"].numpy(), m.params[f"{x}.bias"].numpy()) for x in layers]
        for m in models
    ]
    constants = Constants(penalty=kind, lam=0.3)
    expected = looped(plain, class_shares(torch.tensor(COUNTS)).numpy(), True, constants, orders)
    for seed in (0, 7):
        env = replace(world.env, seed=seed, sizes=np.full(4, 3 + seed))
        found = world.aggregator.fuse(results_of(models), env)[0].params
        for layer, (weight, bias) in zip(layers, expected, strict=True):
            np.testing.assert_allclose(
                found[f"{layer}.weight"].numpy(), weight, rtol=1e-9, atol=1e-12
            )
            np.testing.assert_allclose(found[f"{layer}.bias"].numpy(), bias, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.ones((4, 2), dtype=int), "the wrong shape"),
        (np.ones((3, 3), dtype=int), "the wrong shape"),
        (np.ones(12, dtype=int), "the wrong shape"),
        (np.ones((4, 3)), "not integers"),
        (-np.ones((4, 3), dtype=int), "not counts"),
        (None, "cannot be read"),
    ],
)
def test_class_counts_that_are_none_are_refused_before_training(
    counts, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "counts.npy"
    if counts is not None:
        np.save(file, counts)
    with pytest.raises(ConfigError, match=words) as error:
        world = make_world("method=pfnm", f"aggregator.class_counts={file}", data=make_data())
        world.aggregator.plan(world.aggregator.init(world.env), world.env)
    assert error.value.facts["where"] == "aggregator.class_counts"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lam": []}, "at least one lambda"),
        ({"lam": [0.1, -0.1]}, "lambda must not be negative, got -0.1"),
        ({"later_sweeps": -1}, "later_sweeps must not be negative"),
        ({"orders": "orders.npy", "visits": "raw"}, "cannot be combined"),
        ({"orders": "orders.npy", "later_sweeps": 6}, "fewer than later_sweeps=6"),
        ({"visits": "random"}, "'random' is not a choice"),
    ],
)
def test_settings_without_meaning_are_refused(options, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(NAFI, options, "aggregator")


def test_a_file_with_orders_for_fewer_sweeps_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "orders.npy", visits(1, 4, 3))
    with pytest.raises(ConfigError, match="the wrong shape"):
        PFNM(orders=str(tmp_path / "orders.npy")).check(MLPS["one"], IMAGE)
