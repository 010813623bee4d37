"""Tests of sampling, the order of results, policies, and the client cache."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedexp.core.data import POOLED
from fedexp.core.engine import Engine
from fedexp.core.env import Sampling
from fedexp.core.errors import ClientError, FedexpError
from fedexp.core.jobs import ClientJob
from fedexp.core.numerics import Numerics
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.engines.client_cache import ClientCache
from fedexp.engines.serial import Serial
from fedexp.methods.fedavg import Mean
from tests.world import World, assert_same, make_data, make_world

NUMERICS = Numerics({}, 1, "cpu", "float64")


def test_fixed_sampling_is_exact_sorted_and_seeded() -> None:
    draws = [Sampling("fixed", 5).draw(20, 0, r) for r in range(50)]
    assert all(len(set(d)) == 5 and d == sorted(d) for d in draws)
    assert draws == [Sampling("fixed", 5).draw(20, 0, r) for r in range(50)]
    assert draws != [Sampling("fixed", 5).draw(20, 1, r) for r in range(50)]
    assert len({c for d in draws for c in d}) == 20
    assert Sampling("fixed", 20).draw(20, 0, 0) == list(range(20))


def test_bernoulli_sampling_has_its_rate_and_is_never_empty() -> None:
    sizes = [len(Sampling("bernoulli", 2).draw(40, 0, r)) for r in range(2000)]
    assert min(sizes) >= 1
    expected = 2 / (1 - (1 - 2 / 40) ** 40)  # given that at least one client is sampled
    assert np.mean(sizes) == pytest.approx(expected, abs=0.1)


def test_sampling_never_returns_empty_clients() -> None:
    world = make_world("method=fedavg", data=make_data((10, 0, 7)))
    assert world.env.sample() == [0, 2]


class Rearranging(Engine):
    """An engine that yields the results of a step at the wrong positions."""

    def __init__(self, order):
        self.order = order

    def map(self, jobs, data):
        results = list(Serial().map(jobs, data))
        yield from (results[i] for i in self.order)


WRONG_ORDERS = {
    "another order": ([0, 2, 1, 3], "the result of client 1", "the result of client 2"),
    "too few": ([0, 1, 2], "the result of client 3", "no further result"),
    "too many": ([0, 1, 2, 3, 3], "no further result", "the result of client 3"),
}


@pytest.mark.parametrize(("order", "expected", "got"), WRONG_ORDERS.values(), ids=WRONG_ORDERS)
def test_results_that_do_not_fit_the_jobs_are_refused(
    order: list[int], expected: str, got: str
) -> None:
    with pytest.raises(FedexpError, match="do not fit the jobs") as caught:
        make_world("method=fedavg").run(engine=Rearranging(order))
    facts = caught.value.facts
    assert (facts["where"], facts["expected"], facts["got"]) == ("Rearranging.map", expected, got)


def test_client_cache_stores_no_result_of_another_client(tmp_path) -> None:
    world = make_world("method=fedavg", "rounds=1")
    for order, numbers in (([1, 0, 2, 3], []), ([0, 2, 1, 3], [0]), ([0, 1], [0, 1])):
        root = tmp_path / str(order)
        with pytest.raises(FedexpError, match=r"where: +Rearranging.map"):
            world.run(engine=ClientCache(Rearranging(order), root, 1.0, NUMERICS, "code"))
        assert len([*root.glob("*/*.safetensors")]) == len(numbers)

        client_cache = ClientCache(Serial(), root, 1.0, NUMERICS, "code")
        assert_same(world.models(world.run(engine=client_cache)), world.models(world.run()))
        assert client_cache.hits == len(numbers)


class Poison(Engine):
    """An engine whose client 1 returns NaN in one layer."""

    def map(self, jobs, data):
        for result in Serial().map(jobs, data):
            if result.client == 1:
                name = list(result.weights.params)[-1]
                bad = {
                    **result.weights.params,
                    name: torch.full_like(result.weights.params[name], float("nan")),
                }
                yield replace(result, weights=replace(result.weights, params=bad))
            else:
                yield result


def test_runner_with_nan_update_names_client_and_parameter() -> None:
    world = make_world("method=fedavg")
    with pytest.raises(ClientError) as caught:
        world.run(engine=Poison())
    for words in (
        "round 1: client 1",
        "output.bias",
        "12 training samples",
        "lr 0.05",
        "on_nonfinite=skip_client",
    ):
        assert words in str(caught.value)


def test_skipped_client_has_no_part_in_the_round() -> None:
    data = make_data()
    poisoned = make_world("method=scaffold", "rounds=1", data=data)
    after = poisoned.run(engine=Poison(), on_nonfinite="skip_client")
    assert sorted(after.clients) == [0, 2, 3]
    assert all(bool(v.isfinite().all()) for v in after.state["weights"].params.values())


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcm"])
def test_round_with_dropout_is_a_round_of_the_other_clients(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models are those of a run that samples only the clients that stay."""
    overrides = (f"method={method}", "rounds=4", "aggregator.weights=uniform")
    with_dropout = make_world(*overrides, "client_dropout=0.4")
    expected = with_dropout.run()
    stay = [
        [job.client for job in all_jobs(with_dropout, round) if not job.drops_out]
        for round in range(4)
    ]
    assert any(0 < len(clients) < 4 for clients in stay)

    world = make_world(*overrides)
    monkeypatch.setattr(Sampling, "draw", lambda _self, _N, _seed, round: stay[round])
    found = world.run()
    # SCAFFOLD's server divides by the number of all clients, so both runs agree.
    assert_same(world.models(found), with_dropout.models(expected))
    assert sorted(found.clients) == sorted(expected.clients)


