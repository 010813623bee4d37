"""Tests of the numbers of a picture: means, intervals, missing runs and refusals."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp, ttest_rel

from fedexp.analysis.blocks import blocks
from fedexp.analysis.groups import listed
from fedexp.analysis.series import PlotData, PlotSpec, mean_interval, plot_data
from fedexp.analysis.table import TableSpec, runs_table
from fedexp.core.errors import ConfigError
from fedexp.storage.files import write_json
from fedexp.storage.stored_run import find_runs
from tests.analysis.written import ACC, write_run


def data(root: Path, *conditions: str, **spec: Any) -> PlotData:
    return plot_data(find_runs(root), PlotSpec(**spec), conditions)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write runs of two methods with two splits, three seeds and two rounds."""
    for method, height in (("fedavg", 0.0), ("scaffold", 0.2)):
        for seed in (0, 1, 2):
            for alpha in (0.1, 1.0):
                values = [0.1 + height + seed / 100, 0.4 + height + seed**2 / 100]
                cost = 10 if method == "fedavg" else 20
                write_run(
                    tmp_path,
                    method,
                    seed,
                    values,
                    partition__alpha=alpha,
                    bytes_up=cost,
                    seconds=1.0 + seed,
                )
    return tmp_path


def test_mean_interval_is_that_of_a_one_sample_t_test() -> None:
    values = [0.61, 0.72, 0.55, 0.70]
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean_interval(values) == pytest.approx((statistics.mean(values), *expected))
    # For two values, t is tan(pi * 0.475), and s / sqrt(2) is half of their distance.
    half = math.tan(math.pi * 0.475) * 0.1
    assert mean_interval([0.4, 0.6]) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert mean_interval([0.4]) == (0.4, 0.4, 0.4)


def test_curves_are_means_over_seeds_in_panels(root: Path) -> None:
    found = data(root, y=ACC, cols=("partition.alpha",))
    assert found.metric == ACC and found.seeds == ["0", "1", "2"] and found.num_runs == 12
    assert list(found.panels) == [((), ("0.1",)), ((), ("1",))]
    assert found.series == [("fedavg",), ("scaffold",)] and found.notes == []
    first, second = found.panels[(), ("1",)]["scaffold",]
    assert (first.x, second.x) == (1, 2)
    assert first.mean == pytest.approx(0.31) and second.values == pytest.approx([0.6, 0.61, 0.64])
    assert (second.mean, second.low, second.high) == mean_interval(second.values)


def test_progress_axes_have_the_totals_of_the_runs(root: Path) -> None:
    panel = {"cols": ("partition.alpha",)}
    points = data(root, x="bytes", **panel).panels[(), ("1",)]
    assert [point.x for point in points["fedavg",]] == [11, 22]
    assert [point.x for point in points["scaffold",]] == [21, 42]
    # The seeds train 1, 2 and 3 s per round. A point is at their mean.
    points = data(root, x="seconds", **panel).panels[(), ("1",)]
    assert [point.x for point in points["fedavg",]] == [2.5, 5.0]
    points = data(root, x="local_steps", **panel).panels[(), ("1",)]
    assert [point.x for point in points["fedavg",]] == [3, 6]


def test_axis_of_a_key_has_one_point_per_value_and_a_line_without_the_key(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "fedavg", seed, [0.5 + seed / 10])
        for mu in (0.0, 0.1, 1.0):
            write_run(tmp_path, "fedprox", seed, [0.6 + mu / 10 + seed / 10], trainer__mu=mu)
    found = data(tmp_path, x="trainer.mu")
    assert found.metric == f"{ACC} (last)"
    (panel,) = found.panels.values()
    assert [point.x for point in panel["fedprox",]] == [0.0, 0.1, 1.0]
    assert [point.mean for point in panel["fedprox",]] == pytest.approx([0.65, 0.66, 0.75])
    (line,) = panel["fedavg",]
    assert math.isnan(line.x) and line.mean == pytest.approx(0.55)


