"""Tests of alignment: found permutations, the recursion over layers, ground costs."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from fedexp.core.weights import Weights
from fedexp.matching.activations import activation_products
from fedexp.matching.alignment import (
    Alignment,
    activation_costs,
    align,
    ground_costs,
    moved_share,
)
from fedexp.matching.structure import structure_of
from tests.matching.nets import IMAGE, MODELS, weights_of
from tests.methods.fusion_world import random_samples
from tests.world import assert_same

HIDDEN = [name for name in MODELS if name != "linear"]
NAFI = Alignment(normalize=False, distance="squared", transform="log1p", output="transported")


def both(weights: Weights) -> list[dict[str, torch.Tensor]]:
    return [{**weights.params, **weights.buffers}]


@pytest.mark.parametrize("options", [Alignment(), NAFI], ids=["ma-echo", "nafi"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_permuted_copy_is_recovered(name, options):
    structure = structure_of(MODELS[name], IMAGE)
    reference = weights_of(MODELS[name], 0)
    shuffles = [structure.random(seed) for seed in (1, 2)]
    copies = [structure.permute_weights(reference, maps) for maps in shuffles]
    found = align(copies, reference, structure, options)
    for copy, shuffle, maps in zip(copies, shuffles, found, strict=True):
        for group in structure.groups:
            assert torch.equal(maps[group.name], shuffle[group.name].argsort())
        assert_same(both(options.apply(copy, structure, maps)), both(reference))


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_moved_does_not_depend_on_the_order_of_its_units(name):
    structure = structure_of(MODELS[name], IMAGE)
    reference, model = weights_of(MODELS[name], 0), weights_of(MODELS[name], 1)
    shuffled = structure.permute_weights(model, structure.random(5))
    a, b = align([model, shuffled], reference, structure, Alignment())
    assert_same(
        both(structure.permute_weights(model, a)), both(structure.permute_weights(shuffled, b))
    )


def test_rows_follow_the_recursion():
    """The test finds T_1 of W_1 by brute force, then T_2 of W_2.

    The columns of W_2 are first moved by T_1. The network has two hidden layers.
    """
    spec = MODELS["mlp"]
    structure = structure_of(spec, IMAGE)
    A, B = weights_of(spec, 1).params, weights_of(spec, 0).params
    maps = align([weights_of(spec, 1)], weights_of(spec, 0), structure, Alignment())[0]

    def unit(W):
        return W / W.norm(dim=1, keepdim=True)

    moved = A["hidden.0.weight"]
    for number, n in ((0, 7), (1, 5)):
        target = B[f"hidden.{number}.weight"]
        D = torch.cdist(unit(moved), unit(target))
        best = min(
            permutations(range(n)), key=lambda p: float(sum(D[a, b] for b, a in enumerate(p)))
        )
        assert maps[f"hidden.{number}.weight"].tolist() == list(best)
        if number == 0:
            moved = A["hidden.1.weight"][:, list(best)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ["mlp", "cnn", "concatenated", "resnet, BatchNorm"])
def test_activation_costs_are_distances_of_layer_outputs(name, normalize, monkeypatch):
    """The costs are the distances between the outputs that PyTorch hooks collect.

    The 30 samples are processed in batches of 7, which does not change the result.
    """
    monkeypatch.setattr("fedexp.matching.activations._BATCH", 7)
    structure, samples = structure_of(MODELS[name], IMAGE), random_samples(30)
    models = [weights_of(MODELS[name], seed) for seed in range(3)]
    found = activation_products(models[1:], models[0], structure, structure.groups, samples)

    def outputs(weights: Weights) -> dict[str, torch.Tensor]:
        module, seen = weights.module().eval(), {}
        for part, layer in module.named_modules():
            if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
                layer.register_forward_hook(
                    lambda _, __, out, part=part: seen.update({f"{part}.weight": out})
                )
        module(samples.x)
        return {weight: out.transpose(0, 1).flatten(1) for weight, out in seen.items()}

    expected = [outputs(model) for model in models]
    for group in structure.groups:
        rows = [torch.cat([each[layer] for layer in group.layers], 1) for each in expected]
        if normalize:
            rows = [each / each.norm(dim=1, keepdim=True) for each in rows]
        costs = activation_costs(found[group.name], Alignment(normalize=normalize))
        for model, cost in zip(rows[1:], costs, strict=True):
            torch.testing.assert_close(cost, torch.cdist(model, rows[0]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", HIDDEN)
def test_a_permuted_copy_is_recovered_from_activations(name):
    structure, samples = structure_of(MODELS[name], IMAGE), random_samples(30)
    reference = weights_of(MODELS[name], 0)
    shuffle = structure.random(1)
    copy = structure.permute_weights(reference, shuffle)
    for options in (
        Alignment(support="activations"),
        Alignment(support="activations", normalize=False, output="transported"),
    ):
        maps = align([copy], reference, structure, options, samples)[0]
        assert_same(both(options.apply(copy, structure, maps)), both(reference))
        assert (structure.output.name in maps) == (options.output == "transported")


def test_several_models_at_once_are_each_alone(monkeypatch):
    spec = MODELS["cnn"]
    structure = structure_of(spec, IMAGE)
    models = [weights_of(spec, seed) for seed in range(5)]
    together = align(models[1:], models[0], structure, Alignment())
    monkeypatch.setattr("fedexp.matching.alignment._COST_BYTES", 1)
    for maps, alone in zip(
        together, align(models[1:], models[0], structure, Alignment()), strict=True
    ):
        assert_same([maps], [alone])


@pytest.mark.parametrize("distance", ["euclidean", "squared"])
@pytest.mark.parametrize("normalize", [True, False])
def test_ground_costs_are_distances(distance, normalize):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 6, 10, generator=generator, dtype=torch.float64)
    b = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    a[0, 2] = b[4]
    options = Alignment(normalize=normalize, distance=distance)
    got = ground_costs(a, b, options)
    if normalize:
        a, b = a / a.norm(dim=2, keepdim=True), b / b.norm(dim=1, keepdim=True)
    expected = torch.stack(
        [torch.cdist(x, b, compute_mode="donot_use_mm_for_euclid_dist") for x in a]
    )
    expected = expected if distance == "euclidean" else expected**2
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-6)
    for transform, change in {
        "log1p": lambda D: (1 + D).log(),
        "max": lambda D: D / D.max(),
        "mean": lambda D: D / D.mean(),
        "median": lambda D: D / D.median(),
    }.items():
        changed = ground_costs(
            a, b, Alignment(normalize=False, distance=distance, transform=transform)
        )
        torch.testing.assert_close(
            changed, torch.stack([change(D) for D in expected]), rtol=1e-7, atol=1e-6
        )


def test_ground_costs_of_zero_rows_are_finite():
    zero = torch.zeros(1, 3, 4, dtype=torch.float64)
    for transform in ("none", "log1p", "max", "median", "mean"):
        assert ground_costs(zero, zero[0], Alignment(transform=transform)).isfinite().all()


def test_alignment_without_biases_leaves_them_in_place():
    spec = MODELS["mlp"]
    structure = structure_of(spec, IMAGE)
    weights = weights_of(spec, 0)
    maps = structure.random(0)
    moved = Alignment(biases="unaligned").apply(weights, structure, maps)
    aligned = structure.permute_weights(weights, maps)
    for name, value in weights.params.items():
        assert torch.equal(
            moved.params[name], value if name.endswith("bias") else aligned.params[name]
        )


@pytest.mark.parametrize("name", HIDDEN)
def test_a_sharp_sinkhorn_plan_is_the_exact_one(name):
    structure = structure_of(MODELS[name], IMAGE)
    reference = weights_of(MODELS[name], 0)
    model = structure.permute_weights(reference, structure.random(1))
    options = Alignment(solver="sinkhorn", regularization=1e-3)
    maps = align([model], reference, structure, options)[0]
    assert_same(both(options.apply(model, structure, maps)), both(reference), 1e-6)


def test_share_of_units_that_moved():
    structure = structure_of(MODELS["mlp"], IMAGE)
    still = {group.name: torch.arange(group.size) for group in structure.groups}
    swapped = {**still, "hidden.0.weight": torch.tensor([1, 0, 2, 3, 4, 5, 6])}
    assert moved_share(structure, [still]) == 0
    # Without maps, no unit moves
    assert moved_share(structure, [{}]) == 0
    assert moved_share(structure, [still, swapped]) == pytest.approx(2 / 24)
    soft = {name: torch.eye(len(p), dtype=torch.float64)[:, p] for name, p in swapped.items()}
    assert moved_share(structure, [still, soft]) == pytest.approx(2 / 24)
