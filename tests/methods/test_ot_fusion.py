"""Tests of OT fusion: identities for every network whose units can be permuted."""

from __future__ import annotations

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.weights import Weights
from fedexp.matching.alignment import Alignment, align
from fedexp.matching.structure import structure_of
from fedexp.methods.ot_fusion import aligned
from fedexp.running.experiment import Experiment
from tests.matching.nets import IMAGE, MODELS, spec_of
from tests.methods.fusion_world import (
    average_of_units_that_stay,
    fused,
    models_of,
    random_samples,
    tensors,
    world_of,
)
from tests.world import assert_same

ACTIVATIONS = (
    "aggregator.alignment.support=activations",
    "proxy.source=train",
    "proxy.size=9",
)
VARIANTS = {
    "reference": ("method=ot_fusion",),
    "masked": ("method=ot_fusion", "aggregator.last_layer=masked"),
    "running": ("method=ot_fusion", "aggregator.fold=running"),
    "uniform": ("method=ot_fusion", "aggregator.fold=uniform"),
    "activations": ("method=ot_fusion", *ACTIVATIONS),
    "activations, running": ("method=ot_fusion", "aggregator.fold=running", *ACTIVATIONS),
    "nafi, aligned biases": ("method=ot_fusion_nafi", "aggregator.alignment.biases=aligned"),
}
NETS = ["mlp", "cnn", "resnet, BatchNorm", "concatenated"]
COUNTS = [[5, 2, 0], [3, 9, 1], [0, 2, 2], [4, 4, 4]]


@pytest.mark.parametrize("variant", [*VARIANTS, "nafi"])
@pytest.mark.parametrize("name", NETS)
def test_copies_give_the_model(name: str, variant: str) -> None:
    world = world_of(MODELS[name], *VARIANTS.get(variant, ("method=ot_fusion_nafi",)))
    model = models_of(MODELS[name], 1)[0]
    assert_same(tensors(fused(world, [model] * 4, [[2, 3, 4]] * 4)), tensors(model), 1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_model_is_returned_as_it_is(variant: str) -> None:
    model = models_of(MODELS["cnn"], 1)[0]
    world = world_of(model.spec, *VARIANTS[variant])
    assert_same(tensors(fused(world, [model], [[2, 2, 2]])), tensors(model))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NETS)
def test_a_common_permutation_permutes_the_result(name: str, variant: str) -> None:
    spec = MODELS[name]
    world, structure, models = (
        world_of(spec, *VARIANTS[variant]),
        structure_of(spec, IMAGE),
        models_of(spec, 4),
    )
    maps = structure.random(2)
    moved = [structure.permute_weights(model, maps) for model in models]
    expected = structure.permute_weights(fused(world, models, COUNTS), maps)
    assert_same(tensors(fused(world, moved, COUNTS)), tensors(expected), 1e-12)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NETS)
def test_the_order_of_units_matters_in_the_reference_alone(
    name: str, variant: str, count: int
) -> None:
    spec = MODELS[name]
    world, structure, models = (
        world_of(spec, *VARIANTS[variant]),
        structure_of(spec, IMAGE),
        models_of(spec, count),
    )
    reference = 1 if count == 2 and world.aggregator.fold == "reference" else 0
    moved = [
        m if i == reference else structure.permute_weights(m, structure.random(i))
        for i, m in enumerate(models)
    ]
    expected = fused(world, models, COUNTS[:count])
    assert_same(tensors(fused(world, moved, COUNTS[:count])), tensors(expected), 1e-12)
    mean = world_of(spec, "method=average")  # it depends on the order
    name = structure.groups[0].name
    assert not torch.allclose(fused(mean, moved).params[name], fused(mean, models).params[name])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_are_recovered(name: str, variant: str) -> None:
    spec = MODELS[name]
    world, structure, model = (
        world_of(spec, *VARIANTS[variant]),
        structure_of(spec, IMAGE),
        models_of(spec, 1)[0],
    )
    copies = [
        model,
        *(structure.permute_weights(model, structure.random(seed)) for seed in range(3)),
    ]
    assert_same(tensors(fused(world, copies, [[2, 2, 2]] * 4)), tensors(model), 1e-13)


def test_activations_do_not_see_weights_of_constant_inputs() -> None:
    """Activations ignore the weights of constant inputs.

    Pixels that are zero in all data do not affect a unit's activations, but their
    weights differ.
    """
    spec = MODELS["mlp"]
    structure, model = structure_of(spec, IMAGE), models_of(spec, 1)[0]
    noisy = {name: value.clone() for name, value in model.params.items()}
    # The weights of the second channel are those of other units.
    noisy["hidden.0.weight"][:, 64:] = 9 * noisy["hidden.0.weight"][:, 64:].roll(1, 0)
    shuffle = structure.random(3)
    copy = structure.permute_weights(Weights(spec, noisy, model.buffers), shuffle)
    samples = random_samples(30)
    samples.x[:, 1] = 0

    def found(options: Alignment) -> list[list[int]]:
        maps = align([copy], model, structure, options, samples)[0]
        return [maps[group.name].tolist() for group in structure.groups]

    expected = [shuffle[group.name].argsort().tolist() for group in structure.groups]
    assert found(Alignment(support="activations")) == expected
    assert found(Alignment()) != expected


