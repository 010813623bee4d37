"""Tests of accuracy by class and client: the count, a run, refused settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedexp
from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError
from fedexp.core.outcome import Outcome
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.core.weights import Weights
from fedexp.data.partition import CutPartition
from fedexp.evaluation.breakdown import Breakdown
from fedexp.evaluation.evaluate import Evaluator
from fedexp.running.experiment import Experiment, load_data
from tests.world import SOFTMAX, World, make_data, make_world


def drawn(world: World, number: int) -> Weights:
    start = world.env.initial_weights()
    rng = np.random.default_rng(number)
    return replace(start, params={"fc.weight": torch.from_numpy(rng.normal(size=(3, 4)))})


def hits(model: Weights, world: World, index: Sequence[int]) -> list[float]:
    """Return 1 per sample at `index` that the model classifies correctly, else 0."""
    train = world.data.train
    scores = train.x[list(index)].flatten(1) @ model.params["fc.weight"].T
    return (scores.argmax(1) == train.y[list(index)]).double().tolist()


@pytest.fixture
def world() -> World:
    """Return a world of four clients. One has no samples, and two have held-out shares.

    The batches of five contain several classes and clients.
    """
    data = make_data((20, 12, 0, 9, 5, 4), seed=3)
    lists = [data.partition.of(client) for client in range(6)]
    parts = make_parts([lists[0], lists[1], lists[2], lists[3]])
    held = [lists[4], lists[5][:0], lists[5], lists[5][:0]]
    cut = CutPartition(
        parts[0], parts[1], held=np.concatenate(held), held_offsets=make_parts(held)[1]
    )
    return make_world("method=fedavg", data=replace(data, partition=cut), model=SOFTMAX)


def make_parts(lists: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(lists), np.cumsum([0, *map(len, lists)])


@pytest.mark.parametrize("batch_size", [5, 1000])
def test_parts_are_counted_sample_by_sample(world: World, batch_size: int) -> None:
    model, data = drawn(world, 1), world.data
    breakdown = Breakdown(
        Evaluator(world.experiment.task, batch_size), data, classes=True, clients=True
    )
    found = breakdown(Outcome((model,), "global"))
    each = [hits(model, world, data.partition.of(client)) for client in (0, 1, 3)]
    accuracies = [sum(own) / len(own) for own in each]
    expected = {
        "train/clients/acc_mean": sum(accuracies) / 3,
        "train/clients/acc_worst_10": min(accuracies),
    }
    shares = [
        np.mean(hits(model, world, range(41, 46))),
        np.mean(hits(model, world, range(46, 50))),
    ]
    expected |= {"val/clients/acc_mean": np.mean(shares), "val/clients/acc_worst_10": min(shares)}
    for c in range(3):
        own = [i for i, y in enumerate(data.test.y.tolist()) if y == c]
        expected[f"test/global/acc_of_class_{c}"] = np.mean(hits(model, world, own))
    assert found == pytest.approx(expected, rel=1e-12) and len(set(accuracies)) == 3


class Counted(Sequence[int]):
    """Bounds that count how many of them are read."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values, self.reads = [*values], 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, at: Any) -> Any:
        self.reads += len(self.values[at]) if isinstance(at, slice) else 1
        return self.values[at]


def test_parts_of_many_clients_are_visited_in_linear_time(world: World) -> None:
    """A batch visits only its own parts. Parts may be empty or longer than a batch."""
    sizes = [0, 3, 0, 0, 23, *[1, 0, 2] * 100, 0]
    data = make_data((sum(sizes),), seed=2)
    evaluator, model = Evaluator(world.experiment.task, 7), drawn(world, 1)
    order, outcome = data.positions(0), Outcome((model,), "global")
    bounds = Counted(np.cumsum([0, *sizes]).tolist())
    found = evaluator.parts([model], outcome, data.train, order, bounds)
    assert bounds.reads < 20 * len(sizes)

    big = replace(world, data=data)
    for own, low, high in zip(found, bounds, bounds[1:], strict=False):
        correct = hits(model, big, order[low:high].tolist())
        assert own.get("acc") == (sum(correct) / len(correct) if correct else None)


