"""Helpers that pass given models to a fusion method as if clients had sent them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedexp.core.data import Samples
from fedexp.core.env import Specs
from fedexp.core.jobs import ClientResult
from fedexp.core.weights import Weights
from fedexp.methods.bases.fusion import FusionAggregator
from tests.matching.nets import CLASSES, IMAGE, MODELS, weights_of
from tests.world import World, assert_same, make_data, make_world


def world_of(spec, *overrides: str) -> World:
    """Return a world of `overrides` with the model `spec`.

    The inputs are those of `tests.matching.nets`. Server data are random.
    """
    from dataclasses import replace

    world = make_world(*overrides, data=make_data((8, 8), num_classes=CLASSES))
    env = replace(world.env, specs=Specs(spec), input_shape=IMAGE)
    if env.proxy is not None:
        env = replace(env, proxy=random_samples(30))
    return World(world.experiment, env, world.data)


def random_samples(count: int) -> Samples:
    """Return unlabelled normal samples of the shape `IMAGE`."""
    x = torch.randn(count, *IMAGE, generator=torch.Generator().manual_seed(0)).double()
    return Samples(x, torch.full((count,), -1), dtype=torch.float64)


def results_of(
    models: Sequence[Weights], counts: Sequence[Sequence[int]] | None = None
) -> list[ClientResult]:
    """Return one result per model, with class counts if they are given."""
    probes = [
        {} if counts is None else {"class_counts": {"n": torch.tensor(counts[i])}}
        for i in range(len(models))
    ]
    return [
        ClientResult(client, model, 10, 1, {}, None, {"loss": 0.0}, probes=probe)
        for client, (model, probe) in enumerate(zip(models, probes, strict=True))
    ]


def fused(
    world: World, models: Sequence[Weights], counts: Sequence[Sequence[int]] | None = None
) -> Weights:
    """Return the result of fusing `models` with the world's method."""
    assert isinstance(world.aggregator, FusionAggregator)
    return world.aggregator.fuse(results_of(models, counts), world.env)[0]


def tensors(weights: Weights) -> list[dict[str, torch.Tensor]]:
    """Return parameters and buffers for comparison."""
    return [{**weights.params, **weights.buffers}]


def models_of(spec, count: int) -> list[Weights]:
    """Return models with similar units: small changes of one network.

    Integer buffers of model i are i.
    """
    base = weights_of(spec, "base")
    models = []
    for number in range(count):
        other = weights_of(spec, "other", number)

        def near(a, b, number=number):
            return {
                k: v + 0.3 * (b[k] - v) if v.is_floating_point() else v + number
                for k, v in a.items()
            }

        models.append(
            Weights(spec, near(base.params, other.params), near(base.buffers, other.buffers))
        )
    return models


def average_of_units_that_stay(method: str, count: int) -> None:
    """Assert that `method` averages models if no units move.

    This holds for a network without hidden layers. It also holds for models in which
    every unit is nearest to itself.
    """
    near = models_of(MODELS["cnn"], 1)[0]
    for models in (
        models_of(MODELS["linear"], count),
        [
            Weights(near.spec, {k: v * (1 + i / 100) for k, v in near.params.items()}, {})
            for i in range(count)
        ],
    ):
        world, mean = (world_of(models[0].spec, f"method={name}") for name in (method, "average"))
        assert_same(tensors(fused(world, models)), tensors(fused(mean, models)), 1e-14)
