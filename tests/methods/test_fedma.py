"""Layer-wise matching: an independent loop form, closed forms, the steps of a round, cycles, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedexp.aggregators.fedma import FedMA
from fedexp.aggregators.nafi_layerwise import NAFILayerwise
from fedexp.core.aggregator import State
from fedexp.core.build import build
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError
from fedexp.core.runner import Snapshot, Step, run
from fedexp.core.seeds import numpy_generator
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.matching.beta_bernoulli import BetaBernoulli, match
from fedexp.matching.embedding import Embedding
from fedexp.matching.folding import fold_batch_norm
from fedexp.matching.structure import structure_of, with_widths
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.model_folder import ModelFolder, save_outcome
from tests.matching.nets import CLASSES, IMAGE, MODELS, REFUSED, spec_of, weights_of
from tests.methods.fusion_world import models_of, results_of, tensors, world_of
from tests.reference.matching_loops import Constants
from tests.reference.matching_loops import matched as looped
from tests.world import CPU, World, assert_same, make_data, make_world

COUNTS = [[5, 2, 0], [3, 9, 1], [0, 2, 2], [4, 4, 4]]
EVEN = [[2, 3, 4]] * 4


class Branches(nn.Module):
    """Two convolutions of the image side by side, flattened into a linear layer with the image's mean before them."""

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
    """A world of `spec` on `IMAGE`, without composing it again."""
    world = composed()
    experiment = replace(world.experiment, aggregator=build(kind, {"retrain": False, **options}, "aggregator"))
    return World(experiment, replace(world.env, specs=Specs(spec)), world.data)


def merged(world: World, models: Sequence[Weights], counts: Sequence[Sequence[int]] = EVEN) -> tuple[Weights, dict]:
    """What one shot without retraining makes of `models`, and what is logged."""
    state = world.aggregator.init(world.env)
    state, metrics = world.aggregator.update(state, results_of(models, counts), world.env)
    return state["weights"], metrics


def function_of(weights: Weights) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return weights.module()(torch.randn(9, *IMAGE, generator=rng, dtype=torch.float64))


