"""All parts of fedexp treat a network with changed widths as an ordinary model."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedexp.core.engine import Engine
from fedexp.core.errors import ConfigError
from fedexp.core.layers import check_head, layers_of
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.outcome import Outcome
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers
from fedexp.evaluation.evaluate import Evaluator
from fedexp.matching.structure import structure_of, with_widths
from fedexp.storage.checkpoint import Checkpoint
from fedexp.storage.model_folder import ModelFolder, save_outcome
from tests.matching.nets import CLASSES, IMAGE, MODELS, spec_of, weights_of
from tests.reference.widening import Widening, widened
from tests.world import CPU, World, assert_same, make_data, make_world

GROWING = [
    "mlp",
    "mlp without biases, with dropout",
    "linear",
    "cnn",
    "cnn, flattened at once",
    "unet, BatchNorm",
]
CNN = {
    "_target_": "fedexp.models.cnn.ConvNet",
    "channels": [3],
    "kernel": 1,
    "hidden": [5],
    "norm": "batch",
}


class Untrue(nn.Module):
    """A network that has one unit more than its argument says."""

    def __init__(self, *, hidden: int = 4) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(128, hidden), nn.Linear(hidden, CLASSES)

    @staticmethod
    def with_widths(kwargs, widths):
        return {"hidden": widths["hidden.weight"] + 1}

    def forward(self, x):
        return self.output(torch.relu(self.hidden(x.flatten(1))))


def output(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    net = Net(weights.spec, CPU, x.dtype)
    net.train(False)
    with torch.no_grad():
        return net(weights.params, weights.buffers, x)


@pytest.mark.parametrize("name", GROWING)
def test_spec_with_widths_changes_only_named_layers(name: str) -> None:
    spec = MODELS[name]
    sizes = {group.name: group.size for group in structure_of(spec, IMAGE).groups}
    assert with_widths(spec, IMAGE, sizes) == with_widths(spec, IMAGE, {}) == spec
    for group, size in sizes.items():
        for width in (1, size + 3):
            changed = structure_of(with_widths(spec, IMAGE, {group: width}), IMAGE)
            assert {g.name: g.size for g in changed.groups} == sizes | {group: width}
            assert changed.output.size == CLASSES


def test_defaults_are_widths_too() -> None:
    bare = spec_of("fedexp.models.mlp.MLP")
    assert dict(with_widths(bare, IMAGE, {"hidden.0.weight": 70}).kwargs)["hidden"] == (70,)
    assert with_widths(bare, IMAGE, {"hidden.0.weight": 64}) == bare


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "cnn, flattened at once", "cnn, BatchNorm", "unet, BatchNorm"]
)
def test_a_grown_model_computes_what_it_computed(name: str) -> None:
    """A model with added units computes the same outputs as before.

    In flattened maps, an added channel shifts the columns of all later channels.
    """
    weights = weights_of(MODELS[name], 3)
    groups = structure_of(weights.spec, IMAGE).groups
    grown = widened(
        weights, with_widths(weights.spec, IMAGE, {g.name: g.size + 2 for g in groups}), IMAGE, 0
    )
    x = torch.randn(4, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(output(grown, x), output(weights, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "widths", "match"),
    [
        (
            spec_of("fedexp.models.resnet.ResNet", norm="batch", width=4, stem="cifar"),
            {},
            "widths cannot be changed",
        ),
        (spec_of("fedexp.models.cvae.Cvae"), {}, "ordered|mixes|layer"),
        (MODELS["gated"], {}, "widths cannot be changed"),
        (MODELS["mlp"], {"hidden.2.weight": 4}, "not a group of hidden units"),
        (MODELS["mlp"], {"output.weight": 4}, "not a group of hidden units"),
        (MODELS["mlp"], {"hidden.0.weight": 0}, "at least 1"),
        (spec_of("tests.matching.test_widths.Untrue"), {}, "does not return these widths"),
    ],
)
def test_widths_that_do_not_fit_are_refused(spec, widths, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        with_widths(spec, IMAGE, widths)


def test_a_frozen_extractor_with_a_head_is_refused() -> None:
    node = {
        "_target_": "fedexp.models.resnet_features.ResNetFeatures",
        "random_features": True,
        "width": 2,
    }
    with pytest.raises(ConfigError, match="widths cannot be changed"):
        with_widths(ModelSpec.of(node, (3, 8, 8), CLASSES), (3, 8, 8), {})


def widening(*overrides: str, model=None, rounds: int = 3) -> World:
    data = make_data((20, 12, 20, 20))
    world = make_world(
        *overrides,
        "method=fedavg",
        f"rounds={rounds}",
        data=data,
        **({"model": model} if model else {}),
    )
    world.experiment = replace(world.experiment, aggregator=Widening())
    return world


def growth(world: World, engine: Engine | None = None) -> Weights:
    model: Weights = world.run(engine=engine).state["weights"]
    return model


@pytest.mark.parametrize("kernel", ["auto", "vmap"])
@pytest.mark.parametrize("model", [None, CNN], ids=["mlp", "cnn with norm"])
def test_grown_models_train_further_stacked(kernel, model) -> None:
    world, engine = widening(model=model), Vectorized(stack=4, kernel=kernel)
    expected, found = growth(world), growth(world, engine)
    assert found.spec == expected.spec
    # Three rounds add one unit each
    assert dict(found.spec.kwargs)["hidden"] == ((8 if model else 11),)
    assert engine.stacked_steps
    assert_same([found.params, found.buffers], [expected.params, expected.buffers], 1e-9)


def test_grown_models_train_further_in_other_processes() -> None:
    world, engine = widening(model=CNN), Workers(workers=2)
    engine.open(Numerics(engine={}, threads=1, device="cpu", dtype="float64"), 1)
    try:
        assert_same([growth(world, engine).params], [growth(world).params])
    finally:
        engine.close()


@pytest.mark.parametrize("model", [None, CNN], ids=["mlp", "cnn with norm"])
def test_a_checkpoint_between_two_widths_is_resumed_to_the_bit(model, tmp_path: Path) -> None:
    world = widening(model=model)
    first = replace(world, env=replace(world.env, rounds=1)).run()
    Checkpoint(tmp_path, CPU).save(first, set(), 0)
    loaded = Checkpoint(tmp_path, CPU).load()
    assert loaded is not None
    resumed, straight = world.run(loaded[0]).state["weights"], growth(world)
    assert resumed.spec == straight.spec != first.state["weights"].spec
    assert_same([resumed.params, resumed.buffers], [straight.params, straight.buffers])


def test_a_grown_model_is_evaluated_and_delivered_as_any_other(tmp_path: Path) -> None:
    world = widening(model=CNN)
    start, grown = world.env.initial_weights(), growth(world)
    evaluate = Evaluator(world.env.task, 7)
    test, x = world.data.test, world.data.test.inputs(slice(None))
    for model in (start, grown, start):
        # `output` computes in evaluation mode
        loss = torch.nn.functional.cross_entropy(output(model, x), test.y)
        measured = evaluate(Outcome((model,), "global"), test, "test")["test/global/loss"]
        assert measured == pytest.approx(float(loss))
    right = ((output(start, x) + output(grown, x)).argmax(1) == test.y).double().mean()
    # The ensemble has two architectures
    both = evaluate(Outcome((start, grown), "ensemble"), test, "test")
    assert both["test/ensemble/acc"] == pytest.approx(float(right))
    save_outcome(Outcome((grown,), "global"), None, tmp_path)
    stored = ModelFolder.open(tmp_path).weights(0)
    assert stored.spec == grown.spec
    assert_same([stored.params, stored.buffers], [grown.params, grown.buffers])


def test_networks_cached_by_spec_are_evicted() -> None:
    world = make_world("method=fedavg")
    serial, evaluate = Serial(), Evaluator(world.env.task, 8)
    job = world.env.job(0, world.env.initial_weights(), {})
    specs = [
        with_widths(world.env.server_spec, world.env.input_shape, {"hidden.0.weight": 20 + i})
        for i in range(40)
    ]
    for spec in specs:
        start = Weights.init(spec, 0, CPU, torch.float64)
        net = serial.net(replace(job, start=start))
        assert serial.net(replace(job, start=start)) is net
        assert net.precision == "float32"
        evaluate(Outcome((start,), "global"), world.data.test, "test")
        check_head(spec, world.env.input_shape)
    serial.open(Numerics(engine={}, threads=1, device="cpu", dtype="float32", precision="bf16"), 1)
    assert serial.net(job).precision == "bf16"
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is Net and o.spec in specs]
    # These networks have two owners
    assert 2 <= len(alive) <= 32
    for kept in (layers_of, structure_of, check_head):
        assert kept.cache_info().currsize <= 16
