"""Tests of the parts of averaging.

They cover trainers' server updates, which receive the applied change, aggregation rules
and plain loops. The plug-ins are those of `tests.reference`. The problem is softmax
regression with full-batch steps. The reference is a loop in numpy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.core import trees
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientResult
from fedexp.core.runner import run
from fedexp.core.trainer import Ctx, RoundStats, ServerUpdate, Trainer
from fedexp.core.trees import Tree, Trees
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.methods.bases.averaging import Collecting
from fedexp.methods.fedavg import Mean, PlainTrainer
from fedexp.methods.feddyn import FedDyn, FedDynServer
from tests.world import MLP, SOFTMAX, World, assert_same, make_data, make_world, resumed

LR, DECAY, TAU, N, M = 0.3, 0.9, 3, 4, 2
FULL_BATCH = (
    f"local.lr={LR}",
    f"local.lr_decay={DECAY}",
    f"local.epochs={TAU}",
    "local.batch_size=100",
)
MOMENTUM = ("trainer._target_=tests.reference.server_momentum.ServerMomentum", "+trainer.alpha=0.3")
MEDIAN = "aggregator._target_=fedexp.methods.median.Median"
NORMALIZED = "aggregator._target_=tests.reference.normalized_mean.NormalizedMean"
DYNAMIC = (
    "trainer=feddyn",
    "trainer.a=0.2",
    "server_optimizer=feddyn",
    "aggregator.weights=uniform",
)


def softmax_world(*overrides: str, rounds: int = 3, m: int = M) -> World:
    data = make_data((20, 12, 20, 12))  # clients of one size are stacked
    return make_world(
        "method=fedavg", *FULL_BATCH, f"rounds={rounds}", *overrides, data=data, model=SOFTMAX, m=m
    )


def gradient(world: World, client: int, w: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy of `client`'s data.

    It is taken at softmax weights (classes, features).
    """
    index = world.data.partition.of(client)
    x, y = world.data.train.x[index].flatten(1).numpy(), world.data.train.y[index].numpy()
    p = np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True)
    return (p - np.eye(3)[y]).T @ x / len(y)


# The arguments are (client, gradient, w - w^t). The result is the subtracted value
# divided by lr.
Local = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def updates(world: World, round: int, w: np.ndarray, local: Local) -> tuple[list[int], np.ndarray]:
    """Return the round's clients and their u_i, with shape (m, classes, features)."""
    clients, moved = world.env.at(round).sample(), []
    for client in clients:
        y = w.copy()
        for _ in range(TAU):
            y = y - LR * DECAY**round * local(client, gradient(world, client, y), y - w)
        moved.append(y - w)
    return clients, np.stack(moved)


def shares(world: World, clients: list[int]) -> np.ndarray:
    sizes = world.data.partition.sizes[clients]
    return sizes / sizes.sum()


def weights_of(world: World, snapshot) -> np.ndarray:
    return world.models(snapshot)[0]["fc.weight"].numpy()


def server_momentum(world: World) -> np.ndarray:
    """Return the weights after three rounds with FedAvgM's step on the server.

    Therefore the applied change differs from the mean update.
    """
    w, m, b = np.zeros((3, 4)), np.zeros((3, 4)), np.zeros((3, 4))
    for round in range(3):
        clients, u = updates(world, round, w, lambda _, g, __, m=m: 0.3 * g - 0.7 * m)
        b = 0.9 * b + np.einsum("i,icf->cf", shares(world, clients), u)
        w, m = w + 0.5 * b, 0.5 * b / (TAU * LR * DECAY**round)
    return w


def dynamic(world: World) -> np.ndarray:
    """Return the weights after three rounds of FedDyn (Acar et al. 2021) with h.

    The updates are
    ``w = mean y_i - h / a``, ``h -= (a / N) sum_i u_i`` and ``g_i -= a u_i``.
    """
    a, w, h, g_i = 0.2, np.zeros((3, 4)), np.zeros((3, 4)), np.zeros((N, 3, 4))
    for round in range(3):
        clients, u = updates(world, round, w, lambda c, g, moved: g - g_i[c] + a * moved)
        for client, moved in zip(clients, u, strict=True):
            g_i[client] -= a * moved
        h -= a / N * u.sum(0)
        w = w + u.mean(0) - h / a
    return w


def median(world: World) -> np.ndarray:
    w = np.zeros((3, 4))
    for round in range(3):
        # The median is the middle one of three values.
        w = w + np.sort(updates(world, round, w, lambda _, g, __: g)[1], 0)[1]
    return w


def normalized_mean(world: World) -> np.ndarray:
    w = np.zeros((3, 4))
    for round in range(3):
        clients, u = updates(world, round, w, lambda _, g, __: g)
        p = shares(world, clients)
        mean = np.einsum("i,icf->cf", p, u)
        w = (
            w
            + mean
            / np.linalg.norm(mean)
            * (p * np.linalg.norm(u.reshape(len(u), -1), axis=1)).sum()
        )
    return w


