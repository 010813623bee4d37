"""Tests of layer-wise matching.

The results are compared with an independent loop form and with closed forms. The tests
also cover the steps of a round, training cycles and refused configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.config.compose import compose
from fedexp.core.build import build
from fedexp.core.env import Sampling, Specs
from fedexp.core.errors import ConfigError
from fedexp.core.outcome import Outcome
from fedexp.core.runner import Snapshot, Step, run
from fedexp.core.seeds import numpy_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.evaluation.evaluate import Evaluator
from fedexp.matching.beta_bernoulli import BetaBernoulli, match
from fedexp.matching.embedding import Embedding, _most_shared
from fedexp.matching.folding import fold_batch_norm
from fedexp.matching.layerwise import PartlyMatched, common_layers
from fedexp.matching.structure import structure_of, with_widths
from fedexp.methods.bases.fusion import averaged
from fedexp.methods.fedma import FedMA
from fedexp.methods.nafi_layerwise import NAFILayerwise
from fedexp.running.experiment import Experiment
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.model_folder import ModelFolder, save_outcome
from tests.matching.nets import CLASSES, IMAGE, MODELS, REFUSED, spec_of, weights_of
from tests.methods.fusion_world import models_of, results_of, tensors, world_of
from tests.reference.matching_loops import Constants
from tests.reference.matching_loops import matched as looped
from tests.reference.moon_like import MoonLike
from tests.world import CPU, MLP, World, assert_same, make_world

COUNTS = [[5, 2, 0], [3, 9, 1], [0, 2, 2], [4, 4, 4]]
EVEN = [[2, 3, 4]] * 4


class Branches(nn.Module):
    """A network with two parallel convolutions of the image, whose maps are flattened.

    In the input of the linear layer, the image's mean precedes the maps.
    """

    def __init__(self, *, a: int = 3, b: int = 2, hidden: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, a, 3), nn.Conv2d(2, b, 3)
        self.hidden, self.output = nn.Linear(2 + (a + b) * 9, hidden), nn.Linear(hidden, CLASSES)

    @staticmethod
    def with_widths(kwargs, widths):
        return {name: widths[f"{name}.weight"] for name in ("a", "b", "hidden")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(torch.cat([self.a(x), self.b(x)], 1))
        maps = nn.functional.max_pool2d(maps, 2).permute(0, 2, 3, 1).flatten(1)
        return self.output(torch.relu(self.hidden(torch.cat([x.mean((2, 3)), maps], 1))))


class Block(nn.Module):
    """A residual block with two convolutions, whose output is added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 4, 1)
        self.output = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        return self.output((x + self.b(torch.relu(self.a(x)))).mean((2, 3)))


BLOCK = spec_of("tests.methods.test_fedma.Block")
BRANCHES = spec_of("tests.methods.test_fedma.Branches")
NETS = {
    **{name: MODELS[name] for name in ("mlp", "cnn", "cnn, flattened at once")},
    "branches": BRANCHES,
    "mlp without biases": spec_of("fedexp.models.mlp.MLP", hidden=[6], bias=False),
}


@cache
def composed() -> World:
    return world_of(MODELS["mlp"], "method=fedma")


def matching(spec: ModelSpec, kind: type[FedMA] = FedMA, **options) -> World:
    """Return a world of `spec` on `IMAGE` without composing the configuration again."""
    world = composed()
    experiment = replace(
        world.experiment, aggregator=build(kind, {"retrain": False, **options}, "aggregator")
    )
    return World(experiment, replace(world.env, specs=Specs(spec)), world.data)


def merged(
    world: World, models: Sequence[Weights], counts: Sequence[Sequence[int]] = EVEN
) -> tuple[Weights, dict]:
    """Fuse `models` in one shot without retraining, and return weights and metrics."""
    state = world.aggregator.init(world.env)
    state, metrics = world.aggregator.update(state, results_of(models, counts), world.env)
    return state["weights"], metrics


def function_of(weights: Weights) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return weights.module()(torch.randn(9, *IMAGE, generator=rng, dtype=torch.float64))