def test_missing_runs_are_named(root: Path) -> None:
    write_run(root, "scaffold", 3, [0.1], partition__alpha=1.0, status="failed", rounds=2)
    write_run(root, "moon", 0, [0.1], partition__alpha=0.1, status="interrupted", rounds=2)
    write_run(root, "fedprox", 0, [0.5, 0.6], partition__alpha=0.1)
    found = data(root, cols=("partition.alpha",))
    assert found.notes == [
        "missing: method=fedavg partition.alpha=0.1: seed 3 (not run)",
        "missing: method=fedprox partition.alpha=0.1: seed 1 (not run), seed 2 (not run), seed 3 (not run)",
        "missing: method=moon partition.alpha=0.1: seed 0 (interrupted), seed 1 (not run), seed 2 (not run), seed 3 (not run)",
        "missing: method=scaffold partition.alpha=0.1: seed 3 (not run)",
        "missing: method=fedavg partition.alpha=1: seed 3 (not run)",
        "missing: method=fedprox partition.alpha=1: no run",
        "missing: method=moon partition.alpha=1: no run",
        "missing: method=scaffold partition.alpha=1: seed 3 (failed)",
    ]


def test_newer_run_that_did_not_finish_hides_no_result(root: Path) -> None:
    later = "2026-01-02T00:00:00+00:00"
    values = [0.1, 0.4]
    alpha = {"partition__alpha": 0.1}
    for status, code in (("failed", "0000aaaa"), ("running", "0000bbbb")):
        write_run(root, "fedavg", 0, values, status=status, code=code, updated=later, **alpha)
    found = data(root, cols=("partition.alpha",))
    assert found.num_runs == 12 and found.notes == []


def test_seed_counts_once_however_a_number_was_typed(root: Path) -> None:
    later = "2026-01-02T00:00:00+00:00"
    write_run(root, "fedavg", 1, [0.2, 0.7], partition__alpha=1, updated=later)
    found = data(root, y=ACC, cols=("partition.alpha",))
    _, last = found.panels[(), ("1",)]["fedavg",]
    assert last.values == pytest.approx([0.4, 0.7, 0.44]) and found.num_runs == 12
    place = "method=fedavg partition.alpha=1"
    assert found.notes == [f"{place}: 1 older runs with equal settings and seeds are left out"]

    table = runs_table(find_runs(root), TableSpec(("partition.alpha",), "method"), ())
    assert [*table.cells[("1",), "fedavg"].values()] == pytest.approx([0.4, 0.7, 0.44])
    assert "note: 1 older runs with equal settings and seeds are left out" in table.notes


def test_only_different_code_within_a_group_is_noted(root: Path) -> None:
    """Methods use different modules, so their hashes differ with the same code."""
    for seed in (0, 1):
        write_run(root, "moon", seed, [0.1, 0.2], partition__alpha=0.1, code="0000aaaa")
    spec = TableSpec(("partition.alpha",), "method")
    assert not any("code" in note for note in runs_table(find_runs(root), spec, ()).notes)
    assert not any("code" in note for note in data(root, cols=("partition.alpha",)).notes)

    write_run(root, "moon", 2, [0.1, 0.2], partition__alpha=0.1, code="0000bbbb")
    notes = runs_table(find_runs(root), spec, ()).notes
    assert "note: runs of one cell were made by different code: 0.1 moon" in notes
    place = "method=moon partition.alpha=0.1"
    assert (
        f"{place}: runs were made by different code" in data(root, cols=("partition.alpha",)).notes
    )


def test_runs_on_different_data_of_one_name_are_noted(root: Path) -> None:
    spec = TableSpec(("partition.alpha",), "method")

    def notes() -> list[str]:
        found = [*runs_table(find_runs(root), spec, ()).notes]
        found += data(root, cols=("partition.alpha",)).notes
        return [note for note in found if "not the same" in note]

    def write(seed: int, sha256: str) -> None:
        folder = write_run(root, "moon", seed, [0.1, 0.2])
        result = json.loads((folder / "result.json").read_text())
        result["partition"] = {"data_sha256": sha256, "proxy_sha256": None}
        write_json(folder / "result.json", result)

    write(0, "a" * 64)
    write(1, "a" * 64)
    assert not notes()
    write(2, "b" * 64)
    note = "dataset=digits was not the same in all runs: aaaaaaaa, bbbbbbbb"
    assert notes() == [f"note: {note}", note]