def results_of(start: Weights, moves: Sequence[torch.Tensor]) -> list[ClientResult]:
    """Return the results of one client per move of ``fc.weight``, all of one size."""
    models = [
        replace(start, params={"fc.weight": start.params["fc.weight"] + move}) for move in moves
    ]
    return [
        ClientResult(c, model, 10, 1, {}, None, {"loss": 0.0}) for c, model in enumerate(models)
    ]


CASES = {
    "server momentum": (
        (*MOMENTUM, "server_optimizer=fedavgm", "server_optimizer.lr=0.5"),
        server_momentum,
        2,
    ),
    "dynamic regularisation": (DYNAMIC, dynamic, 2),
    "median": ((MEDIAN,), median, 3),
    "normalised mean": ((NORMALIZED,), normalized_mean, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_averaging_three_rounds_equal_a_plain_loop(case: str, tmp_path: Path) -> None:
    """Three rounds with partial participation equal a plain loop.

    They run on the serial engine, stacked, and resumed in every round.
    """
    overrides, plain, m = CASES[case]
    world = softmax_world(*overrides, m=m)
    expected, after = plain(world), world.run()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(weights_of(world, after), expected, rtol=1e-9, atol=1e-12)
    engine = Vectorized(stack=m)
    np.testing.assert_allclose(
        weights_of(world, world.run(engine=engine)), expected, rtol=1e-9, atol=1e-12
    )
    assert engine.stacked_steps
    stored = resumed(lambda rounds: softmax_world(*overrides, rounds=rounds, m=m), 3, tmp_path)
    assert_same(world.models(stored), world.models(after))
    for group, tree in after.state["shared"].items():
        assert_same([stored.state["shared"][group]], [tree])


@pytest.mark.parametrize("case", CASES)
def test_any_network_stacked_is_serial(case: str) -> None:
    overrides, _, m = CASES[case]
    world = make_world("method=fedavg", *overrides, "local.batch_size=8", m=m, model=MLP)
    assert_same(
        world.models(world.run(engine=Vectorized(stack=m))), world.models(world.run()), 1e-9
    )


def test_momentum_of_one_part_gradient_is_fedavg() -> None:
    a, b = softmax_world(MOMENTUM[0], "+trainer.alpha=1.0"), softmax_world()
    assert_same(a.models(a.run()), b.models(b.run()))


def test_broadcasts_are_counted_and_nothing_further_is_sent_up() -> None:
    world = softmax_world(*MOMENTUM)
    size = 8 * 12
    for step in run(world.aggregator, world.env, Serial(), world.data):
        assert step.metrics["bytes/down"] == M * 2 * size and step.metrics["bytes/up"] == M * size


@dataclass(frozen=True)
class Watching(PlainTrainer):
    """A trainer whose server update stores all its arguments.

    A client sends its update and the negative update, in an order that depends on the
    client.
    """

    alike: bool = True

    @property
    def payload_weights(self):
        return "uniform" if self.alike else "models"

    def finish(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Trees, Trees | None]:
        u = trees.sub(params, ctx.start)["fc.weight"][None]
        sent = {"u": u, "minus": -u}
        order = sorted(sent, reverse=bool(u[0, 0, 0] > 0))
        return {"sent": {name: sent[name] for name in order}}, None

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        return {"sent": payload_mean["sent"], "mean": update.mean, "applied": update.applied}


@pytest.mark.parametrize("alike", ["true", "false"])
def test_the_server_half_sees_payloads_the_mean_and_what_was_applied(alike: str) -> None:
    watching = ("trainer._target_=tests.methods.test_averaging.Watching", f"+trainer.alike={alike}")
    world = softmax_world(*watching, "server_optimizer.lr=0.5", rounds=1, m=3)
    clients, u = updates(world, 0, np.zeros((3, 4)), lambda _, g, __: g)
    shared = world.run().state["shared"]
    mean = np.einsum("i,icf->cf", shares(world, clients), u)
    np.testing.assert_allclose(shared["mean"]["fc.weight"].numpy(), mean, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(
        shared["applied"]["fc.weight"].numpy(), mean / 2, rtol=1e-10, atol=1e-14
    )
    sent = u.mean(0) if alike == "true" else mean
    for name, expected in (("u", sent), ("minus", -sent)):
        got = shared["sent"][name][0].numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)


@dataclass(frozen=True)
class Counting(PlainTrainer):
    """A trainer that adds new shared tensors on the server: a number and a count."""

    def update_shared(
        self, shared: Trees, payload_mean: Trees, update: ServerUpdate, stats: RoundStats
    ) -> Trees:
        return {"late": {"x": torch.tensor([3.0, 4.0]), "count": torch.tensor(7)}}


def test_what_a_server_half_adds_is_measured_without_its_counts() -> None:
    world = softmax_world(rounds=1)
    world.experiment = replace(world.experiment, trainer=Counting())
    world.env = replace(world.env, trainer=Counting())
    (step,) = run(world.aggregator, world.env, Serial(), world.data)
    assert step.metrics["server/late"] == 5


def test_a_server_half_that_is_not_overridden_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer without a server update costs nothing on the server.

    There is one subtraction per client and none for the applied change. The trainer's
    hook is not called.
    """
    world, calls = softmax_world(rounds=1), []
    original = trees.sub
    monkeypatch.setattr(trees, "sub", lambda *a, **k: calls.append(a) or original(*a, **k))
    monkeypatch.setattr(Trainer, "update_shared", lambda *a: pytest.fail("called"))
    world.run()
    assert len(calls) == M


class Frozen(torch.nn.Module):
    frozen_parameters = ("first.*",)

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.first, self.fc = torch.nn.Linear(4, 4), torch.nn.Linear(4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.first(x.flatten(1)).tanh())


def test_the_server_half_knows_no_frozen_parameters() -> None:
    model = {"_target_": "tests.methods.test_averaging.Frozen"}
    world = make_world("method=fedavg", *MOMENTUM, model=model)
    assert list(world.run().state["shared"]["m"]) == ["fc.weight", "fc.bias"]


CONV = {"_target_": "tests.core.test_kernel.Small"}  # convolution, BatchNorm, dropout


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_median_is_numpys_and_buffers_are_averaged(count: int) -> None:
    world = make_world(
        "method=fedavg", MEDIAN, "rounds=1", data=make_data((20, 12, 17, 9)[:count]), model=CONV
    )
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    after, metrics = world.aggregator.update(state, results, world.env)
    assert metrics == {"clients": count}
    p = world.data.partition.sizes / world.data.partition.sizes.sum()
    for name, old in state["weights"].params.items():
        expected = torch.from_numpy(
            np.median(np.stack([(r.weights.params[name] - old).numpy() for r in results]), 0)
        )
        torch.testing.assert_close(
            after["weights"].params[name], old + expected, rtol=1e-12, atol=1e-14
        )
    for name, value in after["weights"].buffers.items():
        each = [r.weights.buffers[name] for r in results]
        if value.is_floating_point():
            expected = sum(share * one for share, one in zip(p, each, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        else:
            assert value == max(each)


def test_integer_and_boolean_buffers_take_their_maximum() -> None:
    world = softmax_world(rounds=1, m=2)
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))

    def with_buffers(weights: Weights, count: list[int], used: list[bool]) -> Weights:
        buffers = {"count": torch.tensor(count), "used": torch.tensor(used)}
        return Weights(weights.spec, weights.params, buffers)

    old = with_buffers(state["weights"], [0, 7], [False, False])
    results = [
        replace(result, weights=with_buffers(result.weights, count, used))
        for result, count, used in zip(
            results, ([3, 1], [2, 5]), ([True, False], [False, False]), strict=True
        )
    ]
    after, _ = world.aggregator.update({**state, "weights": old}, results, world.env)
    assert after["weights"].buffers["count"].tolist() == [3, 7]
    assert after["weights"].buffers["used"].tolist() == [True, False]
    assert old.buffers["used"].tolist() == [False, False]


def test_buffers_are_averaged_by_name() -> None:
    world = softmax_world(rounds=1, m=2)
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    buffers = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    orders = (buffers, dict(reversed(buffers.items())))
    results = [
        replace(result, weights=Weights(result.weights.spec, result.weights.params, order))
        for result, order in zip(results, orders, strict=True)
    ]
    old = Weights(state["weights"].spec, state["weights"].params, buffers)
    after, _ = world.aggregator.update({**state, "weights": old}, results, world.env)
    assert {name: value.item() for name, value in after["weights"].buffers.items()} == {
        "a": pytest.approx(1.0),
        "b": pytest.approx(2.0),
    }


def test_median_ignores_one_byzantine_client() -> None:
    world = softmax_world(MEDIAN, rounds=1, m=4)
    state = world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    astray = replace(
        results[1],
        weights=replace(results[1].weights, params={"fc.weight": torch.full((3, 4), 1e9).double()}),
    )
    after, _ = world.aggregator.update(state, [results[0], astray, *results[2:]], world.env)
    assert after["weights"].params["fc.weight"].abs().max() < 1


def test_collected_updates_come_normalised_with_weights_that_sum_to_one() -> None:
    seen: list[tuple[list[Tree], list[float]]] = []

    class Seeing(Collecting):
        def merge(self, updates, p):
            seen.append((list(updates), list(p)))
            return updates[0]

        def normalizer(self, result, env):
            return 2.0 + result.client

    world = softmax_world(rounds=1, m=3)
    aggregator, state = Seeing(), world.aggregator.init(world.env)
    results = list(Serial().map(world.aggregator.plan(state, world.env), world.data))
    aggregator.update(state, results, world.env)
    ((collected, p),) = seen
    np.testing.assert_allclose(p, shares(world, [r.client for r in results]), rtol=1e-14)
    for result, update in zip(results, collected, strict=True):
        expected = (result.weights.params["fc.weight"] - state["weights"].params["fc.weight"]) / (
            2 + result.client
        )
        torch.testing.assert_close(update["fc.weight"], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("aggregator", [MEDIAN, NORMALIZED])
def test_other_rules_keep_a_trainers_server_half(aggregator: str) -> None:
    """A trainer's server update also works with other aggregation rules.

    SCAFFOLD's c stays the weighted mean of its c_i for every rule. A server optimizer
    applies the direction in any case.
    """
    overrides = ("trainer=scaffold", "server_optimizer=fedadam", aggregator)
    world = make_world("method=fedavg", *overrides, "rounds=4", m=3)
    after = world.run()
    total = trees.zeros_like(after.state["shared"]["c"])
    for client, memory in after.clients.items():
        total = trees.add(
            total, memory["c_i"], alpha=float(world.env.sizes[client] / world.env.sizes.sum())
        )
    assert_same([after.state["shared"]["c"]], [total], 1e-10)
    assert float(trees.norm(after.state["server"]["b"])) > 0


@pytest.mark.parametrize("aggregator", [MEDIAN, NORMALIZED])
def test_copies_and_one_client_give_the_mean(aggregator: str) -> None:
    for data in (make_data((14,) * 3, copies=True), make_data((14,))):
        overrides = ("method=fedavg", "local.batch_size=100")
        a, b = make_world(*overrides, aggregator, data=data), make_world(*overrides, data=data)
        assert_same(a.models(a.run()), b.models(b.run()), 1e-12)


def test_updates_that_cancel_are_not_blown_up() -> None:
    world = softmax_world(NORMALIZED, rounds=1, m=2)
    state = world.aggregator.init(world.env)
    start = state["weights"]
    results = results_of(start, [torch.full((3, 4), sign).double() for sign in (1.0, -1.0)])
    after, _ = world.aggregator.update(state, results, world.env)
    assert torch.equal(after["weights"].params["fc.weight"], start.params["fc.weight"])


def test_server_optimizers_see_the_updates_as_long_as_they_entered_the_direction() -> None:
    """Server optimizers get updates with the scale that they have in the direction.

    FedExP's ratio does not change if the direction and every update are doubled.
    """

    class Doubled(Mean):
        def factor(self, merged, stats, env):
            return 2.0

    world = softmax_world("server_optimizer=fedexp", "server_optimizer.eps=0.0", rounds=1)
    state = world.aggregator.init(world.env)
    # The moves are orthogonal, so that eta_g is m / 2.
    moves = [torch.eye(12, dtype=torch.float64)[c].reshape(3, 4) for c in range(4)]
    results = results_of(state["weights"], moves)
    (once, a), (twice, b) = (x.update(state, results, world.env) for x in (Mean(), Doubled()))
    assert a["server/eta_g"] == pytest.approx(2.0) and b["server/eta_g"] == pytest.approx(2.0)
    assert_same([twice["weights"].params], [trees.scale(once["weights"].params, 2.0)], 1e-12)


@pytest.mark.parametrize("overrides", [(), ("server_optimizer=fedexp",), ("trainer=scaffold",)])
def test_a_stream_holds_no_update_while_a_client_trains(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update is alive while a client trains.

    At most the last result is alive when the next one is requested.
    """
    alive: list[weakref.ref[torch.Tensor]] = []
    results: list[weakref.ref[torch.Tensor]] = []
    original = trees.sub

    class Looking(Engine):
        def map(self, jobs, data):
            for job in jobs:
                assert not [ref for ref in alive if ref() is not None]
                assert len([ref for ref in results if ref() is not None]) <= 1
                (result,) = Serial().map([job], data)
                alive.clear()  # the differences that the trainer itself computed
                results.append(weakref.ref(result.weights.params["fc.weight"]))
                yield result
                del result

    def sub(*arguments, **options):
        tree = original(*arguments, **options)
        alive.append(weakref.ref(tree["fc.weight"]))
        return tree

    monkeypatch.setattr(trees, "sub", sub)
    softmax_world(*overrides, rounds=2, m=4).run(engine=Looking())
    assert len(results) == 8


def test_feddyn_trainer_demands_the_server_of_its_file() -> None:
    """The trainer of FedDyn demands the server optimizer that is defined beside it."""
    assert any(demand.value is FedDynServer for demand in FedDyn().needs.demands)
