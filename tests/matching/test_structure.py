"""Tests of units that can be reordered: equal functions, factors and soft maps."""

from __future__ import annotations

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.net import Net
from fedexp.matching.structure import structure_of
from fedexp.matching.tainting import flows_of
from fedexp.running.experiment import Experiment
from tests.matching.nets import IMAGE, MODELS, REFUSED, weights_of
from tests.world import assert_same

CPU, DOUBLE = torch.device("cpu"), torch.float64


def outputs(weights, x):
    net = Net(weights.spec, CPU, DOUBLE)
    net.train(False)
    with torch.no_grad():
        return net(weights.params, weights.buffers, x)


@pytest.mark.parametrize("name", MODELS)
def test_a_permuted_network_computes_the_same(name):
    structure = structure_of(MODELS[name], IMAGE)
    weights = weights_of(MODELS[name], 0)
    maps = structure.random(7)
    moved = structure.permute_weights(weights, maps)
    x = torch.randn(5, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    torch.testing.assert_close(outputs(moved, x), outputs(weights, x), rtol=1e-9, atol=1e-9)
    # The units of every group moved
    for group in structure.groups:
        for layer in group.layers:
            rows = structure.move_inputs(layer, weights.params[layer], maps)
            assert torch.equal(moved.params[layer], rows[maps[group.name]])
            assert not torch.equal(moved.params[layer], rows)


@pytest.mark.parametrize("name", MODELS)
def test_the_inverse_permutation_moves_back(name):
    structure = structure_of(MODELS[name], IMAGE)
    weights = weights_of(MODELS[name], 0)
    maps = structure.random(7)
    back = structure.permute_weights(
        structure.permute_weights(weights, maps), {g: p.argsort() for g, p in maps.items()}
    )
    assert_same([{**back.params, **back.buffers}], [{**weights.params, **weights.buffers}])


@pytest.mark.parametrize("name", MODELS)
def test_a_permutation_matrix_moves_as_its_permutation(name):
    """A permutation matrix T moves weights like its permutation.

    The matrix has T[perm[j], j] = 1.
    """
    structure = structure_of(MODELS[name], IMAGE)
    weights = weights_of(MODELS[name], 0)
    maps = structure.random(3)
    soft = {g: torch.eye(len(p), dtype=DOUBLE)[:, p] for g, p in maps.items()}
    a, b = structure.permute_weights(weights, maps), structure.permute_weights(weights, soft)
    assert_same([{**a.params, **a.buffers}], [{**b.params, **b.buffers}], 1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("soft", [False, True])
def test_factors_of_a_layers_input_side_follow(name, soft):
    """The product W K is equal to the product of the moved weight and the moved factor.

    This also holds for the kernels of convolutions.
    """
    structure = structure_of(MODELS[name], IMAGE)
    weights = weights_of(MODELS[name], 0)
    generator = torch.Generator().manual_seed(0)
    maps = structure.random(3)
    for layer in structure.layers:
        weight = weights.params[layer.weight]
        moved = structure.move_inputs(layer.weight, weight, maps)
        K = torch.randn(weight[0].numel(), 3, generator=generator, dtype=DOUBLE)
        by = {g: torch.eye(len(p), dtype=DOUBLE)[:, p] for g, p in maps.items()} if soft else maps
        K_moved = structure.permute_inputs(layer.weight, K, by)
        torch.testing.assert_close(
            moved.flatten(1) @ K_moved, weight.flatten(1) @ K, rtol=1e-10, atol=1e-10
        )


def test_flattened_maps_move_in_blocks():
    """Channel c of a 4x4 map belongs to columns 16 c to 16 c + 15 of the next layer."""
    spec = MODELS["cnn, flattened at once"]
    structure = structure_of(spec, IMAGE)
    (group,) = structure.groups
    slot = structure.inputs("output.weight")[0]
    assert torch.equal(slot.positions, torch.arange(5 * 16).reshape(5, 16))
    weight = weights_of(spec, 0).params["output.weight"]
    perm = torch.tensor([3, 1, 4, 0, 2])
    moved = structure.move_inputs("output.weight", weight, {group.name: perm})
    assert torch.equal(moved, weight.reshape(3, 5, 16)[:, perm].reshape(3, 80))


def test_concatenated_maps_are_two_groups_of_one_layers_inputs():
    """A block of the upward path reads maps of the downward path and upsampled maps.

    The former come first.
    """
    spec = MODELS["unet, BatchNorm"]
    structure = structure_of(spec, IMAGE)
    # No layers have to share a permutation
    assert all(len(group.layers) == 1 for group in structure.groups)
    sizes = {group.name: group.size for group in structure.groups}
    for layer, above, below in (
        ("up.0.convs.0", "down.1.convs.0", "down.2.convs.0"),
        ("up.1.convs.0", "down.0.convs.1", "up.0.convs.0"),
    ):
        a, b = sizes[f"{above}.weight"], sizes[f"{below}.weight"]
        found = {
            slot.group: slot.positions[:, 0].tolist()
            for slot in structure.inputs(f"{layer}.weight")
        }
        assert found == {
            f"{above}.weight": list(range(a)),
            f"{below}.weight": list(range(a, a + b)),
        }


def test_large_maps_are_traced_in_parts(monkeypatch):
    for name in ("cnn", "resnet, BatchNorm", "unet, BatchNorm", "gated"):
        monkeypatch.setattr("fedexp.matching.tainting._BYTES", 2**24)
        whole = flows_of(MODELS[name], IMAGE)
        monkeypatch.setattr("fedexp.matching.tainting._BYTES", 1)
        parts = flows_of(MODELS[name], IMAGE)
        assert parts.outputs == whole.outputs
        found, expected = (
            {
                f"{reader}/{source}": units
                for reader, sources in flows.reads.items()
                for source, units in sources.items()
            }
            for flows in (parts, whole)
        )
        assert_same([found], [expected])


def test_structure_of_summed_layers_has_one_group():
    structure = structure_of(MODELS["resnet, BatchNorm"], IMAGE)
    tied = {group.name: group.layers for group in structure.groups}
    assert tied["conv.weight"] == (
        "conv.weight",
        "stages.0.0.conv2.weight",
        "stages.0.1.conv2.weight",
    )
    assert "stages.1.0.shortcut.0.weight" in tied["stages.1.0.conv2.weight"]
    assert len(tied) == 12
    gated = structure_of(MODELS["gated"], IMAGE)
    assert [group.layers for group in gated.groups] == [("conv.weight", "gate.weight")]


@pytest.mark.parametrize("reason", REFUSED)
def test_networks_without_exchangeable_units_are_refused(reason):
    with pytest.raises(ConfigError, match=reason) as error:
        structure_of(REFUSED[reason], IMAGE)
    assert "where:" in str(error.value) and "to do:" in str(error.value)


def test_a_method_that_matches_refuses_such_a_model_before_anything_runs():
    overrides = ["method=ot_fusion", "model=resnet18_gn", "model.width=4"]
    with pytest.raises(ConfigError, match="2 groups of channels"):
        Experiment.of(compose(overrides))
    Experiment.of(compose([*overrides, "model.groups=1"]))
    Experiment.of(compose([*overrides, "method=average"]))
