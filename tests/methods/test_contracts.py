"""Contracts that every method in conf/method must satisfy as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.config.folders import conf_dir
from fedexp.core.data import POOLED, FederatedData, Partition
from fedexp.core.engine import Engine
from fedexp.core.env import Env
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.runner import Snapshot, run
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.running.experiment import Experiment
from tests.methods.declared import DECLARED, Exempt, Reduction
from tests.world import MLP, SOFTMAX, Backwards, World, assert_same, make_data, make_world, resumed

# Methods of `declared`. The first test refuses a preset that is not among them.
METHODS = sorted(DECLARED)


def world_of(method: str, *overrides: str, **kwargs: Any) -> World:
    """Return a tiny world of `method`, on data that it can use."""
    data = kwargs.pop("data", None) or data_of(method)
    return make_world(f"method={method}", *DECLARED[method].small, *overrides, data=data, **kwargs)


def data_of(method: str, *sizes: tuple[int, ...], copies: bool = False) -> FederatedData:
    return make_data(*sizes, copies=copies, images=DECLARED[method].images)


def assert_finite(world: World, snapshot: Snapshot) -> None:
    models = [model for model in world.models(snapshot) if model]
    assert models
    assert all(bool(value.isfinite().all()) for model in models for value in model.values())


def test_every_method_declares_its_contracts() -> None:
    """Every method declares its contracts.

    A method that does not have a common property names a reason, and a test of the
    property that it has instead.
    """
    presets = {path.stem for path in (conf_dir() / "method").glob("*.yaml")}
    assert presets - {*METHODS} == set(), "declare these in tests/methods/declared.py"
    assert {*METHODS} - presets == set(), "these have no file in conf/method"
    for name, declared in DECLARED.items():
        for exempt in (declared.reduction, declared.order, declared.copies, declared.descent):
            if isinstance(exempt, Exempt):
                module, _, test = exempt.instead.partition(".")
                assert exempt.why and callable(
                    getattr(import_module(f"tests.methods.{module}"), test, None)
                ), name


@pytest.mark.parametrize("method", METHODS)
def test_method_config_composes_and_has_its_name(method: str) -> None:
    config = compose([f"method={method}"])
    assert config["method"] == method
    assert Experiment.of(config).config.method == method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", ["trainer", "aggregator", "server_optimizer"])
def test_unknown_key_is_refused(method: str, group: str) -> None:
    with pytest.raises(ConfigError, match="unknown key 'no_such_key'"):
        Experiment.of(compose([f"method={method}", f"+{group}.no_such_key=1"]))


VIOLATIONS = {
    "local.optimizer": "adam",
    "local.momentum": "0.9",
    "init": "different",
    "aggregator.weights": "samples",
    "trainer": "sgd",
    "aggregator": "mean",
    "server_optimizer": "sgd",
    "task": "cvae model=cvae",
}


@pytest.mark.parametrize("method", METHODS)
def test_every_demand_is_held_against_the_config(method: str) -> None:
    """A method is refused if the configuration violates one of its demands.

    If a method demands a key that is missing in `VIOLATIONS`, the key must be added
    there.
    """
    for demand in Experiment.of(compose([f"method={method}"])).needs.demands:
        with pytest.raises(ConfigError) as error:
            Experiment.of(
                compose([f"method={method}", *f"{demand.key}={VIOLATIONS[demand.key]}".split()])
            )
        assert error.value.facts["where"] == demand.key and demand.why in error.value.what


@pytest.mark.parametrize("group", ["trainer", "aggregator", "server_optimizer"])
def test_every_key_of_a_plugin_is_commented(group: str) -> None:
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        for above, line in pairwise(lines):
            if line and not line.startswith(("#", "_target_", " ")):
                assert " # " in line or above.startswith("# "), f"{path}: {line}"


@pytest.mark.parametrize(
    "engine", [Serial, partial(Vectorized, kernel="vmap")], ids=["serial", "vectorized"]
)
@pytest.mark.parametrize(
    "method", [m for m in METHODS if isinstance(DECLARED[m].reduction, Reduction)]
)
def test_reduces_to_fedavg(method: str, engine: Callable[[], Engine]) -> None:
    """A method reduces to FedAvg as declared.

    All clients have one size, so that they are stacked.
    """
    declared = DECLARED[method].reduction
    data = data_of(method, (12,) * 4)
    special, plain = (
        world_of(method, *declared.overrides, data=data),
        make_world("method=fedavg", *declared.against, data=data),
    )
    trained, reference = engine(), engine()
    models = special.models(special.run(engine=trained))
    assert_same(models, plain.models(plain.run(engine=reference)), declared.tolerance)
    stacked = [each.stacked_steps > 0 for each in (trained, reference)]
    assert stacked == [not isinstance(trained, Serial)] * 2


@pytest.mark.parametrize("method", METHODS)
def test_identical_clients_agree_with_one(method: str) -> None:
    """Clients with identical data agree with one client for full batches.

    The comparison uses one client, or the fewest clients that the method needs.
    Exemptions have a reason. A method with an exemption must not agree.
    """
    overrides = ("local.batch_size=100", "local.epochs=2")
    many = world_of(method, *overrides, data=data_of(method, (14,) * 4, copies=True))
    one = world_of(
        method, *overrides, data=data_of(method, (14,) * DECLARED[method].fewest, copies=True)
    )
    single = one.models(one.run())[0]
    models = many.models(many.run())
    with pytest.raises(AssertionError) if DECLARED[method].copies else nullcontext():
        for model in models:
            assert_same([model], [single], 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_client_order_does_not_matter(method: str) -> None:
    """For full batches, the order of clients does not matter up to rounding of a sum.

    Exemptions have a reason. A method with an exemption must depend on the order.
    """
    overrides = ("local.batch_size=100", "local.epochs=2")
    data = data_of(method)
    order = [2, 0, 3, 1]
    shuffled = replace(data, partition=Partition.from_lists([data.partition.of(c) for c in order]))
    a, b = world_of(method, *overrides, data=data), world_of(method, *overrides, data=shuffled)
    models_a, models_b = a.models(a.run()), b.models(b.run())
    if len(models_a) > 1:
        models_a = [models_a[c] for c in order]
    with pytest.raises(AssertionError) if DECLARED[method].order else nullcontext():
        assert_same(models_a, models_b, 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_execution_order_and_workers_do_not_change_bits(method: str) -> None:
    a, b = world_of(method, m=3), world_of(method, m=3)
    assert_same(a.models(a.run()), b.models(b.run(engine=Backwards())))


@pytest.mark.parametrize("method", METHODS)
def test_method_resumed_from_disk_equals_an_uninterrupted_run(method: str, tmp_path: Path) -> None:
    """A run that is resumed in every round equals an uninterrupted run.

    Every round is stored, and a new aggregator loads it.
    """
    straight = world_of(method, "rounds=4", m=3)
    expected = straight.run()
    snapshot = resumed(lambda rounds: world_of(method, f"rounds={rounds}", m=3), 4, tmp_path)
    assert snapshot.step == expected.step
    assert_same(straight.models(snapshot), straight.models(expected))
    assert sorted(snapshot.clients) == sorted(expected.clients)
    for client, memory in expected.clients.items():
        for name, tree in memory.items():
            assert_same([snapshot.clients[client][name]], [tree])


@pytest.mark.parametrize("method", METHODS)
def test_empty_and_single_sample_clients_leave_finite_models(method: str) -> None:
    world = world_of(method, data=data_of(method, (10, 0, 1, 7)))
    assert_finite(world, world.run())


@pytest.mark.parametrize("method", METHODS)
def test_clients_drop_out(method: str) -> None:
    """A run ends with finite models if clients drop out, or all clients of a round.

    Clients that drop out have no part in the method's state. Here, all four clients
    drop out in rounds 0 and 2, and some in round 1.
    """
    world = world_of(method, "client_dropout=0.72")
    rounds: dict[int, list[float]] = {}
    trained: set[int] = set()

    class Engine(Serial):
        def map(
            self, jobs: Sequence[ClientJob], data: FederatedData
        ) -> Generator[ClientResult, None, None]:
            trained.update(job.client for job in jobs)
            yield from super().map(jobs, data)

    for step in run(world.aggregator, world.env, Engine(), world.data):
        rounds.setdefault(step.round, []).append(step.metrics.get("dropped_clients", 0))
        last = step.after

    assert set(last.clients) <= trained
    assert_finite(world, last)
    if trained != {POOLED}:
        first, second, third = (max(rounds[round]) for round in range(3))
        assert first == third == world.env.num_clients > second > 0


@pytest.mark.parametrize("method", METHODS)
def test_clients_make_different_numbers_of_passes(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends with finite models if the clients do unequal work.

    The engine gets the numbers of epochs that `Env.job` drew, and the clients do this
    work.
    """
    world = world_of(
        method, "local.steps=null", "local.epochs=4", "local.epochs_min=1", "limit.steps=null"
    )
    planned: dict[tuple[int, int, int], int | None] = {}
    original = Env.job

    def job(env: Env, client: int, *arguments: Any, **named: Any) -> ClientJob:
        made = original(env, client, *arguments, **named)
        planned[env.round, env.step, client] = made.local_training.epochs
        return made

    monkeypatch.setattr(Env, "job", job)

    class Engine(Serial):
        def map(
            self, jobs: Sequence[ClientJob], data: FederatedData
        ) -> Generator[ClientResult, None, None]:
            for job, result in zip(jobs, super().map(jobs, data), strict=True):
                if not job.trained:
                    epochs = job.local_training.epochs
                    assert epochs == planned[job.round, job.step, job.client]
                    batches = -(-data.partition.size(job.client) // job.local_training.batch_size)
                    assert result.num_steps == batches * (epochs or 0)
                yield result

    for step in run(world.aggregator, world.env, Engine(), world.data):
        last = step.after
    assert_finite(world, last)
    if any(client != POOLED for *_, client in planned):
        assert len({epochs for (_, step, _), epochs in planned.items() if step == 0}) > 1


class Enormous(Serial):
    """An engine whose clients return finite weights with infinite squares.

    Steps that are far too long have this result.
    """

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        for result in super().map(jobs, data):
            params = {name: value * 1e250 for name, value in result.weights.params.items()}
            yield replace(result, weights=replace(result.weights, params=params))


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_overflow_end_in_words_or_not_at_all(method: str) -> None:
    world = world_of(method, "rounds=1")
    with suppress(FedexpError):
        world.run(engine=Enormous())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [MLP, SOFTMAX], ids=["mlp", "softmax"])
def test_training_lowers_the_loss(method: str, model: dict) -> None:
    world = world_of(method, "rounds=8", "local.lr=0.1", model=model)
    steps = run(world.aggregator, world.env, Serial(), world.data)
    losses = [step.metrics["train/loss"] for step in steps if "train/loss" in step.metrics]
    with pytest.raises(AssertionError) if DECLARED[method].descent else nullcontext():
        assert losses[-1] < losses[0]
