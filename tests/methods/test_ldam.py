"""LDAM: tests of margins and weights against known numbers, its loss, and its scale."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, DataError
from fedexp.core.outcome import Outcome
from fedexp.core.runner import Snapshot, next_jobs
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Batch
from fedexp.core.weights import ModelSpec, Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.evaluation.evaluate import Evaluator
from fedexp.methods.ldam import Ldam, class_weights, margins
from fedexp.running.experiment import Experiment
from fedexp.tasks.classification import Classification
from tests.engines.compare import assert_same_results
from tests.world import CPU, make_data, make_world

COUNTS = [156, 709, 301, 2629, 20, 651, 915, 113, 180, 2133]  # client 0 of DENSE's split


def loss_of(
    trainer: Ldam, logits: Tensor, y: Tensor, counts: list[int], step: int = 0, steps: int = 10
) -> Tensor:
    """Return the loss of a network that outputs `logits`."""
    ctx = SimpleNamespace(class_counts=torch.tensor(counts), step=step, num_steps=steps)
    return trainer.loss(lambda params, buffers, x: x, {}, {}, Batch(logits, y), ctx)


def test_margins_of_a_client_of_denses_split() -> None:
    expected = [0.2992, 0.2049, 0.2539, 0.1477, 0.5, 0.2093, 0.1923, 0.3243, 0.2887, 0.1556]
    assert margins(torch.tensor(COUNTS), 0.5).tolist() == pytest.approx(expected, abs=5e-5)
    assert margins(torch.tensor([7, 7, 7]), 0.5).tolist() == [0.5] * 3


def test_absent_classes_have_no_margin_and_change_none() -> None:
    assert margins(torch.tensor([16, 0, 81, 0]), 0.5).tolist() == pytest.approx(
        [0.5, 0, 0.5 * 2 / 3, 0]
    )


def test_deferred_weights() -> None:
    counts = [1771, 2695, 1251, 1407, 665, 314, 1419, 3469]
    expected = [0.5773, 0.3966, 0.7968, 0.7139, 1.4564, 3.0311, 0.7083, 0.3197]
    assert class_weights(torch.tensor(counts), 0.9999).tolist() == pytest.approx(expected, abs=5e-5)
    with_absent = class_weights(torch.tensor([0, *counts, 0]), 0.9999).tolist()
    assert with_absent == pytest.approx([0, *expected, 0], abs=5e-5) and sum(
        with_absent
    ) == pytest.approx(8)
    assert class_weights(torch.tensor([5, 1, 0]), 0.0).tolist() == [1, 1, 0]


@pytest.mark.parametrize(("y", "expected"), [(4, 9.33534300), (3, 10.43098963)])
def test_the_loss_of_one_sample(y: int, expected: float) -> None:
    """The loss of one sample equals a known number.

    The cosines z are 0.3 at class 4, 0.1 at class 3 and 0 elsewhere. The network's
    output is 30 z.
    """
    z = torch.zeros(1, 10, dtype=torch.float64)
    z[0, 4], z[0, 3] = 0.3, 0.1
    assert loss_of(Ldam(), 30 * z, torch.tensor([y]), COUNTS).item() == pytest.approx(
        expected, abs=5e-8
    )


def test_zero_counts_leave_loss_and_gradient_finite() -> None:
    logits = torch.randn(6, 4, generator=torch_generator("logits")).requires_grad_()
    for step in (0, 9):  # a step before the reweighting and one after its start
        loss = loss_of(Ldam(drw=0.8), logits, torch.tensor([0, 2, 2, 0, 2, 2]), [3, 0, 9, 0], step)
        assert loss.isfinite() and torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_classes_are_weighted_from_the_given_share_of_steps_on() -> None:
    logits = torch.randn(8, 3, dtype=torch.float64, generator=torch_generator("logits"))
    y, counts = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]), [50, 9, 2]
    trainer = Ldam(drw=0.8, beta=0.9)
    shifted = logits - 30 * margins(torch.tensor(counts), 0.5) * F.one_hot(y, 3)
    early, late = (loss_of(trainer, logits, y, counts, step) for step in (7, 8))
    torch.testing.assert_close(early, F.cross_entropy(shifted, y))
    torch.testing.assert_close(
        late, F.cross_entropy(shifted, y, weight=class_weights(torch.tensor(counts), 0.9))
    )
    assert abs(late - early) > 0.1


def test_stacked_clients_have_their_own_margins_and_weights() -> None:
    world = make_world(
        "method=ldam", "trainer.drw=0.5", "trainer.beta=0.9", data=make_data((18,) * 3)
    )
    jobs = next_jobs(world.aggregator, world.env, Snapshot(0, world.aggregator.init(world.env)))
    engine = Vectorized(3, "vmap")
    assert_same_results(
        list(engine.map(jobs, world.data)), list(Serial().map(jobs, world.data)), 1e-9
    )
    assert engine.stacked_steps > 0


def test_an_ensemble_of_cosines_decides_alike_at_any_scale_but_its_losses_differ() -> None:
    data = make_data((12, 12))
    node = {"_target_": "fedexp.models.cnn.ConvNet", "channels": [3], "kernel": 1, "hidden": [4]}
    specs = [ModelSpec.of(node | {"cosine_scale": scale}, (1, 2, 2), 3) for scale in (1.0, 30.0)]
    members = [Weights.init(specs[0], seed, CPU, torch.float64) for seed in (1, 2)]
    raw, scaled = (
        Evaluator(Classification(), 8)(
            Outcome(tuple(replace(m, spec=s) for m in members), "ensemble"), data.test, "test"
        )
        for s in specs
    )
    assert raw["test/ensemble/acc"] == scaled["test/ensemble/acc"]
    assert abs(raw["test/ensemble/loss"] - scaled["test/ensemble/loss"]) > 0.5


def test_scales_that_disagree_are_refused() -> None:
    quick = ["method=ldam", "dataset=mnist", "data_root=nowhere", "model=cnn_mnist"]
    with pytest.raises(ConfigError, match="differently from the loss") as refused:
        Experiment.of(compose([*quick, "model.cosine_scale=16"]))
    assert "trainer.s=16" in str(refused.value)
    with pytest.raises(DataError):  # everything else is correct
        Experiment.of(compose([*quick, "model.cosine_scale=30"]))
