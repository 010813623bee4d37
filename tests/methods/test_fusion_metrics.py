"""All methods that match hidden units log the same metrics and keep frozen layers."""

from __future__ import annotations

import math

import pytest
import torch

from fedexp.core.weights import Weights
from fedexp.matching.widths import width_metrics
from tests.matching.nets import MODELS, spec_of
from tests.methods.fusion_world import fused, models_of, results_of, world_of


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "overrides",
    [
        ("method=ot_fusion",),
        ("method=ot_fusion", "aggregator.fold=running"),
        ("method=git_rebasin",),
        ("method=gamf", "aggregator.joint.sweeps=6", "aggregator.joint.final=4"),
        ("method=gamf", "aggregator.mode=pairwise", "aggregator.pairwise.sweeps=1"),
    ],
)
def test_equal_widths(overrides: tuple[str, ...], count: int) -> None:
    """With equal widths, every unit has one partner in each other model."""
    spec = MODELS["cnn"]
    world = world_of(spec, *overrides)
    metrics = world.aggregator.fuse(results_of(models_of(spec, count)), world.env)[1]
    found = {name: value for name, value in metrics.items() if name.startswith("fusion/")}
    widths = [
        world.env.initial_weights().params[layer.weight].shape[0] for layer in world.env.layers[:-1]
    ]
    assert found == {
        **{f"fusion/width_{number}": float(width) for number, width in enumerate(widths, start=1)},
        "fusion/log_ratio": pytest.approx(-math.log(count)),
        "fusion/matched": float(count > 1),
    }


def test_without_hidden_layers_there_is_nothing_to_say() -> None:
    world = world_of(MODELS["linear"], "method=git_rebasin")
    metrics = world.aggregator.fuse(results_of(models_of(MODELS["linear"], 2)), world.env)[1]
    assert not any(name.startswith("fusion/") for name in metrics)


def test_widths_ratio_and_share() -> None:
    """The metrics contain the widths, the log ratio and the share of matched units.

    There are two layers of three models. In them, 4 of 7 and 3 of 5 local units share
    their global unit.
    """
    units = [torch.tensor([0, 1, 2, 0, 3, 2, 4]), torch.tensor([0, 0, 1, 2, 0])]
    assert width_metrics(units, [5, 3]) == {
        "fusion/width_1": 5.0,
        "fusion/width_2": 3.0,
        "fusion/log_ratio": pytest.approx(math.log(8 / 12)),
        "fusion/matched": pytest.approx(7 / 12),
    }


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "overrides",
    [
        ("method=average", "aggregator.last_layer=masked"),
        ("method=ot_fusion",),
        ("method=ot_fusion", "aggregator.alignment.output=transported"),
        ("method=git_rebasin",),
        ("method=gamf", "aggregator.joint.sweeps=6", "aggregator.joint.final=4"),
        ("method=gamf", "aggregator.mode=pairwise", "aggregator.pairwise.sweeps=1"),
    ],
)
def test_a_frozen_output_layer_never_changes(overrides: tuple[str, ...], count: int) -> None:
    """A frozen output layer keeps its bits, also for a class that no client has.

    The units that it reads keep their order.
    """
    spec = spec_of("FrozenHead")
    start, *others = models_of(spec, count)
    frozen = start.frozen
    assert frozen == {"output.weight", "output.bias"}
    models = [start] + [
        Weights(
            spec,
            # The units of the hidden layers are in another order
            {
                name: start.params[name] if name in frozen else value.flip(0)
                for name, value in other.params.items()
            },
            {},
        )
        for other in others
    ]
    result = fused(world_of(spec, *overrides), models, [[5, 1, 0]] * count)
    for name, value in result.params.items():
        assert torch.equal(value, start.params[name]) == (name in frozen)
    mean = torch.stack([model.params["second.bias"] for model in models]).mean(0)
    torch.testing.assert_close(result.params["second.bias"], mean)
