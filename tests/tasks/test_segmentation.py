"""Tests of segmentation.

They cover closed forms of metrics and loss, ensembles, and training by both engines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedexp.config.compose import compose
from fedexp.core.net import Net
from fedexp.core.outcome import Outcome
from fedexp.core.runner import Snapshot, run
from fedexp.core.task import Batch
from fedexp.core.trainer import Ctx, Measured, Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.experiment import Experiment
from fedexp.tasks.segmentation import Segmentation
from tests.world import CPU

TASK = Segmentation()
TINY = [
    "task=segmentation",
    "model=unet",
    "model.down=[[4],[6]]",
    "model.up=[[4]]",
    "dataset=shapes_masks",
    "partition=iid",
]
TINY += [
    "dataset.shape=[1,8,8]",
    "dataset.samples=36",
    "dataset.test_samples=12",
    "clients=3",
    "local.batch_size=6",
]
TINY += ["dtype=float64"]


def drawn(count: int, *names: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits (count, 1, 5, 6) and masks."""
    generator = torch.Generator().manual_seed(sum(names))
    logits = torch.randn(count, 1, 5, 6, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 2, (count, 5, 6), generator=generator, dtype=torch.uint8)


def test_metrics_are_those_of_sets_of_pixels_averaged_over_images() -> None:
    logits, masks = drawn(4)
    # The last two predictions are empty, which is right for image 2 and wrong for 3
    logits[2:], masks[2] = -1.0, 0
    dice, right = [], 0
    for image in range(4):
        found = {
            (i, j)
            for i in range(5)
            for j in range(6)
            if torch.sigmoid(logits[image, 0, i, j]) > 0.5
        }
        mask = {(i, j) for i in range(5) for j in range(6) if masks[image, i, j]}
        dice.append(2 * len(found & mask) / (len(found) + len(mask)) if found | mask else 1.0)
        right += 30 - len(found ^ mask)
    parts = [TASK.totals(logits[part], masks[part]) for part in (slice(0, 1), slice(1, 4))]
    totals = {name: float(parts[0][name] + parts[1][name]) for name in parts[0]}
    metrics = TASK.metrics(totals, 4)
    assert dice[2:] == [1.0, 0.0] and metrics["dice"] == pytest.approx(sum(dice) / 4, rel=1e-12)
    assert metrics["pixel_acc"] == pytest.approx(right / 120, rel=1e-12)
    perfect = TASK.metrics(
        {n: float(v) for n, v in TASK.totals(2.0 * (masks[:, None] > 0) - 1, masks).items()}, 4
    )
    assert perfect["dice"] == perfect["pixel_acc"] == TASK.highest
    assert TASK.metric_names == tuple(metrics) and [TASK.higher_is_better(n) for n in metrics] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        ("test/global/mse", False),
        ("val/local/error_rate_mean", False),
        ("train/loss_mean", False),
        ("test/global/f1", True),
        ("test/global/mae_improvement", True),  # only a whole name counts
    ],
)
def test_direction_of_a_metric_follows_from_its_name(name: str, higher: bool) -> None:
    assert TASK.higher_is_better(name) is higher


def test_loss_is_the_mean_cross_entropy_of_pixels_in_training_and_evaluation() -> None:
    experiment = Experiment.of(compose(TINY))
    data = experiment.load(CPU)
    weights = experiment.env(data, CPU).initial_weights()
    net = Net(weights.spec, CPU, torch.float64)
    net.train(False)
    x, y = data.test.inputs(slice(0, 12)), data.test.y
    with torch.no_grad():
        p = torch.sigmoid(net(weights.params, weights.buffers, x))[:, 0]
        loss = experiment.task.loss(
            net,
            weights.params,
            weights.buffers,
            Batch(x, y),
            lambda name, shape: torch.zeros(shape),
        )
    expected = float(-torch.where(y == 1, p, 1 - p).log().mean())
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    measured = Evaluator(experiment.task, 5)(Outcome((weights,), "global"), data.test, "test")
    assert measured["test/global/loss"] == pytest.approx(expected, rel=1e-12)
    assert list(measured) == ["test/global/dice", "test/global/pixel_acc", "test/global/loss"]


def test_ensembles_average_logits_or_probabilities() -> None:
    a, b = drawn(3, 1)[0], 40 * drawn(3, 2)[0]
    a[0, 0, 0, 0], b[0, 0, 0, 0] = 900.0, -900.0
    weights = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(TASK.combine([a, b], "logits", weights), (a + 3 * b) / 4)
    torch.testing.assert_close(TASK.combine([a, b], "logits", weights[:, None]), (a + 3 * b) / 4)
    torch.testing.assert_close(TASK.combine([a, b], "logits", None), (a + b) / 2)
    together = TASK.combine([a, b], "probs", weights)
    torch.testing.assert_close(
        torch.sigmoid(together), (torch.sigmoid(a) + 3 * torch.sigmoid(b)) / 4
    )
    assert together.isfinite().all()


def test_loss_falls_and_engines_agree() -> None:
    """Stacked clients are trained as if each were alone.

    This includes the statistics of BatchNorm.
    """
    experiment = Experiment.of(
        compose([*TINY, "rounds=3", "local.optimizer=adam", "local.lr=0.02", "local.epochs=4"])
    )
    data = experiment.load(CPU)
    env = experiment.env(data, CPU)
    found: list[Weights] = []
    for engine in (Serial(), Vectorized(stack=3, kernel="vmap")):
        measured, snapshot = [], Snapshot(0, experiment.aggregator.init(env))
        for step in run(experiment.aggregator, env, engine, data, snapshot):
            measured.append(step.metrics["train/loss"])
            snapshot = step.after
        assert measured[-1] < 0.7 * measured[0]
        found.append(experiment.aggregator.outcome(snapshot.state).models[0])
    assert isinstance(engine, Vectorized) and engine.stacked_steps
    one, other = found
    for trees in ((one.params, other.params), (one.buffers, other.buffers)):
        for name in trees[0]:
            torch.testing.assert_close(trees[0][name], trees[1][name], rtol=1e-6, atol=1e-8)


@dataclass(frozen=True)
class Counting(Trainer):
    """A probe that counts the client's samples of the first class."""

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, ctx: Ctx) -> Measured:
        loss = super().loss(net, params, buffers, batch, ctx)
        assert isinstance(loss, torch.Tensor)
        return Measured(loss, {"held": ctx.class_counts[0].to(loss)})


def test_all_images_are_of_one_class_to_whoever_counts() -> None:
    """All images count as one class.

    The test uses a probe, a loss that needs counts, and a mean of last layers over the
    clients that have a class.
    """
    experiment = Experiment.of(
        compose([*TINY, "method=average", "aggregator.last_layer=masked", "rounds=1"])
    )
    data = experiment.load(CPU)
    env = replace(experiment.env(data, CPU), trainer=Counting())
    step = next(
        run(
            experiment.aggregator, env, Serial(), data, Snapshot(0, experiment.aggregator.init(env))
        )
    )
    assert step.metrics["train/held"] == 12
    rows = experiment.aggregator.outcome(step.after.state).models[0].params["output.weight"]
    assert rows.shape == (1, 4, 1, 1) and bool(rows.any())