def blocks(model: Weights) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Weight (out, units of the layer before, entries a unit) and bias of every layer of a chain."""
    layers = structure_of(model.spec, IMAGE).layers
    found, units = [], IMAGE[0]
    for layer in layers:
        weight = model.params[layer.weight].numpy()
        if not found and layer.kind == "linear":
            units = weight.shape[1]
        found.append((weight.reshape(len(weight), units, -1), layer.bias and model.params[layer.bias].numpy()))
        units = len(weight)
    return found


def written_out(models, counts, k: Constants, orders) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """One-shot layer-wise matching of chains, unit by unit."""
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
            shares = [[n / t if t else 1 / N for n, t in zip(row, total, strict=True)] for row in counts]
            weight = sum(np.array(f)[:, None, None] * w for f, w in zip(shares, wide, strict=True))
            bias = None if biases[0] is None else sum(np.array(f) * b for f, b in zip(shares, biases, strict=True))
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
        result.append((theta[:, :entries].reshape(len(theta), width, -1), None if biases[0] is None else theta[:, -1]))
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
    """Classes absent at clients: the same network in the same order of units."""
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
    assert any(w > group.size for w, group in zip(widths, structure_of(spec, IMAGE).groups, strict=False))
    for (weight, bias), (weight_, bias_) in zip(blocks(found), expected, strict=True):
        np.testing.assert_allclose(weight, weight_, rtol=1e-9, atol=1e-12)
        assert (bias is None) == (bias_ is None)
        if bias is not None:
            np.testing.assert_allclose(bias, bias_, rtol=1e-9, atol=1e-12)


def shrunk(model: Weights, copies: int, ratio: float = 1.0) -> Weights:
    """What N copies make of a model: all but the output layer counts N times, the prior sigma / sigma0 times."""
    params = {}
    for name, value in model.params.items():
        mu0 = 0.1 if name.endswith("bias") else 0.0
        params[name] = value if name.startswith("output") else (ratio * mu0 + copies * value) / (ratio + copies)
    return Weights(model.spec, params, model.buffers)


@pytest.mark.parametrize("name", NETS)
def test_permuted_copies_shrink(name: str) -> None:
    """N / (N + 1) a layer, (0.1 + N b) / (N + 1) for biases, an output layer as it was; no unit is lost or added."""
    spec, model = NETS[name], models_of(NETS[name], 1)[0]
    structure, world = structure_of(spec, IMAGE), matching(spec, gamma=0.01)
    for copies in (1, 4):
        same, metrics = merged(world, [model] * copies, EVEN[:copies])
        assert same.spec == spec
        assert_same(tensors(same), tensors(shrunk(model, copies)), 1e-12)
        moved = [model, *(structure.permute_weights(model, structure.random(seed)) for seed in range(copies - 1))]
        result, metrics = merged(world, moved, EVEN[:copies])
        assert result.spec == spec
        torch.testing.assert_close(function_of(result), function_of(shrunk(model, copies)), rtol=1e-11, atol=1e-11)
    assert metrics["fusion/matched"] == 1 and metrics["fusion/log_ratio"] == pytest.approx(-np.log(4))


@pytest.mark.parametrize("name", NETS)
def test_the_order_of_units_does_not_matter(name: str) -> None:
    spec, models = NETS[name], models_of(NETS[name], 3)
    world, structure = matching(spec, gamma=1.0, sigma=0.02), structure_of(spec, IMAGE)
    moved = [structure.permute_weights(model, structure.random(seed)) for seed, model in enumerate(models)]
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


@pytest.mark.parametrize("name", ["resnet, BatchNorm", "resnet, one group", "gated", "cnn, BatchNorm", "concatenated"])
def test_fixed_widths_take_any_network_that_has_a_structure(name: str) -> None:
    """Permuted copies give the model: norms, running statistics and tied layers move with their units."""
    spec, model = MODELS[name], models_of(MODELS[name], 1)[0]
    structure = structure_of(spec, IMAGE)
    world = matching(spec, widths="fixed", fold_batch_norm=False, sigma0=1e12)
    world.aggregator.check(spec, IMAGE)
    copies = [model, *(structure.permute_weights(model, structure.random(seed)) for seed in range(2))]
    result, metrics = merged(world, copies, EVEN[:3])
    assert result.spec == spec and metrics["fusion/matched"] == 1
    assert_same(tensors(result), tensors(model), 1e-9)


def test_with_fixed_widths_and_no_prior_it_is_the_average() -> None:
    """Of models that agree about their units; with class counts, rows of the output are weighted by them."""
    spec, models = MODELS["cnn"], models_of(MODELS["cnn"], 3)
    close = [
        Weights(spec, {k: models[0].params[k] + 0.1 * (v - models[0].params[k]) for k, v in m.params.items()}, {})
        for m in models
    ]
    mean = {k: torch.stack([m.params[k] for m in close]).mean(0) for k in close[0].params}
    options = {"widths": "fixed", "sigma0": 1e14}
    assert_same(tensors(merged(matching(spec, **options), close)[0]), [mean], 1e-11)
    by_size, _ = merged(matching(spec, **options, last_layer="samples"), close, COUNTS)
    assert_same(tensors(by_size), [mean], 1e-11)  # ten samples each
    by_class, _ = merged(matching(spec, **options), close, COUNTS)
    rows = torch.tensor(COUNTS[:3]).double() / torch.tensor(COUNTS[:3]).sum(0)
    for name in ("output.weight", "output.bias"):
        expected = sum(torch.einsum("c,c...->c...", f, m.params[name]) for f, m in zip(rows, close, strict=True))
        torch.testing.assert_close(by_class.params[name], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_class.params["hidden.0.weight"], mean["hidden.0.weight"], rtol=1e-11, atol=1e-11)


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


def test_batch_norm_is_folded_before_the_first_match() -> None:
    spec, model = MODELS["cnn, BatchNorm"], models_of(MODELS["cnn, BatchNorm"], 1)[0]
    folded = fold_batch_norm(model, IMAGE)
    structure = structure_of(spec, IMAGE)
    copies = [model, structure.permute_weights(model, structure.random(0))]
    world = matching(spec, sigma0=1e12, gamma=0.01)
    world.aggregator.check(spec, IMAGE)
    result, _ = merged(world, copies, EVEN[:2])
    assert result.spec == folded.spec != spec and not result.buffers
    torch.testing.assert_close(function_of(result), function_of(model), rtol=1e-9, atol=1e-9)