def blocks(model: Weights) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Return weight and bias of every layer of a chain.

    A weight has shape (out, units of the layer before, entries per unit).
    """
    layers = structure_of(model.spec, IMAGE).layers
    found, units = [], IMAGE[0]
    for layer in layers:
        weight = model.params[layer.weight].numpy()
        if not found and layer.kind == "linear":
            units = weight.shape[1]
        found.append(
            (
                weight.reshape(len(weight), units, -1),
                layer.bias and model.params[layer.bias].numpy(),
            )
        )
        units = len(weight)
    return found


def written_out(models, counts, k: Constants, orders) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Match the layers of chains in one shot, unit by unit."""
    N, depth = len(models), len(models[0])
    owns = [np.arange(model[0][0].shape[1]) for model in models]
    width, result = models[0][0][0].shape[1], []
    for layer in range(depth):
        wide = []
        for s, model in enumerate(models):
            weight = model[layer][0]
            laid = np.zeros((len(weight), width, weight.shape[2]))
            for j in range(len(weight)):
                for c in range(weight.shape[1]):
                    laid[j, owns[s][c]] = weight[j, c]
            wide.append(laid)
        biases = [model[layer][1] for model in models]
        if layer == depth - 1:
            total = np.sum(counts, 0)
            shares = [
                [n / t if t else 1 / N for n, t in zip(row, total, strict=True)] for row in counts
            ]
            weight = sum(np.array(f)[:, None, None] * w for f, w in zip(shares, wide, strict=True))
            bias = (
                None
                if biases[0] is None
                else sum(np.array(f) * b for f, b in zip(shares, biases, strict=True))
            )
            result.append((weight, bias))
            break
        rows = [
            np.array([[*laid[j].ravel(), *([] if b is None else [b[j]])] for j in range(len(laid))])
            for laid, b in zip(wide, biases, strict=True)
        ]
        mu0 = np.zeros(rows[0].shape[1])
        if biases[0] is not None:
            mu0[-1] = 0.1
        owns, theta = looped(rows, np.full((N, len(mu0)), 1 / k.sigma), mu0, k, orders[layer])
        entries = width * wide[0].shape[2]
        result.append(
            (
                theta[:, :entries].reshape(len(theta), width, -1),
                None if biases[0] is None else theta[:, -1],
            )
        )
        width = len(theta)
    return result


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("cnn", {"gamma": 1.0, "sigma": 0.02, "sigma0": 2.0}),
        ("cnn, flattened at once", {"popularity": 2}),
        ("mlp without biases", {"penalty": "code2020", "lam": 0.3, "sigma0": 1.0}),
    ],
)
def test_the_loop_form_agrees(name: str, options: dict) -> None:
    """The network and the order of its units agree with the loop form.

    Some clients lack classes.
    """
    spec, models = NETS[name], models_of(NETS[name], 3)
    kind = NAFILayerwise if "lam" in options else FedMA
    world = matching(spec, kind, sweeps=2, **options)
    own = world.aggregator
    constants = Constants(own.sigma, own.sigma0, own.gamma, own.popularity, own.caps)
    if isinstance(own, NAFILayerwise):
        constants.penalty, constants.lam = own.penalty, own.lam
    streams = [numpy_generator(world.env.seed, "visiting order", 0, layer) for layer in range(4)]
    orders = [[rng.permutation(3) for _ in range(2)] for rng in streams]
    expected = written_out([blocks(model) for model in models], COUNTS[:3], constants, orders)
    found, _ = merged(world, models, COUNTS[:3])
    widths = [len(weight) for weight, _ in expected]
    assert any(
        w > group.size for w, group in zip(widths, structure_of(spec, IMAGE).groups, strict=False)
    )
    for (weight, bias), (weight_, bias_) in zip(blocks(found), expected, strict=True):
        np.testing.assert_allclose(weight, weight_, rtol=1e-9, atol=1e-12)
        assert (bias is None) == (bias_ is None)
        if bias is not None:
            np.testing.assert_allclose(bias, bias_, rtol=1e-9, atol=1e-12)


def shrunk(model: Weights, copies: int, ratio: float = 1.0) -> Weights:
    """Return the result of fusing N copies of a model.

    Every layer except the output layer counts N times. The prior counts sigma / sigma0
    times.
    """
    params = {}
    for name, value in model.params.items():
        mu0 = 0.1 if name.endswith("bias") else 0.0
        params[name] = (
            value
            if name.startswith("output")
            else (ratio * mu0 + copies * value) / (ratio + copies)
        )
    return Weights(model.spec, params, model.buffers)