def test_table_names_runs_without_a_result(root: Path) -> None:
    spec = TableSpec(rows=("partition.alpha",), cols="method")
    conditions = ["method=fedavg,moon"]
    values = [0.1, 0.4]
    write_run(root, "scaffold", 3, values, partition__alpha=1.0, status="failed")
    done = {"partition__alpha": 0.1, "code": "0000bbbb"}
    write_run(root, "fedavg", 0, values, **done, status="failed")
    assert not any("unfinished" in note for note in notes_of(root, spec, conditions))

    write_run(root, "moon", 3, values, partition__alpha=1.0, status="failed")
    (note,) = [note for note in notes_of(root, spec, conditions) if "unfinished" in note]
    moon = "partition.alpha=1 method=moon seed 3 (failed)"
    assert note == f"note: 1 unfinished run is left out: {moon}"

    write_run(root, "moon", 4, values, partition__alpha=1.0, status="interrupted")
    (note,) = [note for note in notes_of(root, spec, conditions) if "unfinished" in note]
    assert note.startswith("note: 2 unfinished runs are left out: ") and moon in note
    assert "seed 4 (interrupted)" in note


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_table_with_a_value_that_is_not_finite_has_no_deviation(root: Path, value: float) -> None:
    write_run(root, "moon", 0, [0.1, value], partition__alpha=0.1)
    write_run(root, "moon", 1, [0.1, 0.2], partition__alpha=0.1)
    spec = TableSpec(rows=("partition.alpha",), cols="method")
    first, *_ = blocks(runs_table(find_runs(root), spec, ["partition.alpha=0.1"]))
    assert first.rows[0][2] == f"{value:.4f} ± nan (2)"
    (record,) = [record for record in first.records if record["method"] == "moon"]
    assert math.isnan(record["sd"])


@pytest.mark.parametrize(
    ("values", "mean", "sd"),
    [
        ([1e308, 1e308], 1e308, 0.0),
        ([1.7e308, -1.7e308], 0.0, math.inf),
        ([math.inf, -math.inf], math.nan, math.nan),
    ],
)
def test_means_of_huge_values_do_not_overflow(
    root: Path, values: list[float], mean: float, sd: float
) -> None:
    for seed, value in enumerate(values):
        write_run(root, "moon", seed, [0.1, value], partition__alpha=0.1)
    spec = TableSpec(rows=("partition.alpha",), cols="method")
    first, *_ = blocks(runs_table(find_runs(root), spec, ["partition.alpha=0.1"]))
    (record,) = [record for record in first.records if record["method"] == "moon"]
    assert (record["mean"], record["sd"]) == pytest.approx((mean, sd), nan_ok=True)
    form = ".4e" if any(map(math.isfinite, values)) else ".4f"
    assert first.rows[0][2] == f"{mean:{form}} ± {sd:{form}} (2)"


