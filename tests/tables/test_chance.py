"""Runs at chance level are recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedexp.tables.chance import is_at_chance
from fedexp.tables.record import RunRecord
from tests.tables.test_schema import table

ROUNDS = {"rounds": 10, "aggregator": {"_target_": "fedexp.methods.fedavg.Mean"}}
MERGED = {"rounds": 1, "aggregator": {"_target_": "fedexp.methods.average.Average"}}
TAUGHT = {"rounds": 1, "aggregator": {"_target_": "fedexp.methods.dense.Dense"}}
# Committed records contain this class path of version 0.1.
TAUGHT_0_1 = {"rounds": 1, "aggregator._target_": "fedexp.aggregators.dense.Dense"}


def flagged(
    tmp_path: Path,
    value: float | None,
    config: dict[str, Any] | None,
    dataset: str = "fashion_mnist",
    metric: str = "test/global/acc",
    path: str = "headline.value",
    role: str = "baseline",
) -> bool:
    column = {"key": "m", "label": "M", "overrides": [], "role": role}
    made = table(tmp_path, methods=[column], headline={"value": path, "scale": 100}, reference=[])
    run = RunRecord({}, "m", 0, "seed=0", value=value, dataset=dataset, metric=metric)
    return is_at_chance(made, made.columns["m"], run, config)


@pytest.mark.parametrize(("dataset", "value", "expected"), [
    ("fashion_mnist", 10.0, True), ("fashion_mnist", 10.99, True), ("fashion_mnist", 11.01, False),
    ("cifar100", 1.0, True), ("cifar100", 10.0, False), ("mnist", 11.35, True),
    ("digits", 10.0, False),  # Its classes are not known to be of equal size.
])  # fmt: skip
def test_the_chance_level_belongs_to_the_data_set(
    tmp_path: Path, dataset: str, value: float, expected: bool
) -> None:
    assert flagged(tmp_path, value, ROUNDS, dataset) == expected


@pytest.mark.parametrize(("config", "expected"), [
    (ROUNDS, True), (TAUGHT, True), (TAUGHT_0_1, True), (MERGED, False), (None, False),
])  # fmt: skip
def test_only_trained_models_are_flagged(
    tmp_path: Path, config: dict[str, Any] | None, expected: bool
) -> None:
    assert flagged(tmp_path, 10.0, config) == expected


def test_a_local_model_is_trained(tmp_path: Path) -> None:
    assert flagged(tmp_path, 10.0, MERGED, role="local")


@pytest.mark.parametrize(("path", "metric", "expected"), [
    ("headline.value", "test/global/loss", False), ("best.test/global/acc", "", True),
    ("per_client.test/local/acc.0", "", True), ("std_last_10.test/global/acc", "", False),
    ("seconds.aggregate", "test/global/acc", False),
])  # fmt: skip
def test_only_accuracies_are_flagged(
    tmp_path: Path, path: str, metric: str, expected: bool
) -> None:
    assert flagged(tmp_path, 10.0, ROUNDS, metric=metric, path=path) == expected


def test_a_run_without_a_number_is_not_flagged(tmp_path: Path) -> None:
    assert not flagged(tmp_path, None, ROUNDS)