@pytest.mark.parametrize("name", NETS)
def test_fedma_of_permuted_copies_is_shrunk_by_the_prior(name: str) -> None:
    """Permuted copies are shrunk by the prior.

    The factor is N / (N + 1) per layer. Biases become (0.1 + N b) / (N + 1). The output
    layer does not change, and no unit is lost or added.
    """
    spec, model = NETS[name], models_of(NETS[name], 1)[0]
    structure, world = structure_of(spec, IMAGE), matching(spec, gamma=0.01)
    for copies in (1, 4):
        same, metrics = merged(world, [model] * copies, EVEN[:copies])
        assert same.spec == spec
        assert_same(tensors(same), tensors(shrunk(model, copies)), 1e-12)
        moved = [
            model,
            *(
                structure.permute_weights(model, structure.random(seed))
                for seed in range(copies - 1)
            ),
        ]
        result, metrics = merged(world, moved, EVEN[:copies])
        assert result.spec == spec
        torch.testing.assert_close(
            function_of(result), function_of(shrunk(model, copies)), rtol=1e-11, atol=1e-11
        )
    assert metrics["fusion/matched"] == 1 and metrics["fusion/log_ratio"] == pytest.approx(
        -np.log(4)
    )


@pytest.mark.parametrize("name", NETS)
def test_the_order_of_units_does_not_matter(name: str) -> None:
    spec, models = NETS[name], models_of(NETS[name], 3)
    world, structure = matching(spec, gamma=1.0, sigma=0.02), structure_of(spec, IMAGE)
    moved = [
        structure.permute_weights(model, structure.random(seed))
        for seed, model in enumerate(models)
    ]
    (a, logged), (b, _) = (merged(world, these, COUNTS[:3]) for these in (models, moved))
    assert a.spec == b.spec and logged["fusion/log_ratio"] > -np.log(3)
    torch.testing.assert_close(function_of(a), function_of(b), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", NETS)
def test_laid_out_models_compute_what_they_did_and_can_be_cut_out_again(name: str) -> None:
    small = structure_of(NETS[name], IMAGE)
    widths = {group.name: group.size + 2 for group in small.groups}
    large = structure_of(with_widths(small.spec, IMAGE, widths), IMAGE)
    rng = torch.Generator().manual_seed(1)
    units = {g.name: torch.randperm(g.size + 2, generator=rng)[: g.size] for g in small.groups}
    embedding, model = Embedding(small, large, units), weights_of(small.spec, 0)
    laid = embedding.lay_out(model)
    assert laid.spec == large.spec
    torch.testing.assert_close(function_of(laid), function_of(model), rtol=1e-12, atol=1e-12)
    assert_same(tensors(embedding.cut_out(laid)), tensors(model))


def test_without_new_units_models_stay_as_wide_as_the_widest() -> None:
    rng = torch.Generator().manual_seed(0)
    models = [torch.randn(n, 4, generator=rng).double() for n in (4, 6, 6)]
    orders = np.array([[0, 1, 2], [2, 0, 1]])
    q, mu0 = torch.ones(3, 4).double(), torch.zeros(4).double()
    wide = match(models, q, mu0, BetaBernoulli(gamma=1e6), orders)
    fixed = match(models, q, mu0, BetaBernoulli(gamma=1e6, fixed=True), orders)
    assert len(wide.members) > 6 == len(fixed.members)
    assert all(len(set(units.tolist())) == len(units) for units in fixed.units)


@pytest.mark.parametrize("name", ["resnet, one group", "gated", "cnn, BatchNorm", "concatenated"])
def test_fixed_widths_take_any_network_that_has_a_structure(name: str) -> None:
    """Fixed widths allow every network whose structure is known.

    Fusing permuted copies gives the model. Norms, running statistics and tied layers
    move with their units.
    """
    spec, model = MODELS[name], models_of(MODELS[name], 1)[0]
    structure = structure_of(spec, IMAGE)
    world = matching(spec, widths="fixed", fold_batch_norm=False, sigma0=1e12)
    world.aggregator.check(spec, IMAGE)
    copies = [
        model,
        *(structure.permute_weights(model, structure.random(seed)) for seed in range(2)),
    ]
    result, metrics = merged(world, copies, EVEN[:3])
    assert result.spec == spec and metrics["fusion/matched"] == 1
    assert_same(tensors(result), tensors(model), 1e-9)


def test_fedma_unit_has_incoming_weights_and_bias(monkeypatch) -> None:
    """A unit consists of its incoming weights over common inputs and its bias.

    The prior mean of the bias is 0.1. Only the first of several tied layers counts.
    Units of frozen layers are not matched.
    """
    seen = []

    def spy(rows, q, mu0, options, order):
        seen.append((rows, q, mu0))
        return match(rows, q, mu0, options, order)

    monkeypatch.setattr("fedexp.matching.layerwise.match", spy)
    options, order = BetaBernoulli(0.5, 2.0, gamma=1e30), np.array([[1, 0]])

    def after(name: str, groups: int) -> PartlyMatched:
        spec = {**MODELS, "block": BLOCK, "frozen": spec_of("PartlyFrozen")}[name]
        matched = PartlyMatched(models_of(spec, 2), {})
        for _ in range(groups):
            matched = matched.match_next(IMAGE, options, order)
        return matched

    second = after("cnn", 2)
    (_, (rows, q, mu0)) = seen
    assert second.pending == {"convs.0.weight": 8, "convs.1.weight": 12}
    own = second.models[1].params
    wide = torch.zeros(6, 8, 9, dtype=torch.float64)
    wide[:, second.units["convs.0.weight"][1]] = own["convs.1.weight"].flatten(2)
    assert torch.equal(rows[1], torch.cat([wide.flatten(1), own["convs.1.bias"][:, None]], 1))
    assert torch.equal(q, torch.full((2, 73), 2.0).double())
    assert torch.equal(mu0, torch.tensor([0.0] * 72 + [0.1], dtype=torch.float64))
    stem = after("block", 1).models[0].params
    assert torch.equal(
        seen[-1][0][0], torch.cat([stem["stem.weight"].flatten(1), stem["stem.bias"][:, None]], 1)
    )
    frozen = after("frozen", 1)
    assert len(seen) == 3 and frozen.pending == {"conv.weight": 6}
    assert frozen.units["conv.weight"].tolist() == [list(range(6))] * 2


@pytest.mark.parametrize("name", ["block", "cnn", "branches"])
def test_models_may_be_laid_out_at_any_time(name: str) -> None:
    """The models may be laid out after every group or once at the end.

    Layers that are tied by sums are replaced as soon as their inputs are common too.
    """
    spec = {**NETS, "block": BLOCK}[name]
    options = BetaBernoulli(0.1, 2.0, fixed=name == "block")
    structure = structure_of(spec, IMAGE)
    models = [
        structure.permute_weights(model, structure.random(s))
        for s, model in enumerate(models_of(spec, 3))
    ]
    once = often = PartlyMatched(models, {})
    for number in range(len(structure.groups)):
        order = np.array([[2, 0, 1]])
        once = once.match_next(IMAGE, options, order)
        often = often.match_next(IMAGE, options, order).laid_out(IMAGE, options)
        agreed = [
            layer.weight
            for layer in common_layers(structure_of(often.models[0].spec, IMAGE), set(often.units))
        ]
        for weight in agreed:
            assert torch.equal(often.models[0].params[weight], often.models[2].params[weight])
        assert len(agreed) > number
    once = once.laid_out(IMAGE, options)
    for a, b in zip(once.models, often.models, strict=True):
        assert a.spec == b.spec
        assert_same(tensors(a), tensors(b), 1e-12)


def test_frozen_layers_keep_their_bits_and_their_order() -> None:
    spec, models = spec_of("PartlyFrozen"), models_of(spec_of("PartlyFrozen"), 3)
    frozen = models[0].frozen
    assert frozen
    models = [
        Weights(
            spec,
            *({k: first[k] if k in frozen else v for k, v in own.items()} for first, own in trees),
        )
        for trees in (
            ((models[0].params, m.params), (models[0].buffers, m.buffers)) for m in models
        )
    ]
    result, metrics = merged(matching(spec, widths="fixed", fold_batch_norm=False), models)
    for name, value in tensors(result)[0].items():
        assert torch.equal(value, tensors(models[0])[0][name]) == (
            name in frozen or name == "norm.num_batches_tracked"
        )
    assert metrics["fusion/matched"] == 1


def test_a_frozen_output_layer_never_changes() -> None:
    """The units that a frozen layer reads are not matched. All others are."""
    spec = spec_of("FrozenHead")
    start, other = models_of(spec, 2)
    params = {
        name: start.params[name] if name in start.frozen else value.flip(0)
        for name, value in other.params.items()
    }
    world = matching(spec, widths="fixed", sigma0=1e14)
    result, _ = merged(world, [start, Weights(spec, params, {})], [[5, 0, 0], [3, 4, 0]])
    for name, value in result.params.items():
        assert torch.equal(value, start.params[name]) == (name in start.frozen)
    bias = (start.params["second.bias"] + params["second.bias"]) / 2
    torch.testing.assert_close(result.params["second.bias"], bias)


@pytest.mark.parametrize("name", ["cnn", "cnn, BatchNorm"])
def test_with_fixed_widths_and_no_prior_it_is_the_average(name: str) -> None:
    """With fixed widths and without a prior, the result is the average.

    The models agree about the order of their units. Output rows are weighted by class
    counts.
    """
    spec, models = MODELS[name], models_of(MODELS[name], 3)

    def near(tree, first):
        return {
            k: first[k] + 0.1 * (v - first[k]) if v.is_floating_point() else v
            for k, v in tree.items()
        }

    close = [
        Weights(spec, near(m.params, models[0].params), near(m.buffers, models[0].buffers))
        for m in models
    ]
    world = matching(spec, widths="fixed", fold_batch_norm=False, sigma0=1e14)
    average = averaged(close)
    assert_same(tensors(merged(world, close)[0]), tensors(average), 1e-11)
    result, _ = merged(world, close, COUNTS[:3])
    shares = torch.tensor(COUNTS[:3]).double() / torch.tensor(COUNTS[:3]).sum(0)
    for key, value in average.params.items():
        expected = value
        if key.startswith("output"):
            expected = sum(
                torch.einsum("c,c...->c...", f, m.params[key])
                for f, m in zip(shares, close, strict=True)
            )
        torch.testing.assert_close(result.params[key], expected, rtol=1e-11, atol=1e-11)
    plain = matching(spec, widths="fixed", fold_batch_norm=False, merge="mean")
    assert_same(tensors(merged(plain, close, COUNTS[:3])[0]), tensors(average), 1e-11)


@pytest.mark.parametrize("name", NETS)
def test_means_are_over_the_units_that_were_matched(name: str) -> None:
    """A mean is taken over the units that were matched.

    Permuted copies give the model. Without matched units, the outputs are averaged.
    """
    spec, models = NETS[name], models_of(NETS[name], 2)
    structure = structure_of(spec, IMAGE)
    moved = [
        models[0],
        *(structure.permute_weights(models[0], structure.random(seed)) for seed in range(2)),
    ]
    result, _ = merged(matching(spec, gamma=0.01, merge="mean"), moved, COUNTS[:3])
    torch.testing.assert_close(function_of(result), function_of(models[0]), rtol=1e-11, atol=1e-11)
    wide, logged = merged(matching(spec, gamma=1e9, sigma=1e-9, merge="mean"), models, COUNTS[:2])
    assert logged["fusion/log_ratio"] == 0
    expected = (function_of(models[0]) + function_of(models[1])) / 2
    torch.testing.assert_close(function_of(wide), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["paper", "code2020", "code2022"])
def test_lambda_0_is_fedma_to_the_bit_and_a_large_one_forbids_new_units(kind: str) -> None:
    spec, models = MODELS["cnn"], models_of(MODELS["cnn"], 3)
    shared = {"sigma0": 2.0, "gamma": 3.0}
    plain, _ = merged(matching(spec, **shared), models)
    for lam in (0.0, 1e-12):
        result, _ = merged(matching(spec, NAFILayerwise, **shared, penalty=kind, lam=lam), models)
        assert result.spec == plain.spec
        assert_same(tensors(result), tensors(plain))
    other, _ = merged(matching(spec, NAFILayerwise, **shared, penalty=kind, lam=50.0), models)
    assert plain.spec != spec
    if kind == "paper":
        assert other.spec == spec


@pytest.mark.parametrize("name", ["cnn, BatchNorm", "unet, BatchNorm"])
def test_batch_norm_is_folded_before_the_first_match(name: str) -> None:
    spec, model = MODELS[name], models_of(MODELS[name], 1)[0]
    folded = fold_batch_norm(model, IMAGE)
    structure = structure_of(spec, IMAGE)
    copies = [model, structure.permute_weights(model, structure.random(0))]
    world = matching(spec, sigma0=1e12, gamma=0.01)
    world.aggregator.check(spec, IMAGE)
    result, _ = merged(world, copies, EVEN[:2])
    assert result.spec == folded.spec != spec and not result.buffers
    torch.testing.assert_close(function_of(result), function_of(model), rtol=1e-9, atol=1e-9)


def test_the_order_of_the_models_orders_the_units() -> None:
    spec, models = MODELS["cnn"], models_of(MODELS["cnn"], 3)
    world, order = matching(spec, gamma=1e30), [2, 0, 1]
    (a, logged), (b, _) = merged(world, models), merged(world, [models[s] for s in order])
    assert [logged[f"fusion/width_{i}"] for i in (1, 2, 3)] == [12, 18, 27]
    assert logged["fusion/log_ratio"] == logged["fusion/matched"] == 0
    torch.testing.assert_close(function_of(a), function_of(b), rtol=1e-11, atol=1e-11)
    old, new = (each.params["convs.0.weight"].reshape(3, 4, -1) for each in (a, b))
    assert torch.equal(new, old[order])


# rounds and their steps


TWO = {**MLP, "hidden": [5, 4]}
CNN = {
    "_target_": "fedexp.models.cnn.ConvNet",
    "channels": [3],
    "kernel": 1,
    "hidden": [4],
    "norm": "batch",
}


@cache
def base(*overrides: str) -> World:
    return make_world("method=fedma", "rounds=2", "local.lr_decay=0.5", *overrides)


def training(*overrides: str, model=TWO, m: int = 4, rounds: int = 2, **options) -> World:
    """Return a world with two rounds and four small clients, of which `m` take part."""
    world = base(*overrides)
    spec = ModelSpec.of(model, world.env.input_shape, world.env.num_classes)
    env = replace(world.env, specs=Specs(spec), rounds=rounds, sampling=Sampling("fixed", m))
    return World(
        replace(world.experiment, aggregator=build(FedMA, options, "aggregator")), env, world.data
    )


class Seen(Serial):
    """An engine that stores the jobs and the results of each step."""

    def map(self, jobs, data):
        self.asked = [*getattr(self, "asked", []), list(jobs)]
        self.came = [*getattr(self, "came", []), []]
        for result in super().map(jobs, data):
            self.came[-1].append(result)
            yield result


def all_steps(
    world: World, engine: Serial | None = None, snapshot: Snapshot | None = None
) -> list[Step]:
    return list(run(world.aggregator, world.env, engine or Serial(), world.data, snapshot))


def test_a_step_matches_a_layer_and_the_next_retrains_what_lies_above() -> None:
    engine = Seen()
    done = all_steps(training(retrain_epochs=2, retrain_lr=0.02), engine)
    assert [(s.round, s.within, s.ends_round) for s in done] == [
        (r, i, i == 2) for r in range(2) for i in range(3)
    ]
    layers = [{f"hidden.{i}.weight", f"hidden.{i}.bias"} for i in range(2)]
    for number, jobs in enumerate(engine.asked):
        round, stage = divmod(number, 3)
        assert {job.frozen for job in jobs} == {frozenset(set().union(*layers[:stage]))}
        (local_training,) = {job.local_training for job in jobs}
        first = number == 0
        assert local_training.epochs == (1 if first else 6 if stage == 2 else 2)
        assert local_training.lr == pytest.approx(
            (0.05 if first else 0.002 if stage == 2 else 0.02) * 0.5**round
        )
        assert local_training.weight_decay == (1e-4 if stage == 2 else 0)
        assert all(bool(job.probes) == (stage == 0) for job in jobs)
        if stage:
            one, other = jobs[0].start.params, jobs[1].start.params
            assert torch.equal(one["hidden.0.weight"], other["hidden.0.weight"])
            assert not torch.equal(one["output.weight"], other["output.weight"])
            for job, result in zip(jobs, engine.came[number], strict=True):
                for name, value in job.start.params.items():
                    assert torch.equal(value, result.weights.params[name]) == (name in job.frozen)
    for end in (2, 5):
        fused = done[end].after.state["weights"]
        for name in layers[0] | layers[1]:
            assert torch.equal(fused.params[name], engine.asked[end][0].start.params[name])
        widths = [done[end - 2].metrics["fusion/width_1"], done[end - 1].metrics["fusion/width_2"]]
        assert dict(fused.spec.kwargs)["hidden"] == tuple(widths) > (5, 4)
        assert [done[end].metrics[f"fusion/width_{i}"] for i in (1, 2)] == widths


def test_retraining_shorter_than_the_smallest_number_of_epochs_is_scaled() -> None:
    """Retraining with 2 of 6 epochs makes a third of the epochs that are drawn."""
    engine = Seen()
    world = training("local.epochs=6", "local.epochs_min=3", retrain_epochs=2, rounds=1)
    all_steps(world, engine)
    for job in engine.asked[1]:
        drawn = world.env.draw_epochs(job.client)
        assert job.local_training.epochs == max(1, round(drawn / 3))


@pytest.mark.parametrize("model", [TWO, CNN], ids=["mlp", "cnn"])
def test_retraining_that_moves_nothing_is_one_shot_matching(model) -> None:
    """Retraining with a step size of 1e-30 equals one-shot matching.

    The layers are matched one by one over three steps, or all at once.
    """
    stepwise = training(model=model, rounds=1, retrain_lr=1e-30, gamma=2.0).run()
    at_once = training(model=model, rounds=1, retrain=False, gamma=2.0).run()
    assert (stepwise.step, at_once.step) == (3, 1)
    a, b = stepwise.state["weights"], at_once.state["weights"]
    assert a.spec == b.spec
    assert_same(tensors(a), tensors(b), 1e-12)


def test_resumed_after_any_step_to_the_same_bits(tmp_path: Path) -> None:
    """A run that is resumed after any step gives bit-identical results.

    A new aggregator loads the state from disk. Three of four clients take part per
    round, so that some have no assignment.
    """
    straight = all_steps(training(model=CNN, m=3))
    assert len({frozenset(s.after.state["cohort"]) for s in straight}) == 3  # none, and two cohorts
    for at in range(1, len(straight)):
        folder = tmp_path / str(at)
        Checkpoint(folder, CPU).save(straight[at - 1].after, set(), 0)
        loaded = Checkpoint(folder, CPU).load()
        assert loaded is not None
        rest = all_steps(training(model=CNN, m=3), snapshot=loaded[0])
        assert [s.metrics for s in rest] == [s.metrics for s in straight[at:]]
        a, b = (steps[-1].after.state["weights"] for steps in (rest, straight))
        assert a.spec == b.spec
        assert_same(tensors(a), tensors(b))


def test_clients_go_on_from_their_own_part() -> None:
    """Clients continue training from their part of the fused model.

    If no units are matched and there is no prior, a client's part is the model that it
    trained. An absent client gets the units that most clients have. All parts are as
    wide as the first models.
    """
    engine = Seen()
    options = {"retrain": False, "gamma": 1e30, "sigma0": 1e14, "sweeps": 0}
    world = training("init=different", m=3, **options)
    first, _ = all_steps(world, engine)
    fused = first.after.state["weights"]
    assert dict(fused.spec.kwargs)["hidden"] == (15, 12)
    assert all(
        torch.equal(
            job.start.params["output.weight"],
            world.env.initial_weights(job.client).params["output.weight"],
        )
        for job in engine.asked[0]
    )
    assert len({float(job.start.params["output.weight"][0, 0]) for job in engine.asked[0]}) == 3
    trained = {result.client: result.weights.params for result in engine.came[0]}
    cohorts = [{job.client for job in jobs} for jobs in engine.asked]
    assert cohorts[0] != cohorts[1]
    for job in engine.asked[1]:
        assert job.start.spec == world.env.server_spec
        # A client that was absent before gets the global units that most clients have.
        # Of units that equally many clients have, it gets the first ones.
        own = trained.get(job.client, trained[min(trained)])
        for name, value in job.start.params.items():
            if name.startswith("hidden"):
                torch.testing.assert_close(value, own[name], rtol=1e-12, atol=1e-12)
    assert _most_shared(torch.tensor([[0, 4, 2], [2, 3, 1], [4, 5, 2]])).tolist() == [0, 2, 4]


def test_with_fixed_widths_all_go_on_from_the_whole_model() -> None:
    engine = Seen()
    world = training(m=3, widths="fixed", retrain=False, fold_batch_norm=False, model=CNN)
    first, second = all_steps(world, engine)
    assert all(job.start is first.after.state["weights"] for job in engine.asked[1])
    assert second.after.state["weights"].spec == world.env.server_spec


def test_clients_that_are_skipped_leave_the_round() -> None:
    """Skipped clients leave the round in every step.

    If no clients are left, the model and the assignments do not change.
    """
    world, engine = training(rounds=1), Seen()
    first = next(run(world.aggregator, world.env, engine, world.data)).after.state
    env = world.env.at(0, 1)
    results = list(Serial().map(world.aggregator.plan(first, env), world.data))
    state, metrics = world.aggregator.update(first, [results[1], results[3]], env)
    assert state["matching"]["cohort"] == [1, 3] and metrics["clients"] == 2
    assert {name: each.shape[0] for name, each in state["matching"]["units"].items()} == {
        "hidden.0.weight": 2,
        "hidden.1.weight": 2,
    }
    assert torch.equal(state["matching"]["counted"], first["matching"]["counted"][[1, 3]])
    assert torch.equal(
        state["matching"]["units"]["hidden.0.weight"][1],
        first["matching"]["units"]["hidden.0.weight"][3],
    )
    last, metrics = world.aggregator.update(state, results[3:], world.env.at(0, 2))
    assert last["cohort"] == [3] and metrics["clients"] == 1
    nobody, metrics = world.aggregator.update(state, [], world.env.at(0, 2))
    assert metrics == {"clients": 0} and nobody["weights"] is first["weights"]
    assert world.aggregator.position(nobody, 3) == (1, 0) and nobody["matching"] is None


def test_what_is_delivered_is_evaluated_stored_and_loaded(tmp_path: Path) -> None:
    world = training(model=CNN)
    grown = world.run().state["weights"]
    arguments = dict(grown.spec.kwargs)
    assert arguments["norm"] == "none" and arguments["channels"][0] > 3
    save_outcome(world.aggregator.outcome({"weights": grown}), None, tmp_path)
    stored = ModelFolder.open(tmp_path).weights(0)
    assert stored.spec == grown.spec
    assert_same(tensors(stored), tensors(grown))
    test = world.data.test
    measured = Evaluator(world.env.task, 7)(Outcome((grown,), "global"), test, "test")[
        "test/global/loss"
    ]
    with torch.no_grad():
        output = stored.module()(test.inputs(slice(None)))
    assert measured == pytest.approx(float(nn.functional.cross_entropy(output, test.y)))


# what is refused


OTHERS = {
    "BatchNorm": (
        MODELS["cnn, BatchNorm"],
        {"fold_batch_norm": False},
        "'norms.0' is a norm layer",
    ),
    "resnet": (MODELS["resnet, BatchNorm"], {}, "BatchNorms cannot be folded into its layers"),
    "resnet, unfolded": (
        MODELS["resnet, BatchNorm"],
        {"fold_batch_norm": False},
        "is a norm layer",
    ),
    "LayerNorm": (MODELS["gated"], {}, "'norm' is a norm layer"),
    "tied": (
        spec_of("tests.methods.test_pfnm.Residual"),
        {},
        "hidden.weight and second.weight share their units",
    ),
    "tied, retrained": (
        spec_of("tests.methods.test_pfnm.Residual"),
        {"widths": "fixed", "retrain": True},
        "share their units",
    ),
    "fixed": (MODELS["concatenated"], {}, "widths cannot be changed"),
    **{
        name: (spec, {"widths": "fixed", "fold_batch_norm": False}, name)
        for name, spec in REFUSED.items()
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_networks_that_do_not_fit_are_refused(name: str) -> None:
    spec, options, words = OTHERS[name]
    with pytest.raises(ConfigError, match=words) as error:
        NAFILayerwise(**{"retrain": False, **options}).check(spec, IMAGE)
    if name == "BatchNorm":
        assert error.value.facts["to do"] == "set aggregator.fold_batch_norm=true"


def test_outputs_that_are_no_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one row per class"):
        FedMA().check(spec_of("tests.methods.test_fedma.Mask"), IMAGE)


class Mask(nn.Module):
    """A network with one logit per pixel."""

    def __init__(self, *, num_classes: int, hidden: int = 4) -> None:
        super().__init__()
        self.hidden, self.output = nn.Conv2d(2, hidden, 3, padding=1), nn.Conv2d(hidden, 1, 1)

    @staticmethod
    def with_widths(kwargs, widths):
        return {"hidden": widths["hidden.weight"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(x)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sigma", 0),
        ("gamma", -1.0),
        ("lam", -0.1),
        ("retrain_epochs", 0),
        ("retrain_lr", 0.0),
        ("output_epochs_factor", 0),
        ("output_lr_factor", -1.0),
        ("output_weight_decay", -1e-4),
        ("widths", "free"),
    ],
)
def test_settings_without_meaning_are_refused(key: str, value) -> None:
    with pytest.raises(ConfigError, match="lambda" if key == "lam" else key):
        build(NAFILayerwise, {key: value}, "aggregator")


@pytest.mark.parametrize(("key", "value"), [("retrain_epochs", 2), ("retrain_lr", 0.02)])
def test_settings_of_retraining_without_retraining_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no effect with retrain=false"):
        build(NAFILayerwise, {key: value, "retrain": False}, "aggregator")


def test_clients_with_other_architectures_are_refused() -> None:
    """Clients with other architectures are refused, for example with another depth."""
    with pytest.raises(ConfigError, match="must have one architecture"):
        Experiment.of(
            compose(["method=nafi_layerwise", "architectures.clients=[mlp,mlp_784_400_200_100]"])
        )


def test_trainers_that_keep_something_at_the_clients_need_fixed_widths() -> None:
    world = training()
    env = replace(world.env, trainer=MoonLike())
    with pytest.raises(ConfigError, match="stores a state at the clients"):
        world.aggregator.init(env)
    FedMA(widths="fixed", retrain=False).init(env)