def test_against_compares_only_pairs_with_one_column(root: Path) -> None:
    """The tests are those of the pairs with this column, so Holm corrects for fewer."""
    moon = {0.1: (0.41, 0.43, 0.49), 1.0: (0.47, 0.44, 0.48)}
    for alpha, values in moon.items():
        for seed, value in enumerate(values):
            write_run(root, "moon", seed, [0.1, value], partition__alpha=alpha)
    spec = TableSpec(("partition.alpha",), "method", aggregate=True, against="moon")
    found = runs_table(find_runs(root), spec, ())
    assert [(c.a, c.b) for _, c in found.comparisons] == [
        ("moon", "fedavg"),
        ("moon", "scaffold"),
    ] * 2
    assert found.aggregates is not None
    assert [(one.a, one.b) for one in found.aggregates.improvements] == [
        ("moon", "fedavg"),
        ("moon", "scaffold"),
    ]

    plain = [
        float(ttest_rel([height + seed**2 / 100 for seed in range(3)], values).pvalue)
        for values in moon.values()
        for height in (0.4, 0.6)
    ]
    assert [c.p for _, c in found.comparisons] == pytest.approx(holm_corrected(plain))

    every = runs_table(find_runs(root), replace(spec, against=None), ())
    assert len(every.comparisons) == 6 and every.cells == found.cells
    with pytest.raises(ConfigError, match="did you mean 'scaffold'"):
        runs_table(find_runs(root), replace(spec, against="scafold"), ())

    turned = TableSpec(("method",), "partition.alpha", against="0.10")
    assert {(c.a, c.b) for _, c in runs_table(find_runs(root), turned, ()).comparisons} == {
        ("0.1", "1")
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [("total/bytes_up", (20, 40)), ("total/bytes_down", (2, 2)), ("total/local_steps", (6, 6))],
)
def test_table_shows_the_costs_of_whole_runs(
    root: Path, value: str, expected: tuple[int, int]
) -> None:
    found = runs_table(
        find_runs(root), TableSpec(("partition.alpha",), "method", value, aggregate=True), ()
    )
    assert {cell: set(by_seed.values()) for cell, by_seed in found.cells.items()} == {
        ((alpha,), method): {cost}
        for alpha in ("0.1", "1")
        for method, cost in zip(("fedavg", "scaffold"), expected, strict=True)
    }
    assert found.better == "lower"


@pytest.mark.filterwarnings("error")
def test_row_with_a_huge_value_is_left_out_of_the_aggregates(tmp_path: Path) -> None:
    for method, alpha in itertools.product(("fedavg", "moon"), (0.1, 0.5, 1.0)):
        for seed in range(2):
            value = 1.7e308 if alpha == 0.1 and method == "moon" else alpha
            write_run(tmp_path, method, seed, [0.1, value], partition__alpha=alpha)
    spec = TableSpec(rows=("partition.alpha",), cols="method", aggregate=True)
    left_out = "the aggregates leave out 0.1, in which a column has no number, or one that is"
    assert any(left_out in note for note in notes_of(tmp_path, spec, []))


def holm_corrected(values: list[float]) -> list[float]:
    """Return p values that are corrected by Holm's method."""
    ordered = sorted(range(len(values)), key=values.__getitem__)
    found, highest = [0.0] * len(values), 0.0
    for rank, at in enumerate(ordered):
        highest = max(highest, min(1.0, values[at] * (len(values) - rank)))
        found[at] = highest
    return found


def notes_of(root: Path, spec: TableSpec, conditions: list[str]) -> tuple[str, ...]:
    return runs_table(find_runs(root), spec, conditions).notes


@pytest.mark.parametrize("spec", [{"by": ("method", "seed")}, {"x": "seed", "y": "headline"}])
def test_seeds_of_other_series_are_not_missing(root: Path, spec: dict[str, Any]) -> None:
    assert data(root, cols=("partition.alpha",), **spec).notes == []


def test_curves_end_with_the_shortest_seed_and_skip_what_is_not_finite(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.2, 0.3], rounds=4)
    write_run(tmp_path, "fedavg", 1, [0.1, math.nan, 0.3, 0.4], rounds=4)
    found = data(tmp_path)
    (panel,) = found.panels.values()
    assert [point.x for point in panel["fedavg",]] == [1, 3]
    assert found.notes == [
        "method=fedavg: drawn to round 3, because a seed ended there",
        f"method=fedavg: {ACC} is not finite in round 2",
    ]


@pytest.mark.parametrize(
    ("lost", "words"),
    [((3, 4), "from round 3"), ((4,), "from round 4"), ((1, 3), "in rounds 1, 3")],
)
def test_rounds_that_are_not_finite_are_named(
    tmp_path: Path, lost: tuple[int, ...], words: str
) -> None:
    write_run(tmp_path, "fedavg", 0, [math.inf if at in lost else 0.1 for at in (1, 2, 3, 4)])
    assert data(tmp_path).notes == [f"method=fedavg: {ACC} is not finite {words}"]


