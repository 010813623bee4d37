"""Git Re-Basin finds planted permutations, and its inner product never falls."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.weights import Weights
from fedexp.matching.alignment import movable
from fedexp.matching.structure import same_function, structure_of
from fedexp.matching.weight_matching import (
    FoundPermutations,
    WeightMatching,
    inner_product,
    match_many,
    match_pair,
)
from fedexp.running.experiment import Experiment
from tests.matching.nets import IMAGE, MODELS, spec_of, weights_of
from tests.methods.fusion_world import (
    average_of_units_that_stay,
    fused,
    models_of,
    results_of,
    tensors,
    world_of,
)
from tests.world import assert_same

HIDDEN = [name for name in MODELS if name != "linear"]
NETS = ["mlp", "cnn", "resnet, BatchNorm", "concatenated", "gated"]
WIDE = {
    "mlp": spec_of("fedexp.models.mlp.MLP", hidden=[16, 24]),
    "cnn": spec_of("fedexp.models.cnn.ConvNet", channels=[8, 10], kernel=3, hidden=[12]),
}


def product(model: Weights, reference: Weights) -> float:
    return float(sum((model.params[name] * reference.params[name]).sum() for name in model.params))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["linear", *NETS])
def test_copies_give_the_model(name: str, count: int) -> None:
    model = models_of(MODELS[name], 1)[0]
    world = world_of(MODELS[name], "method=git_rebasin")
    assert_same(tensors(fused(world, [model] * count)), tensors(model), 1e-14)


def test_one_model_is_returned_as_it_is() -> None:
    model = weights_of(MODELS["cnn"], 0)
    assert_same(
        tensors(fused(world_of(MODELS["cnn"], "method=git_rebasin"), [model])), tensors(model)
    )


@pytest.mark.parametrize("name", HIDDEN)
def test_a_permuted_copy_is_recovered(name: str) -> None:
    structure, model = structure_of(MODELS[name], IMAGE), weights_of(MODELS[name], 0)
    for seed in range(5):
        shuffle = structure.random(seed)
        copy = structure.permute_weights(model, shuffle)
        maps = match_pair(
            copy.params, model.params, structure, structure.groups, WeightMatching(), seed
        ).maps[0]
        assert_same([maps], [{group: order.argsort() for group, order in shuffle.items()}])


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("name", WIDE)
def test_many_permuted_copies_are_recovered(name: str, count: int) -> None:
    """Many permuted copies are recovered for every seed if units are well separated.

    The first model does not change.
    """
    spec = WIDE[name]
    structure, model = structure_of(spec, IMAGE), weights_of(spec, 0)
    for seed in range(8):
        copies = [
            model,
            *(
                structure.permute_weights(model, structure.random(9 * seed + i))
                for i in range(1, count)
            ),
        ]
        found = match_many(
            [c.params for c in copies], structure, structure.groups, WeightMatching(), seed
        )
        assert all(torch.equal(order, torch.arange(len(order))) for order in found.maps[0].values())
        for copy, maps in zip(copies, found.maps, strict=True):
            assert_same(tensors(structure.permute_weights(copy, maps)), tensors(model))


@pytest.mark.parametrize("name", NETS)
def test_the_order_of_units_matters_in_the_reference_alone(name: str) -> None:
    spec = MODELS[name]
    world, structure, (a, b) = (
        world_of(spec, "method=git_rebasin"),
        structure_of(spec, IMAGE),
        models_of(spec, 2),
    )
    expected = tensors(fused(world, [a, b]))
    assert_same(
        tensors(fused(world, [a, structure.permute_weights(b, structure.random(1))])),
        expected,
        1e-13,
    )
    maps = structure.random(2)
    moved = fused(world, [structure.permute_weights(a, maps), b])
    assert_same(tensors(moved), [structure.permute(expected[0], maps)], 1e-13)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", HIDDEN)
def test_moved_models_compute_what_they_did(name: str, count: int) -> None:
    structure = structure_of(MODELS[name], IMAGE)
    models = [weights_of(MODELS[name], seed) for seed in range(count)]
    params = [model.params for model in models]
    if count == 2:
        maps = match_pair(
            params[1], params[0], structure, structure.groups, WeightMatching(), 0
        ).maps
    else:
        maps = match_many(params, structure, structure.groups, WeightMatching(), 0).maps[1:]
    assert not all(
        torch.equal(order, torch.arange(len(order))) for own in maps for order in own.values()
    )
    for model, own in zip(models[1:], maps, strict=True):
        moved = structure.permute_weights(model, own)
        assert same_function(model, moved, IMAGE, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", HIDDEN)
def test_the_objective_never_falls(name: str) -> None:
    """The objective never falls, for unrelated models.

    A search with s + 1 sweeps begins with the search with s sweeps.
    """
    structure = structure_of(MODELS[name], IMAGE)
    for seed in range(4):
        model, reference = weights_of(MODELS[name], seed, "a"), weights_of(MODELS[name], seed, "b")
        last, sweeps = product(model, reference), 1
        while True:
            options = WeightMatching(sweeps=sweeps)
            found = match_pair(
                model.params, reference.params, structure, structure.groups, options, seed
            )
            now = product(structure.permute_weights(model, found.maps[0]), reference)
            assert now >= last
            if found.sweeps < sweeps:
                break
            last, sweeps = now, sweeps + 1
        assert sweeps < 30


def test_many_models_come_closer() -> None:
    """The sum of squared distances between models falls from pass to pass."""
    spec = MODELS["cnn"]
    structure, models = structure_of(spec, IMAGE), [weights_of(spec, seed) for seed in range(4)]

    def spread(passes: int) -> float:
        options = WeightMatching(passes=passes)
        maps = match_many([m.params for m in models], structure, structure.groups, options, 0).maps
        moved = [structure.permute_weights(m, own) for m, own in zip(models, maps, strict=True)]
        return -sum(product(a, b) for i, a in enumerate(moved) for b in moved[:i])

    start = -sum(product(a, b) for i, a in enumerate(models) for b in models[:i])
    found = [start, *(spread(passes) for passes in range(1, 7))]
    assert found == sorted(found, reverse=True) and found[1] < found[0] and found[-1] == found[-2]


def test_one_hidden_layer_is_brute_forces_best() -> None:
    """With one hidden layer, the result equals the best one found by brute force.

    Incoming weights, outgoing weights and biases all count. They are scaled so that
    each of the three on its own would give another result.
    """
    spec = spec_of("fedexp.models.mlp.MLP", hidden=[5])
    structure, decided = structure_of(spec, IMAGE), set()
    for seed in range(12):
        a, b = weights_of(spec, seed, "a"), weights_of(spec, seed, "b")
        scales = {"hidden.0.weight": 0.3, "hidden.0.bias": 4.0}
        a = Weights(spec, {k: v * scales.get(k, 1.0) for k, v in a.params.items()}, {})

        def value(order, without: str = "", a: Weights = a, b: Weights = b) -> float:
            moved = structure.permute_weights(a, {"hidden.0.weight": torch.tensor(order)})
            return float(
                sum((v * b.params[k]).sum() for k, v in moved.params.items() if k != without)
            )

        best = max(permutations(range(5)), key=value)
        found = match_pair(
            a.params, b.params, structure, structure.groups, WeightMatching(), seed
        ).maps[0]
        assert found["hidden.0.weight"].tolist() == list(best)
        decided |= {
            k
            for k in a.params
            if max(permutations(range(5)), key=lambda p, k=k: value(p, k)) != best
        }
    assert decided == {"hidden.0.weight", "hidden.0.bias", "output.weight"}


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("fedexp.models.mlp.MLP", hidden=[4, 5]),
        spec_of("fedexp.models.cnn.ConvNet", channels=[4, 3], kernel=3, hidden=[5]),
    ],
    ids=["mlp", "cnn with flattening"],
)
def test_no_group_alone_can_do_better(spec) -> None:
    """When the search ends, no permutation of a single group is better.

    The test tries all permutations of each group.
    """
    structure = structure_of(spec, IMAGE)
    for seed in range(3):
        a, b = weights_of(spec, seed, "a"), weights_of(spec, seed, "b")
        maps = match_pair(
            a.params, b.params, structure, structure.groups, WeightMatching(), seed
        ).maps[0]
        moved = structure.permute_weights(a, maps)
        for group in structure.groups:
            for order in permutations(range(group.size)):
                other = structure.permute_weights(moved, {group.name: torch.tensor(order)})
                assert product(other, b) <= product(moved, b) + 1e-12


def test_visiting_orders_follow_their_names() -> None:
    """Equal names give equal visiting orders and thus equal permutations.

    For unrelated models, other names reach other local optima.
    """
    spec = spec_of("fedexp.models.mlp.MLP", hidden=[12, 12, 12])
    structure, a, b = structure_of(spec, IMAGE), weights_of(spec, 0), weights_of(spec, 1)

    def found(name: int) -> list[int]:
        maps = match_pair(
            a.params, b.params, structure, structure.groups, WeightMatching(), name
        ).maps[0]
        return torch.cat(list(maps.values())).tolist()

    orders = [found(name) for name in range(8)]
    assert orders == [found(name) for name in range(8)]
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize("count", [2, 4])
def test_git_rebasin_without_hidden_units_equals_average(count: int) -> None:
    average_of_units_that_stay("git_rebasin", count)


def test_what_was_found_is_logged() -> None:
    spec = MODELS["mlp"]
    world, structure, model = (
        world_of(spec, "method=git_rebasin"),
        structure_of(spec, IMAGE),
        models_of(spec, 1)[0],
    )
    turned = structure.permute_weights(
        model, {g.name: torch.arange(g.size).roll(1) for g in structure.groups}
    )
    for models, share in (([model, turned], 1.0), ([model, model, turned], 0.5)):
        metrics = world.aggregator.fuse(results_of(models), world.env)[1]
        assert (
            metrics["git_rebasin/moved"] == pytest.approx(share)
            and metrics["git_rebasin/sweeps"] > 1
        )


def test_frozen_layers_keep_their_bits_and_their_order() -> None:
    spec = spec_of("PartlyFrozen")
    world, structure, base = (
        world_of(spec, "method=git_rebasin"),
        structure_of(spec, IMAGE),
        models_of(spec, 1)[0],
    )
    assert [group.name for group in movable(structure, base)] == ["hidden.weight"]
    models = []
    for number in range(5):
        tuned = {
            k: v if k in base.frozen else v * (1 + number / 50) for k, v in base.params.items()
        }
        moves = {"hidden.weight": structure.random(number)["hidden.weight"]} if number else {}
        models.append(structure.permute_weights(Weights(spec, tuned, base.buffers), moves))
    for cohort in (models[:2], models):
        result = fused(world, cohort)
        for name, value in {**base.params, **base.buffers}.items():
            if name in base.frozen:
                assert torch.equal({**result.params, **result.buffers}[name], value)
        scale = sum(1 + i / 50 for i in range(len(cohort))) / len(cohort)
        torch.testing.assert_close(
            result.params["hidden.weight"], base.params["hidden.weight"] * scale
        )


@pytest.mark.parametrize("count", [2, 3])
def test_units_of_frozen_layers_do_not_move_even_where_that_pays(count: int) -> None:
    """Units of frozen layers do not move, even if moving them would pay.

    In one model the layer that reads these units is permuted. Moving the units would
    undo this.
    """
    spec = spec_of("PartlyFrozen")
    base = models_of(spec, 1)[0]
    turned = {**base.params, "hidden.weight": base.params["hidden.weight"].roll(1, 1)}
    models = [
        Weights(spec, {**own, "hidden.weight": 100 * own["hidden.weight"]}, base.buffers)
        for own in (base.params, turned)
    ]
    models = [models[0]] * (count - 1) + [models[1]]
    world = world_of(spec, "method=git_rebasin")
    structure = structure_of(spec, IMAGE)
    maps = match_pair(
        models[-1].params, models[0].params, structure, structure.groups, WeightMatching(), 0
    ).maps[0]
    assert not torch.equal(maps["conv.weight"], torch.arange(6))  # it would pay
    found = match_pair(
        models[-1].params,
        models[0].params,
        structure,
        movable(structure, base),
        WeightMatching(),
        0,
    ).maps[0]
    expected = structure.permute(models[-1].params, found)["hidden.weight"]
    mean = ((count - 1) * models[0].params["hidden.weight"] + expected) / count
    torch.testing.assert_close(
        fused(world, models).params["hidden.weight"], mean, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("count", [2, 4])
def test_best_of_several_searches_counts(count: int) -> None:
    """The best of several searches is returned.

    The first search equals the search without restarts. More searches never find less.
    """
    spec = spec_of("fedexp.models.mlp.MLP", hidden=[12, 12, 12])
    structure, models = structure_of(spec, IMAGE), [weights_of(spec, seed) for seed in range(count)]
    params, better = [model.params for model in models], 0

    def search(restarts: int, seed: int) -> FoundPermutations:
        options = WeightMatching(restarts=restarts)
        if count == 2:
            return match_pair(params[1], params[0], structure, structure.groups, options, seed)
        return match_many(params, structure, structure.groups, options, seed)

    def similarity(found: FoundPermutations) -> float:
        moved = [
            structure.permute_weights(model, maps)
            for model, maps in zip(models[-len(found.maps) :], found.maps, strict=True)
        ]
        moved = [models[0], *moved] if count == 2 else moved
        return sum(product(a, b) for i, a in enumerate(moved) for b in moved[:i])

    for seed in range(3):
        found = [search(restarts, seed) for restarts in (1, 2, 5)]
        values = [similarity(each) for each in found]
        assert values == sorted(values)
        assert found[0].sweeps < found[1].sweeps < found[2].sweeps
        better += values[2] > values[0]
        if count == 2:
            assert [each.similarity for each in found] == pytest.approx(values)
        assert_same(search(5, seed).maps, found[2].maps)
    assert better


def test_restarts_move_only_groups_that_may_move() -> None:
    spec = spec_of("fedexp.models.mlp.MLP", hidden=[12, 12, 12])
    structure, a, b = structure_of(spec, IMAGE), weights_of(spec, 0), weights_of(spec, 1)
    free = structure.groups[1:]

    def search(restarts: int, seed: int) -> FoundPermutations:
        return match_pair(
            b.params, a.params, structure, free, WeightMatching(restarts=restarts), seed
        )

    found = [(search(1, seed), search(6, seed)) for seed in range(4)]
    assert any(several.similarity > one.similarity for one, several in found)
    for _, several in found:
        assert several.maps[0].keys() == {group.name for group in free}


def test_unequal_widths_are_refused() -> None:
    wide, narrow = (spec_of("fedexp.models.mlp.MLP", hidden=[n]) for n in (7, 6))
    with pytest.raises(ConfigError, match="different widths") as error:
        fused(world_of(wide, "method=git_rebasin"), [weights_of(wide, 0), weights_of(narrow, 0)])
    assert (
        "hidden.0.weight" in error.value.facts["expected"] and "model 1" in error.value.facts["got"]
    )


@pytest.mark.parametrize("override", ["tolerance=-1", "sweeps=0", "passes=0", "restarts=0"])
def test_settings_without_meaning_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must (be positive|not be negative)"):
        Experiment.of(compose(["method=git_rebasin", f"aggregator.matching.{override}"]))


def test_weight_matching_inner_product_equals_its_definition() -> None:
    a, b = weights_of(MODELS["cnn"], 0), weights_of(MODELS["cnn"], 1)
    assert inner_product(a.params, b.params) == pytest.approx(product(a, b))
