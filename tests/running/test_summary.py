"""Tests of the numbers that are computed from a run's rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedexp.config.compose import compose
from fedexp.core.errors import ConfigError, FedexpError
from fedexp.evaluation.tracing import Traced
from fedexp.running.experiment import Experiment
from fedexp.running.summary import summarise

ACC, LOSS = "test/global/acc", "test/global/loss"


def summary(values: list[float], *overrides: str) -> dict[str, Any]:
    """Return the summary of a run that was evaluated in every second round."""
    rows: list[dict[str, Any]] = []
    for number, value in enumerate(values, 1):
        rows += [
            {"round": 2 * number - 1, "step": 0},
            {"round": 2 * number, "step": 0, ACC: value, LOSS: 1 - value},
        ]
    return summarise(rows, Experiment.of(compose(list(overrides))))


def test_the_last_ten_can_be_pooled_over_runs() -> None:
    """The last ten values of two runs can be pooled.

    The mean and the deviation of all twenty values follow from the runs' results.
    """
    runs = [[0.9, 0.9, *(0.1 * k for k in range(10))], [0.05 * k for k in range(10)]]
    found = [summary(values) for values in runs]
    assert [run["last_10"][ACC] for run in found] == [runs[0][2:], runs[1]]
    assert found[0]["mean_last_10"][ACC] == pytest.approx(0.45)
    # This is the standard deviation of ten equidistant values.
    assert found[0]["std_last_10"][ACC] == pytest.approx(0.1 * math.sqrt((10**2 - 1) / 12))
    assert found[0]["best"][ACC] == 0.9 and found[0]["metrics"][ACC] == pytest.approx(0.9)
    pooled = [value for run in found for value in run["last_10"][ACC]]
    mean = sum(pooled) / 20
    variance = sum((value - mean) ** 2 for value in pooled) / 20
    within = sum(run["std_last_10"][ACC] ** 2 for run in found) / 2
    between = sum((run["mean_last_10"][ACC] - mean) ** 2 for run in found) / 2
    assert variance == pytest.approx(within + between)
    assert summary([0.5])["std_last_10"][ACC] == 0


def test_deviation_of_infinite_values_is_nan() -> None:
    found = summary([0.5, -math.inf, 0.25])
    assert math.isnan(found["std_last_10"][LOSS])
    assert (found["mean_last_10"][LOSS], found["best"][LOSS]) == (math.inf, 0.5)


def test_of_what_was_traced_within_rounds_the_last_and_the_best() -> None:
    """There is a last and a best value for each series and share.

    The best values on test data are oracles. Numbers of other names and of single
    clients are ignored.
    """
    curve = [(1, 1, 0.2), (1, 2, 0.7), (2, 1, 0.6), (2, 2, 0.7), (2, 3, 0.4)]
    traced = [
        {
            "round": r,
            "iteration": i,
            "a/acc": v,
            "a/loss": 1 - v,
            "a/val/acc": 1 - v,
            "a/val/loss": v,
            "b/loss": 0.1,
        }
        | {"locals/acc": [0.9, v], "locals/loss": [0.1, v]}
        for r, i, v in curve
    ]
    rows = [{"round": 1, "step": 1, ACC: 0.4, LOSS: 0.6}]
    found = summarise(rows, Experiment.of(compose([])), traced)
    assert found["traced"]["last"] == {"a/acc": 0.4, "a/val/acc": 0.6}
    assert found["traced"]["best"] == {"a/acc": 0.7, "a/val/acc": 0.8}
    assert found["traced"]["at"] == {"a/acc": [1, 2], "a/val/acc": [1, 1]}
    assert found["oracle/a/acc"] == 0.7 and "oracle/a/val/acc" not in found
    down = summarise(rows, Experiment.of(compose([f"headline.metric={LOSS}"])), traced)["traced"]
    assert "b/loss" not in down["last"]  # this is a training loss
    assert down["best"]["a/loss"] == pytest.approx(0.3) and down["at"]["a/loss"] == [1, 2]
    assert "traced" not in summary([0.5])


def test_rounds_to_several_targets() -> None:
    curve = [0.2, 0.3, 0.29, 0.385, 0.4]
    found = summary(curve, "headline.targets=[0.3,0.385,0.2,0.41]")["rounds_to"]
    assert found == {"0.30": 4, "0.385": 8, "0.20": 2, "0.41": math.inf}
    assert summary(curve)["rounds_to"] == {}
    close = summary(curve, "headline.targets=[0.3850001,0.3850002,0.9999999]")["rounds_to"]
    assert close == {"0.3850001": 10, "0.3850002": 10, "0.9999999": math.inf}
    down = summary(curve, f"headline.metric={LOSS}", "headline.targets=[0.7]")["rounds_to"]
    assert down == {"0.70": 4}  # first loss at or below the target


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [
                "headline.targets=[0.5]",
                "partition.val_fraction=0.1",
                "headline.metric=val/global/acc",
            ],
            "of the test set",
        ),
        (["headline.targets=[0.5]", "stop.target=0.9"], "stops early"),
        (["headline.targets=[0.5,0.5]"], "each once"),
        (["headline.targets=[1.01]"], "never reaches 1.01"),
        (["stop.target=1.01", f"stop.metric={LOSS}", "headline.targets=[2]"], "never reaches 2"),
        (["stop.target=40"], "stop.target"),
    ],
)
def test_targets_that_cannot_be_told_are_refused_before_training(
    overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.of(compose(overrides))


def test_a_target_may_be_as_high_as_its_metric() -> None:
    assert Experiment.of(compose(["headline.targets=[1]"])).config.headline.targets == (1.0,)
    assert (
        Experiment.of(compose(["stop.target=40", f"stop.metric={LOSS}"])).config.stop.target == 40
    )  # a loss may exceed 1


def test_a_step_has_the_finite_numbers_of_the_iteration_that_it_is() -> None:
    row = {
        "iteration": 2,
        "student/acc": 0.4,
        "student/loss": math.inf,
        "local/acc": [0.1, 0.2],
        "ce": math.nan,
    }
    assert Traced([row], {}, 0.0).of_step(2) == {"student/acc": 0.4}
    assert Traced([row], {}, 0.0).of_step(1) == Traced([], {}, 0.0).of_step(1) == {}
    start = {"iteration": 0, "student/acc": 0.4}  # its method iterates within one step
    assert (
        Traced([start], {}, 0.0).of_step(0)
        == Traced([row, {**row, "iteration": 3}], {}, 0.0).of_step(2)
        == {}
    )


def test_run_without_a_model_names_the_keys() -> None:
    with pytest.raises(FedexpError, match="no client ever took part") as without:
        summary([])
    with pytest.raises(FedexpError, match="lower client_dropout") as dropped:
        summary([], "client_dropout=0.5")
    assert "lower" not in str(without.value) and "where" in str(dropped.value)
    with pytest.raises(FedexpError, match="contain NaN or infinity") as skipped:
        summarise([{"round": 1, "step": 1, "skipped_clients": 4}], Experiment.of(compose([])))
    assert "lower local.lr" in str(skipped.value)


def test_metric_that_a_round_lacks_is_summarised_over_the_other_rounds() -> None:
    """No client with validation samples may take part in a round."""
    key, given = "val/clients/acc_mean", [0.5, None, 0.7, None]
    rows: list[dict[str, Any]] = [
        {"round": number, "step": number, ACC: 0.1 * number, LOSS: 0.5}
        | ({} if value is None else {key: value})
        for number, value in enumerate(given, 1)
    ]
    settings = ["eval.per_client=true", "partition.val_fraction=0.1"]
    found = summarise(rows, Experiment.of(compose(settings)))
    assert key not in found["metrics"] and found["best"][key] == 0.7
    assert found["last_10"][key] == [0.5, 0.7] and len(found["last_10"][ACC]) == 4
    for rule, value in (("best_on_val", 0.7), ("mean_last_10", 0.6), ("last", 0.7)):
        own = [*settings, f"headline.metric={key}", f"headline.rule={rule}"]
        headline = summarise(rows, Experiment.of(compose(own)))["headline"]
        assert headline["value"] == pytest.approx(value)
    with pytest.raises(FedexpError, match="no round measured 'val/clients/acc_mean'"):
        last = [*settings, f"headline.metric={key}", "headline.rule=last"]
        summarise([rows[1], rows[3]], Experiment.of(compose(last)))
