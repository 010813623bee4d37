"""Tests of the plain average, the class-masked average and the masked ensemble."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedexp.evaluation.evaluate import Evaluator
from fedexp.methods.bases.fusion import averaged
from fedexp.methods.bases.output_layer import masked_output, presence
from tests.matching.nets import MODELS
from tests.methods.fusion_world import fused, models_of, results_of, tensors, world_of
from tests.world import CPU, World, assert_same, make_data, make_world, resumed

SPEC = MODELS["mlp"]
ALL = [[5, 2, 9]] * 4


@pytest.mark.parametrize("last_layer", ["plain", "masked"])
@pytest.mark.parametrize("name", ["mlp", "resnet, BatchNorm"])
def test_copies_give_the_model(name: str, last_layer: str) -> None:
    world = world_of(MODELS[name], "method=average", f"aggregator.last_layer={last_layer}")
    model = models_of(MODELS[name], 1)[0]
    assert_same(tensors(fused(world, [model] * 4, ALL)), tensors(model), 1e-14)


def test_uniform_mean_and_the_largest_counter() -> None:
    models = models_of(MODELS["resnet, BatchNorm"], 3)
    mean = averaged(models)
    for name, value in {**mean.params, **mean.buffers}.items():
        each = [{**m.params, **m.buffers}[name] for m in models]
        if value.is_floating_point():
            torch.testing.assert_close(
                value, (each[0] + each[1] + each[2]) / 3, rtol=1e-12, atol=1e-14
            )
        else:
            assert value == 2


def test_masked_is_plain_where_every_class_is_everywhere() -> None:
    models = models_of(SPEC, 4)
    masked, plain = (
        world_of(SPEC, "method=average", f"aggregator.last_layer={x}") for x in ("masked", "plain")
    )
    assert_same(tensors(fused(masked, models, ALL)), tensors(fused(plain, models)), 1e-12)


def test_a_row_is_the_mean_of_those_who_know_its_class() -> None:
    """A row is the mean of the clients that have the class of the row.

    Clients 0 and 2 have class 0. Only client 1 has class 1. No client has class 2,
    because one sample is not enough.
    """
    models = models_of(SPEC, 3)
    world = world_of(SPEC, "method=average", "aggregator.last_layer=masked")
    result = fused(world, models, [[2, 1, 0], [1, 7, 1], [30, 0, 0]])
    for name in ("output.weight", "output.bias"):
        rows = [m.params[name] for m in models]
        torch.testing.assert_close(
            result.params[name][0], (rows[0][0] + rows[2][0]) / 2, rtol=1e-12, atol=0
        )
        assert torch.equal(result.params[name][1], rows[1][1])
        assert not result.params[name][2].any()
    plain = fused(world_of(SPEC, "method=average"), models)
    for name in set(result.params) - {"output.weight", "output.bias"}:
        assert torch.equal(result.params[name], plain.params[name])


def test_presence_means_more_than_one_sample() -> None:
    found = presence(results_of(models_of(SPEC, 2), [[0, 1, 2], [3, 0, 1]]))
    assert found.tolist() == [[False, False, True], [True, False, False]]


def test_masked_output_of_any_shape() -> None:
    rows = torch.arange(24.0).reshape(2, 3, 2, 2)
    out = masked_output(rows, torch.tensor([[True, False, False], [True, True, False]]))
    assert torch.equal(out, torch.stack([rows[:, 0].mean(0), rows[1, 1], torch.zeros(2, 2)]))


def test_a_masked_round_asks_for_the_counts_and_uses_them() -> None:
    """A masked round asks for the class counts and uses them.

    The test averages the trained models again with counts from the data.
    """
    world = make_world("method=average", "aggregator.last_layer=masked", "rounds=1")
    state = world.aggregator.init(world.env)
    jobs = world.aggregator.plan(state, world.env)
    from fedexp.engines.serial import Serial

    models = [result.weights.params for result in Serial().map(jobs, world.data)]
    y = world.data.train.y
    n = torch.stack([torch.bincount(y[world.data.partition.of(c)], minlength=3) for c in range(4)])
    after = world.run().state["weights"].params
    for c in range(3):
        known = [m["output.weight"][c] for m, row in zip(models, n, strict=True) if row[c] > 1]
        expected = sum(known) / len(known) if known else torch.zeros(8, dtype=torch.float64)
        torch.testing.assert_close(after["output.weight"][c], expected, rtol=1e-12, atol=1e-14)
    assert world.aggregator.plan(state, world.env)[0].probes
    assert not make_world("method=average").aggregator.plan(state, world.env)[0].probes


def evaluated(world):
    return Evaluator(world.experiment.task, 7)(
        world.aggregator.outcome(world.run().state), world.data.test, "test"
    )


def test_masked_ensemble_is_plain_where_every_class_is_everywhere() -> None:
    data = make_data((40, 50), seed=1)
    counts = [torch.bincount(data.train.y[data.partition.of(c)], minlength=3) for c in range(2)]
    assert min(int(n.min()) for n in counts) > 1
    plain, masked = (
        make_world("method=ensemble", f"aggregator.combine={x}", data=data)
        for x in ("logits", "masked")
    )
    a, b = evaluated(plain), evaluated(masked)
    assert a == {name: pytest.approx(value, rel=1e-12) for name, value in b.items()}


def test_masked_ensemble_averages_over_the_members_that_know_a_class() -> None:
    world = make_world("method=ensemble", "aggregator.combine=masked", "rounds=1")
    snapshot = world.run()
    outcome = world.aggregator.outcome(snapshot.state)
    y = world.data.train.y
    mask = torch.stack(
        [torch.bincount(y[world.data.partition.of(c)], minlength=3) > 1 for c in range(4)]
    )
    assert not mask.all() and torch.equal(outcome.weights, mask.float())
    logits = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    together = world.experiment.task.combine(list(logits), "logits", mask.float())
    for c in range(3):
        known = logits[mask[:, c], :, c]
        torch.testing.assert_close(together[:, c], known.mean(0) if len(known) else torch.zeros(5))
    # The weights of a class may have any values, not only 0 and 1.
    share = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    weighted = world.experiment.task.combine(list(logits), "logits", share)
    torch.testing.assert_close(weighted, torch.einsum("ic,inc->nc", share / share.sum(0), logits))
    with pytest.raises(ValueError, match=r"rule 'logits'"):
        world.experiment.task.combine(list(logits), "probs", share)
    nowhere = world.experiment.task.combine(list(logits), "logits", torch.zeros(4, 3))
    assert not nowhere.any()


def test_an_ensemble_may_weigh_its_members_by_samples() -> None:
    world = make_world("method=ensemble", "aggregator.combine=samples", "rounds=1")
    outcome = world.aggregator.outcome(world.run().state)
    assert outcome.combine == "logits" and outcome.weights.tolist() == [20, 12, 17, 9]


def test_a_masked_ensemble_of_one_is_masked_too() -> None:
    """A masked ensemble with one member is masked too.

    A class that no client has gets the logit 0, whatever the member's output is.
    """
    data = make_data((30,), num_classes=2)
    world = make_world("method=ensemble", "aggregator.combine=masked", "rounds=1", data=data)
    from dataclasses import replace

    outcome = world.aggregator.outcome(world.run().state)
    without = replace(outcome, weights=torch.tensor([[1.0, 0.0]]))
    a, b = (Evaluator(world.experiment.task, 7)(o, data.test, "test") for o in (outcome, without))
    assert a["test/ensemble/loss"] != b["test/ensemble/loss"]


def test_what_members_know_survives_a_checkpoint_and_absent_clients(tmp_path: Path) -> None:
    straight = make_world("method=ensemble", "aggregator.combine=masked", "rounds=4", m=2)
    expected = straight.aggregator.outcome(straight.run().state)

    def make(rounds: int) -> World:
        return make_world("method=ensemble", "aggregator.combine=masked", f"rounds={rounds}", m=2)

    outcome = straight.aggregator.outcome(resumed(make, 4, tmp_path).state)
    assert torch.equal(outcome.weights, expected.weights) and len(outcome.models) == len(
        outcome.weights
    )
    assert_same([m.params for m in outcome.models], [m.params for m in expected.models])


def test_a_masked_ensembles_run_keeps_its_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedexp.commands.run import run_command
    from fedexp.storage.tensors import load_tree

    monkeypatch.chdir(tmp_path)
    arguments = [
        "method=ensemble",
        "aggregator.combine=masked",
        "rounds=1",
        "clients=3",
        "partition.alpha=0.1",
    ]
    assert run_command([*arguments, "model.hidden=[4]"]) == 0
    (path,) = tmp_path.glob("outputs/runs/*/*/model.safetensors")
    tensors, facts = load_tree(path, CPU)
    assert facts["combine"] == "logits"
    assert tensors["weights"].shape == (3, 10) and set(tensors["weights"].unique().tolist()) == {
        0.0,
        1.0,
    }
