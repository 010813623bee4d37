"""Tests of several rounds of PFNM and NAFI.

They cover the parts of the fused network and stored assignments.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedexp.core.runner import run
from fedexp.engines.serial import Serial
from fedexp.matching.beta_bernoulli import BetaBernoulli, match
from tests.methods.fusion_world import models_of, results_of
from tests.methods.test_pfnm import MLPS, generator, matching, visits
from tests.reference.matching_loops import Constants, matched
from tests.world import assert_same, make_world

WIDE = {"_target_": "fedexp.models.mlp.MLP", "hidden": [6, 5]}


@pytest.mark.parametrize("sweeps", [0, 3])
@pytest.mark.parametrize("strength", [0.0, 0.2])
def test_matching_from_assignments_is_the_loop_forms(sweeps: int, strength: float) -> None:
    """Matching from given assignments equals the loop form.

    Global units are renumbered in their old order. Units that no client has are left
    out.
    """
    rng = generator(3)
    models = [torch.randn(n, 4, generator=rng, dtype=torch.float64) for n in (3, 4, 2)]
    start = [torch.tensor([7, 2, 4]), torch.tensor([2, 9, 3, 7]), torch.tensor([0, 9])]
    q, mu0 = (
        torch.rand(3, 4, generator=rng, dtype=torch.float64) + 0.5,
        torch.full((4,), 0.1).double(),
    )
    orders = visits(1, sweeps, 3)[0]
    options = BetaBernoulli(0.9, 3.0, caps=False, strength=strength)
    found = match(models, q, mu0, options, orders, start)
    expected, mean = matched(
        [m.numpy() for m in models], q.numpy(), mu0.numpy(), Constants(lam=strength), orders, start
    )
    for own, theirs in zip(found.units, expected, strict=True):
        assert own.tolist() == theirs.tolist()
    np.testing.assert_allclose(found.mean.numpy(), mean, rtol=1e-11, atol=1e-12)
    if not sweeps:
        assert [units.tolist() for units in found.units] == [[4, 1, 3], [1, 5, 2, 4], [0, 5]]


@pytest.mark.parametrize("method", ["pfnm", "nafi"])
def test_clients_train_their_parts_and_matching_goes_on_from_them(method: str, monkeypatch) -> None:
    """Clients train their parts, and matching continues from their assignments.

    The parts are those of the network of the last round, with the widths of the
    configuration. An absent client gets the units that most clients have.
    """
    world = make_world(
        f"method={method}", "rounds=3", "init=different", "aggregator.gamma=20", model=WIDE, m=3
    )
    snapshots = [step.after for step in run(world.aggregator, world.env, Serial(), world.data)]
    seen, fuse_chains = [], __import__("fedexp.matching.chains", fromlist=["x"]).fuse_chains
    monkeypatch.setattr(
        "fedexp.methods.pfnm.fuse_chains", lambda *a: seen.append(a[5:]) or fuse_chains(*a)
    )
    absent = 0
    for number, snapshot in enumerate(snapshots[:2], start=1):
        env, state = world.env.at(number), snapshot.state
        fused = state["weights"].params
        assert len(fused["hidden.0.weight"]) > 6 and len(fused["hidden.1.weight"]) > 5
        jobs = world.aggregator.plan(state, env)
        parts = {}
        for job in jobs:
            if job.client in state["cohort"]:
                own = [
                    units[state["cohort"].index(job.client)] for units in state["units"].values()
                ]
            else:
                absent += 1
                own = []
                for units in state["units"].values():
                    counts = units.flatten().tolist()
                    common = sorted(set(counts), key=lambda k, counts=counts: (-counts.count(k), k))
                    own.append(torch.tensor(sorted(common[: units.shape[1]])))
            parts[job.client] = own
            a, b = own
            start = job.start.params
            assert job.start.spec == world.env.server_spec
            expected = {
                "hidden.0.weight": fused["hidden.0.weight"][a],
                "hidden.0.bias": fused["hidden.0.bias"][a],
                "hidden.1.weight": fused["hidden.1.weight"][b][:, a],
                "hidden.1.bias": fused["hidden.1.bias"][b],
                "output.weight": fused["output.weight"][:, b],
                "output.bias": fused["output.bias"],
            }
            assert_same([dict(start)], [expected])
        seen.clear()
        results = list(Serial().map(jobs, world.data))
        world.aggregator.update(state, results, env)
        (orders, begin) = seen[0]
        assert orders.shape == (1, 2, 3, 3)  # three later sweeps
        for layer in range(2):
            assert all(
                torch.equal(units, parts[job.client][layer])
                for units, job in zip(begin[layer], jobs, strict=True)
            )
    assert absent


def test_given_orders_serve_later_rounds_from_their_beginning(tmp_path) -> None:
    orders = visits(1, 5, 4)
    np.save(tmp_path / "orders.npy", orders)
    world = matching(MLPS["one"], "pfnm", orders=str(tmp_path / "orders.npy"), later_sweeps=2)
    assert np.array_equal(world.aggregator._orders(world.env, 4, [0], False)[0], orders)
    assert np.array_equal(world.aggregator._orders(world.env, 4, [0], True)[0], orders[:, :2])


def test_a_round_in_which_everyone_was_skipped_changes_nothing() -> None:
    world = matching(MLPS["two"], "nafi")
    state = world.aggregator.init(world.env)
    assert world.aggregator.update(state, [], world.env) == (state, {"clients": 0})
    after, metrics = world.aggregator.update(
        state, results_of(models_of(MLPS["two"], 3), [[1, 2, 3]] * 3), world.env
    )
    assert metrics["clients"] == 3 and after["cohort"] == [0, 1, 2]
    for name, units in after["units"].items():
        assert sorted(set(units.flatten().tolist())) == list(
            range(len(after["weights"].params[name]))
        )
    assert world.aggregator.update(after, [], world.env.at(1)) == (after, {"clients": 0})


def test_parts_are_cut_from_a_float32_model_without_a_conversion() -> None:
    world = matching(MLPS["one"], "pfnm")
    results = [
        replace(
            r,
            weights=replace(r.weights, params={k: v.float() for k, v in r.weights.params.items()}),
        )
        for r in results_of(models_of(MLPS["one"], 3), [[1, 2, 3]] * 3)
    ]
    state, _ = world.aggregator.update(world.aggregator.init(world.env), results, world.env)
    start = world.aggregator.start_of(1, state, world.env.at(1)).params
    rows = state["units"]["hidden.0.weight"][1]
    assert start["hidden.0.weight"].dtype == torch.float32
    assert torch.equal(start["hidden.0.weight"], state["weights"].params["hidden.0.weight"][rows])