def all_jobs(world: World, round: int) -> list[ClientJob]:
    start = world.env.initial_weights()
    env = world.env.at(round)
    return [env.job(client, start, {}) for client in env.sample()]


def test_client_that_drops_out_receives_the_model_and_sends_nothing() -> None:
    world = make_world("method=fedavg", "client_dropout=0.4")
    size = 8 * sum(v.numel() for v in world.env.initial_weights().params.values())
    for step in run(world.aggregator, world.env, Serial(), world.data):
        dropped = [job.client for job in all_jobs(world, step.round) if job.drops_out]
        assert step.metrics.get("dropped_clients", 0) == len(dropped)
        assert step.metrics["bytes/down"] == 4 * size
        assert step.metrics["bytes/up"] == (4 - len(dropped)) * size


def test_round_in_which_all_clients_drop_out_changes_nothing() -> None:
    world = make_world("method=fedavg", "rounds=1", "client_dropout=0.999")
    before = world.aggregator.init(world.env)
    (step,) = run(world.aggregator, world.env, Serial(), world.data)
    assert step.metrics["dropped_clients"] == 4
    assert step.metrics["bytes/up"] == step.metrics["local_steps"] == 0
    assert_same([step.after.state["weights"].params], [before["weights"].params])


def test_dropout_depends_only_on_seed_round_and_client() -> None:
    one, other = (
        make_world(f"method={method}", "client_dropout=0.3") for method in ("fedavg", "scaffold")
    )
    start = one.env.initial_weights()

    def drops(world: World, step: int = 0, **changes: int) -> list[bool]:
        env = replace(world.env, **changes)
        return [
            env.at(round, step).job(client, start, {}).drops_out
            for round in range(100)
            for client in range(20)
        ]

    assert drops(one) == drops(other) == drops(one, step=1) != drops(one, seed=5)
    # The bound is 4 standard deviations of a binomial distribution.
    assert abs(sum(drops(one)) - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5
    assert not one.env.job(POOLED, start, {}).drops_out


class Breaks(Engine):
    def map(self, jobs, data):
        yield from Serial().map([replace(jobs[0], task=None)], data)


def test_a_clients_exception_names_the_client() -> None:
    with pytest.raises(ClientError, match="client 0 failed: AttributeError"):
        make_world("method=fedavg").run(engine=Breaks())


def test_a_rounds_loss_is_the_mean_over_its_samples() -> None:
    world = make_world("method=fedavg", "rounds=1", data=make_data((10, 4, 7)))
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    expected = sum(result.num_examples * result.metrics["loss"] for result in results) / 21
    assert len({r.num_examples for r in results}) > 1
    (step,) = run(world.aggregator, world.env, Serial(), world.data)
    assert step.metrics["train/loss"] == pytest.approx(expected, rel=1e-12)


def test_bytes_and_steps_are_counted() -> None:
    world = make_world("method=scaffold", "rounds=1")
    (step,) = run(world.aggregator, world.env, Serial(), world.data)
    size = 8 * sum(v.numel() for v in world.env.initial_weights().params.values())
    assert step.metrics["bytes/up"] == step.metrics["bytes/down"] == 4 * 2 * size
    assert step.metrics["local_steps"] == 3 + 2 + 3 + 2
    local = make_world("method=local", "rounds=1")
    (step,) = run(local.aggregator, local.env, Serial(), local.data)
    assert step.metrics["bytes/up"] == step.metrics["bytes/down"] == 0


class Counting(Serial):
    trained = 0

    def map(self, jobs, data):
        for result in super().map(jobs, data):
            Counting.trained += 1
            yield result


class Transposing(Serial):
    """An engine that returns tensors in column-major order, like eigenvectors."""

    def map(self, jobs, data):
        def turned(tree):
            return {
                name: value.T.contiguous().T if value.dim() == 2 else value
                for name, value in tree.items()
            }

        for result in super().map(jobs, data):
            yield replace(
                result,
                weights=replace(result.weights, params=turned(result.weights.params)),
                payload={name: turned(tree) for name, tree in result.payload.items()},
                state=result.state and {name: turned(tree) for name, tree in result.state.items()},
                probes={"own": turned(result.weights.params)},
            )


def test_client_results_have_the_memory_layout_of_loaded_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client results have the memory layout of loaded results.

    Otherwise the matrix products of resumed runs would differ in the last bits.
    """
    seen: list[bool] = []
    merge = Mean.update

    def update(self, state, results, env):
        results = list(results)
        for result in results:
            trees = [
                result.weights.params,
                *result.payload.values(),
                *result.state.values(),
                *result.probes.values(),
            ]
            seen.extend(value.is_contiguous() for tree in trees for value in tree.values())
        return merge(self, state, iter(results), env)

    monkeypatch.setattr(Mean, "update", update)
    after = make_world("method=scaffold", "rounds=1").run(engine=Transposing())
    assert len(seen) > 4 and all(seen)
    assert all(
        v.is_contiguous()
        for own in after.clients.values()
        for tree in own.values()
        for v in tree.values()
    )


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
def test_client_cache_gives_the_same_bits_and_only_for_first_rounds(tmp_path, method: str) -> None:
    plain = make_world(f"method={method}")
    expected = plain.run()
    for trained in (3 * 4, 2 * 4):
        Counting.trained = 0
        client_cache = ClientCache(Counting(), tmp_path, 1.0, NUMERICS, "code")
        world = make_world(f"method={method}")
        after = world.run(engine=client_cache)
        assert Counting.trained == trained
        assert_same(world.models(after), plain.models(expected))
        for client, memory in expected.clients.items():
            for name in memory:
                assert_same([after.clients[client][name]], [memory[name]])


@pytest.mark.parametrize("change", [
    "seed=1", "local.lr=0.1", "local.epochs=2", "local.momentum=0.5", "trainer=fedprox", "local.batch_size=4",
])  # fmt: skip
def test_memo_keys_cover_what_decides_the_work(tmp_path, change: str) -> None:
    for overrides in ((), (change,)):
        Counting.trained = 0
        client_cache = ClientCache(Counting(), tmp_path, 1.0, NUMERICS, "code")
        make_world("method=fedavg", "rounds=1", *overrides).run(engine=client_cache)
        assert Counting.trained == 4


@pytest.mark.parametrize("change", [{"numerics": replace(NUMERICS, threads=2)}, {"code": "new"}])
def test_memo_keys_cover_numerics_and_code(tmp_path, change: dict) -> None:
    for changed in ({}, change):
        Counting.trained = 0
        facts = {"numerics": NUMERICS, "code": "code", **changed}
        make_world("method=fedavg", "rounds=1").run(
            engine=ClientCache(Counting(), tmp_path, 1.0, **facts)
        )
        assert Counting.trained == 4


def test_memo_survives_damage_and_keeps_to_its_size(tmp_path) -> None:
    def entries():
        return sorted(tmp_path.glob("*/*.safetensors"))

    world = make_world("method=fedavg", "rounds=1")
    expected = world.models(
        world.run(engine=ClientCache(Serial(), tmp_path, 1.0, NUMERICS, "code"))
    )
    entries()[0].write_bytes(b"damaged")
    client_cache = ClientCache(Serial(), tmp_path, 1.0, NUMERICS, "code")
    assert_same(world.models(world.run(engine=client_cache)), expected)
    assert (client_cache.hits, client_cache.misses) == (3, 1)
    size = entries()[-1].stat().st_size
    world.run(engine=ClientCache(Serial(), tmp_path, 2.5 * size / 1e9, NUMERICS, "code"))
    assert len(entries()) <= 2


def test_memo_says_that_another_run_trains_the_same_clients_and_takes_its_models(tmp_path) -> None:
    """While another run trains the same clients, this run waits and prints a note.

    It continues afterwards and trains nothing.
    """
    world = make_world("method=fedavg", "rounds=1")
    first, second = (ClientCache(Counting(), tmp_path, 1.0, NUMERICS, "code") for _ in range(2))
    started, go_on, noted = threading.Event(), threading.Event(), threading.Event()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        noted.set()

    second.note = note
    Counting.trained = 0

    def train() -> None:
        results = first.map(jobs, world.data)
        next(results)
        started.set()
        assert go_on.wait(60)
        list(results)

    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(train)
        assert started.wait(60)
        mine = threads.submit(lambda: list(second.map(jobs, world.data)))
        told = noted.wait(60)
        go_on.set()
        other.result()
        assert [result.client for result in mine.result()] == [job.client for job in jobs]
    assert told and len(notes) == 1 and "another run: waiting" in notes[0]
    assert Counting.trained == len(jobs) and second.hits == len(jobs)


def test_memo_keys_cover_the_samples_and_not_their_positions(tmp_path) -> None:
    """Equal indices into another pool are different data, so the keys differ.

    Equal samples at other indices have the same key.
    """
    data = make_data()
    other = replace(data, train=replace(data.train, x=data.train.x + 1))
    flipped = torch.arange(len(data.train) - 1, -1, -1)
    moved = replace(
        data,
        train=replace(data.train, x=data.train.x[flipped], y=data.train.y[flipped]),
        partition=replace(data.partition, indices=len(data.train) - 1 - data.partition.indices),
    )
    for pool, trained in ((data, 4), (other, 4), (moved, 0)):
        Counting.trained = 0
        make_world("method=fedavg", "rounds=1", data=pool).run(
            engine=ClientCache(Counting(), tmp_path, 1.0, NUMERICS, "code")
        )
        assert Counting.trained == trained


def test_memo_recalls_stacked_clients_only_as_they_were_stacked(tmp_path) -> None:
    """If a client of a stack is missing in the cache, the whole stack is retrained.

    The result is bit-identical to the result without the cache.
    """
    from fedexp.engines.vectorized import Vectorized

    world = make_world("method=fedavg", "rounds=1", data=make_data((20, 3, 17, 9, 11, 6)))
    expected = world.models(world.run(engine=Vectorized(stack=3)))
    client_cache = ClientCache(Vectorized(stack=3), tmp_path, 1.0, NUMERICS, "code")
    assert_same(world.models(world.run(engine=client_cache)), expected)
    for lost in sorted(tmp_path.glob("*/*.safetensors"))[:2]:
        lost.unlink()
    again = ClientCache(Vectorized(stack=3), tmp_path, 1.0, NUMERICS, "code")
    assert_same(world.models(world.run(engine=again)), expected)
    assert again.misses in (3, 6) and again.hits == 6 - again.misses
