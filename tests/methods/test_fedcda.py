"""Tests of FedCDA.

The selection is compared with all combinations, and the rounds with a separate
implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientResult
from fedexp.core.runner import Snapshot, next_jobs, run
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from fedexp.methods.fedcda import CacheEntry, FedCDA, Selection, products
from fedexp.running.experiment import Experiment
from fedexp.storage.stored_weights import FileBackedModelStore
from fedexp.storage.tensors import TensorStore
from tests.world import CPU, World, assert_same, make_data, make_world, resumed

# The network has BatchNorm, so that it has floating-point buffers and a counter.
NORMALISED = {"_target_": "tests.engines.plugins.Normalised"}
# The steps are so large that older models are better.
NEWEST_LAST = ("aggregator.L=0.0", "local.lr=0.4", "local.batch_size=4")


def objective(vectors: Sequence[np.ndarray], losses: Sequence[float], L: float) -> float:
    """Return the objective of Eq. 6 by its formula."""
    mean = sum(vectors) / len(vectors)
    spread = sum(float((v - mean) @ (v - mean)) for v in vectors)
    return (sum(losses) + L / 2 * spread) / len(vectors)


class Instance:
    """Random candidate models around one far point.

    There are `sizes` models per client, and `fixed` more models whose choice is fixed.
    """

    def __init__(
        self, seed: int, sizes: Sequence[int], fixed: int, D: int = 7, L: float = 1.0
    ) -> None:
        rng = np.random.default_rng(seed)
        self.L, self.sizes = L, tuple(sizes)
        far = 30 * rng.normal(size=D)
        self.owners = [far + rng.normal(size=D) * 0.5 + rng.normal(size=(k, D)) for k in sizes]
        self.losses = [rng.random(k) * 3 for k in sizes]
        self.rest, self.rest_losses = (
            list(far + rng.normal(size=(fixed, D))),
            list(rng.random(fixed)),
        )
        self.centre = far + rng.normal(size=D)

    def tree(self, vector: np.ndarray) -> dict[str, torch.Tensor]:
        whole = torch.from_numpy(vector)
        return {"a": whole[:3].reshape(1, 3).clone(), "b": whole[3:].clone()}

    def problem(self, centre: np.ndarray | None = None) -> Selection:
        at = self.centre if centre is None else centre
        return Selection(
            products(
                [self.tree(v).__getitem__ for owner in self.owners for v in owner],
                self.tree(at),
                self.tree(sum(self.rest, np.zeros(len(at)))),
                len(self.rest),
            ),
            np.concatenate(self.losses),
            self.sizes,
            len(self.rest),
            float(sum(self.rest_losses)),
            float(sum(v @ v for v in self.rest)),
            self.L,
        )

    def value(self, picks: dict[int, int]) -> float:
        vectors = [*self.rest, *(self.owners[i][k] for i, k in picks.items())]
        return objective(
            vectors, [*self.rest_losses, *(self.losses[i][k] for i, k in picks.items())], self.L
        )

    def by_loops(self, groups: Sequence[Sequence[int]]) -> dict[int, int]:
        """Choose the models by Eq. 8, on true vectors.

        A group is chosen without the groups after it.
        """
        picks: dict[int, int] = {}
        for group in groups:
            every = itertools.product(*(range(self.sizes[i]) for i in group))
            picks = min(
                ({**picks, **dict(zip(group, each, strict=True))} for each in every), key=self.value
            )
        return picks


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3]], [[2, 0], [3], [1]], [[3], [1], [0], [2]]], ids=["1", "3", "m"]
)
@pytest.mark.parametrize("fixed", [0, 3])
def test_the_selection_is_brute_force_over_true_vectors(
    groups: list[list[int]], fixed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block holds two numbers per row.
    monkeypatch.setattr("fedexp.methods.fedcda.BLOCK_BYTES", 8 * 2 * 14)
    moved = 0
    for seed in range(12):
        instance = Instance(seed, (3, 1, 2, 3), fixed, L=(0.3, 1.0, 5.0)[seed % 3])
        problem, expected = instance.problem(), instance.by_loops(groups)
        picks = problem.choose([np.array(group) for group in groups])
        assert picks == [expected[i] for i in range(4)]
        assert problem.objective(picks) == pytest.approx(instance.value(expected), rel=1e-9)
        assert problem.objective([0] * 4) == pytest.approx(
            instance.value(dict.fromkeys(range(4), 0)), rel=1e-9
        )
        moved += any(picks)
    assert moved > 6


def test_the_optimum_is_below_every_other_choice_and_knows_no_centre() -> None:
    for seed in range(5):
        instance = Instance(seed, (2, 3, 2), 2)
        problem = instance.problem()
        best = problem.choose([np.arange(3)])
        elsewhere = instance.problem(centre=np.zeros(7))
        assert elsewhere.choose([np.arange(3)]) == best
        assert elsewhere.objective(best) == pytest.approx(problem.objective(best), rel=1e-9)
        for picks in itertools.product(range(2), range(3), range(2)):
            assert problem.objective(best) <= problem.objective(picks) + 1e-9


def test_equal_choices_go_to_the_newest() -> None:
    """If all entries of a client are equal, the client gets the newest entry."""
    instance = Instance(0, (2, 2), 1)
    for owner, losses in zip(instance.owners, instance.losses, strict=True):
        owner[:], losses[:] = np.round(owner[0]), losses[0]
    instance.centre = np.round(instance.centre)  # rounding makes the products exact
    assert instance.problem().choose([np.array([0, 1])]) == [0, 0]


def test_equal_choices_go_to_the_newest_with_weights() -> None:
    """A single client's J does not depend on its model if its losses are equal."""
    for seed in range(50):
        instance = Instance(seed, (5,), 0)
        alone = replace(instance.problem(), losses=np.zeros(5), weights=(9,))
        assert alone.choose([np.array([0])]) == [0]