@pytest.mark.parametrize("x", ["round", "clients"])
def test_huge_values_are_not_drawn(tmp_path: Path, x: str) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 1.7e308])
    write_run(tmp_path, "fedavg", 1, [0.1, 1.7e308])
    words = " from round 2" if x == "round" else ""
    found = data(tmp_path, x=x, y=ACC)
    assert found.notes == [f"method=fedavg{'' if x == 'round' else ' clients=4'}: {ACC} is too "
                           f"large to draw{words}"]  # fmt: skip


def test_runs_that_differ_in_more_than_was_asked_are_refused_with_the_keys(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"one series .* their seeds: partition.alpha") as caught:
        data(root)
    assert "partition.alpha=0.1), or by=method,partition.alpha" in str(caught.value)
    for seed in (0, 1, 2):
        write_run(root, "moon", seed, [0.5, 0.6], partition__alpha=1.0, local__lr=0.5, rounds=9)
    with pytest.raises(ConfigError, match=r"more than method: rounds, local.lr") as caught:
        data(root, "partition.alpha=1")
    assert "rounds: 2, 9" in str(caught.value) and "--allow local.lr,rounds" in str(caught.value)
    assert len(data(root, "partition.alpha=1", allowed=("local.lr", "rounds")).series) == 3
    assert len(data(root, "partition.alpha=1", allowed=("local", "rounds")).series) == 3
    # The methods differ, and so may their parts.
    assert len(data(root, "partition.alpha=1", "method!=moon").series) == 2


def test_condition_that_is_advised_keeps_other_methods(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.5])
    for mu in (0.1, 1.0):
        write_run(tmp_path, "fedprox", 0, [0.6], trainer__mu=mu)
    with pytest.raises(ConfigError, match=r"condition \(trainer.mu!=1\)"):
        data(tmp_path)
    assert len(data(tmp_path, "trainer.mu!=1").series) == 2


@pytest.mark.parametrize(("spec", "words"), [
    ({"x": "rond"}, "did you mean 'round'"), ({"x": "byte"}, "did you mean 'bytes'"),
    ({"x": "trainer._target_"}, "are not numbers"), ({"x": "partition.alfa"}, "did you mean 'partition.alpha'"),
    ({"y": "test/global/ac"}, "did you mean 'test/global/acc'"), ({"x": "local.lr", "y": "acc"}, "did you mean 'test/global/acc'"),
    ({"y": "acc"}, "did you mean 'test/global/acc'"),
    ({"by": ("methd",)}, "did you mean 'method'"), ({"allowed": ("local.rl",)}, "did you mean 'local.lr'"),
    ({"x": "local.lr", "y": "status"}, "is not a number"),
])  # fmt: skip
def test_wrong_axes_and_keys_are_refused(root: Path, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        data(root, "partition.alpha=1", **spec)


def test_runs_without_times_or_with_other_headlines_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="no finished run"):
        data(root, "method=moon")
    folder = write_run(root, "fedavg", 5, [0.1, 0.2], partition__alpha=1.0)
    (folder / "timing.jsonl").unlink()
    with pytest.raises(ConfigError, match="times of a run's rounds are not stored"):
        data(root, "partition.alpha=1", x="seconds")


def test_trials_of_a_tuning_are_told_apart_first(tmp_path: Path) -> None:
    """Trials differ in the tuned key, too, but no value of it leaves them out."""
    write_run(tmp_path, "fedavg", 0, [0.1, 0.2], eval__held_out=0)
    for lr in (0.01, 0.02, 0.03, 0.06, 0.07):
        write_run(tmp_path, "fedavg", 9, [0.1, 0.2], eval__held_out=50, local__lr=lr)
    with pytest.raises(ConfigError) as plot:
        data(tmp_path, y=ACC)
    with pytest.raises(ConfigError) as table:
        runs_table(find_runs(tmp_path), TableSpec(("partition.alpha",), "method"), ())
    for error in (plot.value, table.value):
        assert "their seeds: eval.held_out, local.lr" in str(error)
        assert "add a condition (eval.held_out=0)" in str(error)


def test_lists_in_messages_count_what_they_leave_out() -> None:
    assert listed(["a", "b", "c", "d"]) == "a, b, c, d"
    assert listed(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"