def test_ot_fusion_without_hidden_units_equals_average() -> None:
    average_of_units_that_stay("ot_fusion", 4)


@pytest.mark.parametrize(
    ("fold", "weights"),
    [("running", (1 / 8, 1 / 8, 1 / 4, 1 / 2)), ("uniform", (1 / 4, 1 / 4, 1 / 4, 1 / 4))],
)
def test_the_fold_determines_the_weights(fold: str, weights: tuple[float, ...]) -> None:
    """The fold determines the weights of the models.

    Without hidden units nothing moves, so that the result is a weighted mean.
    """
    spec = MODELS["linear"]
    models = models_of(spec, 4)
    result = fused(world_of(spec, "method=ot_fusion", f"aggregator.fold={fold}"), models)
    for name, value in result.params.items():
        expected = sum(w * m.params[name] for w, m in zip(weights, models, strict=True))
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)


def test_nafis_two_models_written_out() -> None:
    """The fusion of two models by NAFI's variant equals its formula.

    With one hidden layer, model 1 is moved onto model 0. The output layer is
    transported. Biases are averaged in place.
    """
    spec = MODELS["mlp"]
    a, b = (m.params for m in models_of(spec, 2))
    structure = structure_of(spec, IMAGE)
    maps = align(
        [models_of(spec, 2)[1]],
        models_of(spec, 2)[0],
        structure,
        Alignment(normalize=False, distance="squared", transform="log1p", output="transported"),
    )[0]
    p, q, r = maps["hidden.0.weight"], maps["hidden.1.weight"], maps["output.weight"]
    expected = {
        "hidden.0.weight": b["hidden.0.weight"][p],
        "hidden.1.weight": b["hidden.1.weight"][q][:, p],
        "output.weight": b["output.weight"][r][:, q],
    }
    result = fused(world_of(spec, "method=ot_fusion_nafi"), models_of(spec, 2)).params
    for name in a:
        torch.testing.assert_close(
            result[name], (a[name] + expected.get(name, b[name])) / 2, rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize(("count", "reference"), [(1, 0), (2, 1), (3, 0)])
def test_ot_fusion_keeps_the_units_of_its_reference(count: int, reference: int) -> None:
    spec = MODELS["cnn"]
    models = models_of(spec, count)
    moved, maps, _ = aligned(models, world_of(spec, "method=ot_fusion").env, Alignment())
    assert moved[reference] is models[reference] and len(maps) == count
    structure = structure_of(spec, IMAGE)
    for model, own, before in zip(moved, maps, models, strict=True):
        assert_same(tensors(model), tensors(structure.permute_weights(before, own)))
    assert all(torch.equal(p, torch.arange(len(p))) for p in maps[reference].values())


def test_share_of_moved_units_is_logged() -> None:
    from tests.methods.fusion_world import results_of

    spec = MODELS["mlp"]
    world, structure, model = (
        world_of(spec, "method=ot_fusion"),
        structure_of(spec, IMAGE),
        models_of(spec, 1)[0],
    )
    turned = structure.permute_weights(
        model, {g.name: torch.arange(g.size).roll(1) for g in structure.groups}
    )
    metrics = world.aggregator.fuse(results_of([model, model, turned]), world.env)[1]
    assert metrics["ot/moved"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("aggregator.last_layer=masked aggregator.fold=running", "got fold=running"),
        ("aggregator.last_layer=masked aggregator.fold=uniform", "got fold=uniform"),
        ("aggregator.last_layer=masked aggregator.alignment.output=transported", "output=inputs"),
        ("aggregator.alignment.regularization=0", "regularization must be positive"),
        ("aggregator.alignment.distance=manhattan", "'manhattan' is not a choice"),
        ("+aggregator.alignment.metric=l2", "unknown key 'metric'"),
    ],
)
def test_settings_without_meaning_are_refused(overrides: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.of(compose(["method=ot_fusion", *overrides.split()]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_frozen_layers_keep_their_bits_and_their_order(variant: str) -> None:
    """Frozen layers stay bit-identical and keep their order.

    This is not obvious: the mean of seven equal numbers may differ from them in the
    last bit.
    """
    spec = spec_of("PartlyFrozen")
    world, structure, base = (
        world_of(spec, *VARIANTS[variant]),
        structure_of(spec, IMAGE),
        models_of(spec, 1)[0],
    )
    models = []
    for number, other in enumerate(models_of(spec, 7)):
        tuned = {k: base.params[k] if k in base.frozen else v for k, v in other.params.items()}
        moves = {"hidden.weight": structure.random(number)["hidden.weight"]}
        models.append(structure.permute_weights(type(base)(spec, tuned, base.buffers), moves))
    result = fused(world, models, [[2, 2, 2]] * 7)
    for name, value in {**base.params, **base.buffers}.items():
        if name in base.frozen:
            assert torch.equal({**result.params, **result.buffers}[name], value)
    maps = aligned(models, world.env, Alignment())[1]
    assert all(list(own) == ["hidden.weight"] for own in maps)


def test_activations_without_unseen_server_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs server data"):
        Experiment.of(compose(["method=ot_fusion", ACTIVATIONS[0]]))
    on_test = [ACTIVATIONS[0], "proxy.source=test", "proxy.size=9"]
    with pytest.raises(ConfigError) as error:
        Experiment.of(compose(["method=ot_fusion", *on_test]))
    assert "proxy.source" in str(error.value)