def test_classes_without_samples_are_left_out_and_the_worst_tenth_is_rounded_up(
    world: World,
) -> None:
    test = world.data.test
    kept = test.y != 1
    data = replace(world.data, test=replace(test, x=test.x[kept], y=test.y[kept]))
    model, evaluator = drawn(world, 1), Evaluator(world.experiment.task, 7)
    found = Breakdown(evaluator, data, classes=True, clients=False)(Outcome((model,), "global"))
    assert sorted(found) == ["test/global/acc_of_class_0", "test/global/acc_of_class_2"]
    breakdown = Breakdown(evaluator, data, classes=True, clients=False)
    breakdown.check(
        ["test/global/acc_of_class_2", "val/global/acc_of_class_1", "test/global/acc"], "model"
    )
    with pytest.raises(ConfigError, match="no test sample is of class 1"):
        breakdown.check(["test/global/acc", "test/global/acc_of_class_1"], "global")
    many = make_data((5,) * 11, seed=1)
    found = Breakdown(evaluator, many, classes=False, clients=True)(Outcome((model,), "global"))
    big = replace(world, data=many)
    each = sorted(np.mean(hits(model, big, many.partition.of(client))) for client in range(11))
    assert each[0] < each[1] and found["train/clients/acc_worst_10"] == pytest.approx(
        (each[0] + each[1]) / 2
    )


def test_own_models_are_measured_each_at_its_client_and_ensembles_as_one(world: World) -> None:
    models = tuple(drawn(world, number) for number in range(3))
    breakdown = Breakdown(
        Evaluator(world.experiment.task, 5), world.data, classes=False, clients=True
    )
    found = breakdown(Outcome(models, "local", clients=(0, 3, 1)))
    pairs = zip(models, (0, 3, 1), strict=True)
    each = [np.mean(hits(model, world, world.data.partition.of(client))) for model, client in pairs]
    assert found["train/clients/acc_mean"] == pytest.approx(np.mean(each))
    total = replace(
        models[0], params={"fc.weight": sum(model.params["fc.weight"] for model in models)}
    )
    together, alone = breakdown(Outcome(models, "ensemble")), breakdown(Outcome((total,), "global"))
    assert together == pytest.approx(alone)


def test_a_run_has_them_where_it_is_asked_and_is_else_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = [
        "rounds=2",
        "clients=4",
        "model.hidden=[4]",
        "eval.every=2",
        "limit.train=200",
        "partition.val_fraction=0.2",
    ]
    plain = fedexp.run(quick)
    asked = fedexp.run(
        [
            *quick,
            "eval.per_class=true",
            "eval.per_client=true",
            "headline.metric=val/clients/acc_worst_10",
        ]
    )
    names = {f"{split}/global/acc_of_class_{c}" for split in ("test", "val") for c in range(10)}
    names |= {
        f"{split}/clients/acc_{ending}"
        for split in ("train", "val")
        for ending in ("mean", "worst_10")
    }
    assert (
        set(asked.metrics[-1]) - set(plain.metrics[-1]) <= names
        and "train/clients/acc_mean" not in asked.metrics[0]
    )
    assert {name: asked.metrics[-1][name] for name in plain.metrics[-1]} == plain.metrics[-1]
    counts = np.bincount(
        load_data(ResolvedConfig.from_stored(asked.config)).test.y.numpy(), minlength=10
    )
    row = asked.metrics[-1]
    parts = (
        sum(counts[c] * row.get(f"test/global/acc_of_class_{c}", 0) for c in range(10))
        / counts.sum()
    )
    assert parts == pytest.approx(row["test/global/acc"])
    assert asked.result["headline"]["value"] == row["val/clients/acc_worst_10"]
    assert (
        asked.result["mean_last_10"]["test/global/acc_of_class_3"]
        == row["test/global/acc_of_class_3"]
    )


@pytest.mark.parametrize(("overrides", "said"), [
    ("method=local", "keeps one model per client"),
    ("task=segmentation model=unet dataset=shapes_masks partition=iid", "one class each"),
    ("headline.metric=test/global/acc_of_class_10", "is not measured here"),
    ("eval.per_client=true headline.metric=train/clients/acc_mean", "is not measured here"),
])  # fmt: skip
def test_what_has_no_classes_or_is_no_number_to_compare_by_is_refused(
    overrides: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.of(compose(["eval.per_class=true", *overrides.split()]))