def test_with_l_zero_everyone_takes_the_lowest_loss() -> None:
    for seed in range(4):
        instance = Instance(seed, (3, 3, 3), 2, L=0.0)
        expected = [int(losses.argmin()) for losses in instance.losses]
        assert (
            any(expected)
            and instance.problem().choose([np.array([1]), np.array([0, 2])]) == expected
        )


def after_each_round(world: World) -> list[tuple[Snapshot, list[ClientResult], dict[str, float]]]:
    """Return the snapshot after each round, the round's results and the metrics."""
    now, found = Snapshot(0, world.aggregator.init(world.env)), []
    for step in run(world.aggregator, world.env, Serial(), world.data, now):
        sent = list(Serial().map(next_jobs(world.aggregator, world.env, now), world.data))
        found.append((now := step.after, sent, step.metrics))
    return found


def vector(tree: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([value.numpy().ravel() for value in tree.values()])


@pytest.mark.parametrize("unseen", ["left_out", "initial"])
@pytest.mark.parametrize("loss_term", ["true", "false"])
def test_rounds_are_those_written_out(unseen: str, loss_term: str) -> None:
    """The rounds equal those of a separate implementation.

    The reference works on true vectors. It has FIFO caches, a warm-up, fixed choices,
    the mean over all clients seen, and BatchNorm's statistics.
    """
    world = make_world(
        "method=fedcda",
        "aggregator.strategy=optimal",
        "aggregator.K=2",
        "aggregator.warm_up=2",
        f"aggregator.unseen={unseen}",
        f"aggregator.loss_term={loss_term}",
        "aggregator.L=0.3",
        "local.lr=0.3",
        "rounds=9",
        data=make_data((20, 12, 0, 17, 9, 8)),
        model=NORMALISED,
        m=3,
    )
    start: Weights = world.aggregator.init(world.env)["weights"]
    Own = tuple[np.ndarray, np.ndarray, float]  # parameters, running statistics, loss

    def of(weights: Weights, loss: float = 0.0) -> Own:
        return (
            vector(weights.params),
            vector({k: v for k, v in weights.buffers.items() if "running" in k}),
            loss,
        )

    cached: dict[int, list[Own]] = {}
    chosen: dict[int, Own] = (
        dict.fromkeys((0, 1, 3, 4, 5), of(start)) if unseen == "initial" else {}
    )
    older = 0
    for number, (after, sent, metrics) in enumerate(after_each_round(world)):
        clients = [result.client for result in sent]
        for result in sent:
            own = of(
                result.weights, result.metrics["loss_last_epoch"] if loss_term == "true" else 0.0
            )
            cached[result.client] = [own, *cached.get(result.client, [])][:2]
        rest = [own for client, own in chosen.items() if client not in clients]

        def value(picks: Sequence[Own], rest: Sequence[Own] = tuple(rest)) -> float:
            every = [*rest, *picks]
            return objective([own[0] for own in every], [own[2] for own in every], 0.3)

        newest = [cached[client][0] for client in clients]
        if number < 2:
            best = newest
            samples = np.array([result.num_examples for result in sent]) / sum(
                r.num_examples for r in sent
            )
            params, buffers = (
                sum(p * own[i] for p, own in zip(samples, best, strict=True)) for i in (0, 1)
            )
        else:
            best = list(min(itertools.product(*(cached[client] for client in clients)), key=value))
            params, buffers = (
                sum(own[i] for own in [*rest, *best]) / len([*rest, *best]) for i in (0, 1)
            )
            assert metrics["selection/J"] == pytest.approx(value(best), rel=1e-8, abs=1e-10)
            assert metrics["selection/J_newest"] == pytest.approx(
                value(newest), rel=1e-8, abs=1e-10
            )
            assert metrics["selection/J"] <= metrics["selection/J_random"] + 1e-12
            share = sum(a is not b for a, b in zip(best, newest, strict=True)) / len(best)
            assert metrics["selection/older"] == pytest.approx(share)
            assert metrics["selection/models"] == len([*rest, *best])
            older += share > 0
        chosen |= dict(zip(clients, best, strict=True))
        now: Weights = after.state["weights"]
        np.testing.assert_allclose(vector(now.params), params, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(of(now)[1], buffers, rtol=1e-9, atol=1e-12)
    assert older


def test_one_model_a_client_with_everyone_is_fedavg() -> None:
    alone = make_world("method=fedcda", "aggregator.K=1", "aggregator.warm_up=0")
    newest = make_world("method=fedcda", "aggregator.strategy=newest", "aggregator.warm_up=0")
    plain = make_world("method=fedavg", "aggregator.weights=uniform")
    expected = plain.models(plain.run())
    assert_same(alone.models(alone.run()), expected)
    assert_same(newest.models(newest.run()), expected)


def test_one_model_a_client_is_the_newest_and_one_group_is_the_optimum() -> None:
    def models(*overrides: str, m: int = 4) -> list[dict[str, torch.Tensor]]:
        large = ("local.lr=0.4", "local.batch_size=4")  # so that clients can disagree
        world = make_world(
            "method=fedcda", "aggregator.warm_up=1", "rounds=6", *large, *overrides, m=m
        )
        return world.models(world.run())

    assert_same(models("aggregator.K=1", m=3), models("aggregator.strategy=newest", m=3))
    optimal = models("aggregator.strategy=optimal")
    assert_same(models("aggregator.B=1"), optimal)
    for other in ("aggregator.B=2", "aggregator.strategy=random", "aggregator.strategy=newest"):
        with pytest.raises(AssertionError):
            assert_same(models(other), optimal)


def test_random_draws_all_entries_alike() -> None:
    world = make_world(
        "method=fedcda",
        "aggregator.strategy=random",
        "aggregator.warm_up=0",
        "rounds=25",
        "local.steps=1",
    )
    counts = np.zeros(3)
    for after, _, _ in after_each_round(world)[3:]:
        for cache in after.state["caches"].values():
            counts[cache["chosen"]] += 1
    assert counts.min() > 0.2 * counts.sum()


def test_the_trainers_half_goes_on_after_the_warm_up() -> None:
    """The trainer's server update continues after the warm-up.

    SCAFFOLD's c stays the mean of the clients' c_i.
    """
    world = make_world(
        "method=fedcda", "trainer=scaffold", "aggregator.weights=uniform", "aggregator.B=2", m=2
    )
    after = world.run()
    total = sum(vector(own["c_i"]) for own in after.clients.values()) / world.env.num_clients
    np.testing.assert_allclose(vector(after.state["shared"]["c"]), total, atol=1e-12)


def test_resumed_and_kept_on_disk_are_straight_where_older_models_are_chosen(
    tmp_path: Path,
) -> None:
    overrides = ("method=fedcda", "aggregator.warm_up=1", "rounds=5", *NEWEST_LAST)
    straight = make_world(*overrides, m=3)
    expected = straight.run()

    def picked(snapshot: Snapshot) -> list[int]:
        return [cache["chosen"] for cache in snapshot.state["caches"].values()]

    assert any(picked(expected))
    again = resumed(lambda _: make_world(*overrides, m=3), 5, tmp_path / "resumed")
    on_disk = make_world(*overrides, m=3)
    store = FileBackedModelStore(TensorStore(tmp_path / "kept"), CPU, lambda: 0.0)
    on_disk.env = replace(on_disk.env, models=store)
    for other in (again, on_disk.run()):
        assert picked(other) == picked(expected)
        assert_same(straight.models(other), straight.models(expected))
        assert_same([other.state["sum"]], [expected.state["sum"]])


def test_weighted_selection_counts_a_client_as_often_as_its_weight() -> None:
    """Weighted selection counts a client as often as its weight.

    A client with weight n counts as n equal clients that choose together.
    """
    weights, moved = (3, 1, 2), 0
    for seed in range(12):
        instance = Instance(seed, (3, 2, 3), 2, L=(0.3, 1.0, 5.0)[seed % 3])
        problem = replace(instance.problem(), weights=weights)

        def value(picks: Sequence[int], instance: Instance = instance) -> float:
            copies = [pair for n, pair in enumerate(enumerate(picks)) for _ in range(weights[n])]
            return objective(
                [*instance.rest, *(instance.owners[i][k] for i, k in copies)],
                [*instance.rest_losses, *(instance.losses[i][k] for i, k in copies)],
                instance.L,
            )

        best = min(itertools.product(range(3), range(2), range(3)), key=value)
        assert problem.choose([np.arange(3)]) == list(best)
        assert problem.objective(best) == pytest.approx(value(best), rel=1e-9)
        moved += list(best) != instance.problem().choose([np.arange(3)])
    assert moved


@pytest.mark.parametrize("unseen", ["left_out", "initial"])
def test_chosen_models_are_weighted_by_samples(unseen: str) -> None:
    world = make_world(
        "method=fedcda",
        "aggregator.chosen_weights=samples",
        "aggregator.warm_up=1",
        f"aggregator.unseen={unseen}",
        "rounds=5",
        *NEWEST_LAST,
        "aggregator.L=0.3",
        data=make_data((20, 12, 0, 17, 9, 8)),
        m=3,
    )
    for number, (after, _, metrics) in enumerate(after_each_round(world)):
        caches = after.state["caches"].items()
        sizes = np.array([world.env.sizes[int(client)] for client, _ in caches])
        chosen = [cache["entries"][cache["chosen"]] for _, cache in caches]
        vectors = np.array([vector(entry["model"].load().params) for entry in chosen])

        total = vector({k: v for k, v in after.state["sum"].items() if k.startswith("params/")})
        np.testing.assert_allclose(total, sizes @ vectors, rtol=1e-9)
        if number:
            q = sizes / sizes.sum()
            now = vector(after.state["weights"].params)
            np.testing.assert_allclose(now, q @ vectors, rtol=1e-9)
            spread = ((vectors - now) ** 2).sum(1)
            J = q @ (np.array([entry["loss"] for entry in chosen]) + 0.3 / 2 * spread)
            assert metrics["selection/J"] == pytest.approx(J, rel=1e-9)


def test_newest_models_of_everyone_weighted_by_samples_are_fedavg() -> None:
    weighted = make_world(
        "method=fedcda",
        "aggregator.strategy=newest",
        "aggregator.warm_up=0",
        "aggregator.chosen_weights=samples",
    )
    plain = make_world("method=fedavg")
    for one, other in zip(weighted.models(weighted.run()), plain.models(plain.run()), strict=True):
        np.testing.assert_allclose(vector(one), vector(other), rtol=1e-9, atol=1e-12)


def test_random_over_all_chooses_for_clients_at_rest_too() -> None:
    overrides = ("method=fedcda", "aggregator.strategy=random", "aggregator.warm_up=3", "rounds=9")
    world = make_world(*overrides, "aggregator.random_over=all", m=2)
    chosen: dict[str, int] = {}
    moved_at_rest = 0
    for number, (after, sent, metrics) in enumerate(after_each_round(world)):
        caches = after.state["caches"]
        sent_now = {str(result.client) for result in sent}
        now = {client: cache["chosen"] for client, cache in caches.items()}
        at_rest = [client for client in chosen if client not in sent_now]
        moved = sum(now[client] != chosen[client] for client in at_rest)
        assert number >= 3 or not moved
        moved_at_rest += moved
        chosen = now
        if number >= 3:
            models = [
                cache["entries"][cache["chosen"]]["model"].load() for cache in caches.values()
            ]
            mean = sum(vector(model.params) for model in models) / len(models)
            np.testing.assert_allclose(vector(after.state["weights"].params), mean, rtol=1e-9)
            assert metrics["selection/models"] == len(models)
    assert moved_at_rest

    # If all clients take part, no client rests.
    everyone = [
        make_world(*overrides, f"aggregator.random_over={clients}")
        for clients in ("all", "participants")
    ]
    all_, participants = (one.models(one.run()) for one in everyone)
    assert_same(all_, participants)


def test_loss_sum_is_the_mean_times_the_samples() -> None:
    overrides = ("method=fedcda", "aggregator.warm_up=1", "rounds=6", "local.lr=0.4")
    world = make_world(*overrides, "aggregator.loss_reduction=sum")
    for after, sent, _ in after_each_round(world):
        for result in sent:
            newest = after.state["caches"][str(result.client)]["entries"][0]
            expected = result.num_examples * result.metrics["loss_last_epoch"]
            assert newest["loss"] == pytest.approx(expected, rel=1e-12)

    # All clients have 12 samples. With sums of losses, J is 12 times as large as with
    # means of losses and L / 12.
    equal = make_data((12, 12, 12, 12))
    by_sum = make_world(
        *overrides, "aggregator.loss_reduction=sum", "aggregator.L=12.0", data=equal
    )
    by_mean = make_world(*overrides, "aggregator.L=1.0", data=equal)
    rounds = [after_each_round(one) for one in (by_sum, by_mean)]
    for (after, _, metrics), (expected, _, expected_metrics) in zip(*rounds, strict=True):
        assert_same([after.state["weights"].params], [expected.state["weights"].params])
        if "selection/J" in metrics:
            assert metrics["selection/J"] == pytest.approx(12 * expected_metrics["selection/J"])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        Experiment.of(compose(["method=fedcda", "rounds=3", *overrides]))
    return str(error.value)


def test_what_cannot_be_is_refused_before_training() -> None:
    assert "at least 1, got 0" in refusal("aggregator.K=0")
    assert "at least 1, got 0" in refusal("aggregator.B=0")
    assert "L must not be negative" in refusal("aggregator.L=-1.0")
    assert "no criterion to choose by" in refusal("aggregator.L=0.0", "aggregator.loss_term=false")
    assert "needs strategy=random" in refusal("aggregator.random_over=all")
    assert "needs loss_term=true" in refusal(
        "aggregator.loss_reduction=sum", "aggregator.loss_term=false"
    )
    assert "not a choice" in refusal("aggregator.strategy=oldest")
    assert "at most 1.0" in refusal("aggregator.warm_up=1.5")
    longer = refusal("aggregator.warm_up=4")
    assert "longer than the run" in longer and "rounds=3" in longer
    groups = refusal("aggregator.B=3", "clients_per_round=0.2")
    assert "more groups than participants" in groups and "at most 2" in groups
    assert "3^20 combinations" in refusal("aggregator.strategy=optimal", "clients=20")
    assert "3^17 combinations" in refusal("aggregator.B=1", "clients=20", "clients_per_round=17")
    coins = ("sampling=bernoulli", "clients_per_round=10")  # all clients may take part
    assert "sampling=fixed, which bounds" in refusal("aggregator.B=1", "clients=20", *coins)
    many = ("clients=40", "clients_per_round=40", "aggregator.B=20")
    assert "limit.server_steps, which reduces 20 groups to 1" in refusal(
        *many, "limit.server_steps=1"
    )
    # A smoke variant has fewer groups too.
    small = ["method=fedcda", "clients_per_round=2", "limit.server_steps=2"]
    assert Experiment.of(compose(small)).extent.clients == 10


def test_models_without_a_loss_are_refused_where_it_counts() -> None:
    world = make_world("method=fedcda", "aggregator.warm_up=0")
    state = world.aggregator.init(world.env)
    result = ClientResult(0, state["weights"], 5, 1, {}, None, {})
    with pytest.raises(ConfigError, match="without their training loss"):
        world.aggregator.update(state, [result], world.env)
    without = make_world("method=fedcda", "aggregator.warm_up=0", "aggregator.loss_term=false")
    entry: CacheEntry = without.aggregator.update(state, [result], without.env)[0]["caches"]["0"][
        "entries"
    ][0]
    assert entry["loss"] == 0.0 and isinstance(without.aggregator, FedCDA)


def test_loss_of_a_stored_model_is_that_of_its_last_epoch() -> None:
    """The loss of a stored model is the loss of its last epoch.

    F_i is the loss of the trained model. The losses of earlier epochs belong to other
    models.
    """
    world = make_world("method=fedcda", "local.epochs=3", "local.lr=0.2", "rounds=1")
    state = world.aggregator.init(world.env)
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, state))
    results = list(Serial().map(jobs, world.data))
    caches = world.aggregator.update(state, results, world.env)[0]["caches"]
    for result in results:
        (entry,) = caches[str(result.client)]["entries"]
        assert entry["loss"] == result.metrics["loss_last_epoch"]
        assert entry["loss"] < result.metrics["loss"]


def test_a_server_optimizer_has_an_effect_only_in_the_warm_up() -> None:
    fedadam = ["method=fedcda", "server_optimizer=fedadam"]
    Experiment.of(compose(fedadam))
    with pytest.raises(ConfigError, match="server optimizer has no effect"):
        Experiment.of(compose([*fedadam, "aggregator.warm_up=0"]))
    with pytest.raises(ConfigError, match="server optimizer has no effect"):
        Experiment.of(compose([*fedadam, "rounds=4", "aggregator.warm_up=0.1"]))  # no round
