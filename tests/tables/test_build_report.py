"""Tests of verdicts, agreement and warnings with made-up runs."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedexp.core.errors import ConfigError, DataError, StorageError
from fedexp.core.resolved_config import ResolvedConfig
from fedexp.storage.files import write_json, write_text
from fedexp.tables.build_report import build_report, draw_figures, with_pictures
from fedexp.tables.cells import Job, PlannedCell, planned_cells
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.lookup import CellRun, read_path, read_value
from fedexp.tables.ranks import spearman, tied
from fedexp.tables.record import (
    RUNS,
    TableRecord,
    completed,
    name_of_table,
    pictures,
    read,
    recorded,
    write,
)
from fedexp.tables.report import texts
from fedexp.tables.report.files import report_folder, write_report
from fedexp.tables.report.markdown import markdown
from fedexp.tables.report.report import Picture, Report
from fedexp.tables.schema import Table
from tests.tables.test_schema import TINY, gridded, table

DATASET = {"_target_": "fedexp.data.digits.Digits"}
CONFIG = ResolvedConfig({"dataset": DATASET}, choices={"dataset": "digits"})


@pytest.mark.parametrize("seed", range(30))
def test_spearman_is_scipys_ties_included(seed: int) -> None:
    rng = random.Random(seed)
    a = [rng.randint(0, 4) for _ in range(7)]
    b = [rng.randint(0, 9) for _ in range(7)]
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


def test_spearman_of_nothing_to_rank_is_none() -> None:
    assert (
        spearman([1], [2]) is None and spearman([1, 1], [1, 2]) is None and spearman([], []) is None
    )


def test_record_has_rounds_bytes_and_rounds_to_targets(tmp_path: Path) -> None:
    one = asked(tmp_path)
    write(one.table, one.record, tmp_path / "record")
    again = read(one.table, tmp_path / "record").runs
    assert again == one.record.runs
    run = next(run for run in again.values() if run.method == "local")
    assert (run.rounds, run.bytes_up, run.bytes_down) == (7, 10**13 + 1, 5)
    assert run.rounds_to == {"0.5": math.inf, "0.25": 3.0}


def test_methods_that_lie_close_together_are_tied() -> None:
    assert tied([24.65, 20.97, 80.31, 20.97, 50.5], 5) == [20.97, 20.97, 80.31, 20.97, 50.5]
    assert tied([1, 5, 9], 4.5) == [1, 1, 1]  # The middle value links the other two.
    assert tied([1, 6, 11], 5) == [1, 6, 11]  # The distances equal the tolerance.
    assert tied([3, 3, 1], 0) == [3, 3, 1]


def result(
    value: float, split: str = "s", data: str = "d", rule: str = "last", method: str = "local"
) -> dict[str, Any]:
    return {
        "status": "done",
        "headline": {"metric": "test/acc", "rule": rule, "value": value},
        "metrics": {
            "test/acc": value,
            "test/acc_of_class_0": value - 0.5,
            "val/clients/acc_worst_10": value / 2,
        },
        "seconds": {"total": 1.5},
        "rounds": 7,
        "bytes": {"up": 10**13 + 1, "down": 5},
        "rounds_to": {"0.5": math.inf, "0.25": 3.0},
        "partition": {"sha256": split, "data_sha256": data},
        "hashes": {"config": "c", "code": "abcdef12"},
        "environment": {"commit": "1234", "packages": {"torch": "2"}, "processor": "x"},
        "choices": {"dataset": "digits", "method": method},
    }


@dataclass(frozen=True)
class Asked:
    """A made-up table with its cells and their runs."""

    table: Table
    cells: tuple[PlannedCell, ...]
    record: TableRecord
    runs: dict[tuple[str, ...], CellRun]

    @property
    def report(self) -> Report:
        return build_report(self.table, self.cells, self.record)


def report(tmp_path: Path, change: Any = None, **changes: Any) -> Report:
    return asked(tmp_path, change, **changes).report


def asked(tmp_path: Path, change: Any = None, **changes: Any) -> Asked:
    """Return a table with the rows beta = 1, 2 and the seeds 0, 1, and its runs.

    `change(job, cell)` returns the result of a run, or None, or a `CellRun`.
    """
    printed = [
        {"beta": 1, "method": "local", "value": 50.0},
        {"beta": 1, "method": "ensemble", "value": 60.0},
        {"beta": 2, "method": "local", "value": 50.0},
        {"beta": 2, "method": "ensemble", "value": 90.0},
    ]
    extra = changes.pop("extra", ())
    variant, only, seeds = (
        changes.pop(name, default)
        for name, default in (("variant", "full"), ("only", {}), ("seeds_asked", None))
    )
    given = {
        "keys": ["beta"],
        "conditions": {"beta": "partition.alpha={beta}"},
        "grids": [{"beta": [1, 2]}],
    }
    given["tolerance"] = {"within": 5, "why": "made up"}
    made = table(tmp_path, **(given | {"reference": printed} | changes))
    cells = planned_cells(made, variant, only=only, seeds=seeds, extra=extra)
    found = {}
    for planned in cells:
        for job in planned.jobs:
            run = change(job, planned.method) if change else result(0.5)
            if not isinstance(run, CellRun):
                config = CONFIG.with_values(where=list(job.overrides))
                folder = tmp_path / "runs" / planned.method / "-".join(job.overrides)
                run = CellRun(job, folder, config, run or {}, status="done" if run else "missing")
            found[job.overrides] = run
    what = TableRecord(variant, only, seeds, list(extra), "typed", {})
    return Asked(made, cells, recorded(made, cells, found, tmp_path, what), found)


def test_a_whole_report(tmp_path: Path) -> None:
    def run(job: Job, method: str) -> dict[str, Any]:
        high = 0.62 if "partition.alpha=1" in job.overrides else 0.8
        return result(
            (high if method == "ensemble" else 0.5) + 0.01 * job.seed,
            f"s{job.seed}{job.overrides[0]}",
        )

    made = report(tmp_path, run)
    assert [(c.method, c.verdict) for c in made.cells] == [
        ("local", "undecided"), ("ensemble", "undecided"), ("dense", "not run"),
        ("local", "undecided"), ("ensemble", "undecided"), ("dense", "not run"),
    ]  # fmt: skip
    assert made.cells[1].values == pytest.approx((62.0, 63.0)) and made.cells[1].seeds == (0, 1)
    assert made.cells[1].split_seeds == ("seed=0", "seed=1") and made.variant == "full"
    assert dict(made.cells[1].parts) == pytest.approx(
        {"test/acc_of_class_0": 12.5, "val/clients/acc_worst_10": 31.25}
    )
    assert [run.partition("/ensemble/")[0] for run in made.cells[1].runs] == ["runs", "runs"]
    assert made.cells[2].reason == "not here"
    assert made.cells[1].interval == pytest.approx(interval(2.5, 0.5**0.5))
    assert made.cells[4].interval == pytest.approx(interval(-9.5, 0.5**0.5))
    assert made.warnings == () and made.left_out == ()
    local, ensemble = made.summaries
    assert (local.method, local.rows, local.n, local.mean) == ("local", 2, 2, pytest.approx(0.5))
    assert ensemble.mean == pytest.approx((2.5 - 9.5) / 2) and ensemble.interval == pytest.approx(
        interval(-3.5, 0.5**0.5)
    )
    what = dict(made.assumptions)
    assert what["a tolerance of 5 percentage points"] == "made up"
    assert "each of the paper's numbers is one run" in what
    assert [a.rho for a in made.agreement] == [1.0, 1.0] and made.agreement[0].methods == 2
    assert dict(made.facts)["runs"] == "8 of 8" and dict(made.facts)["computing time"] == "12 s"


def test_agreement_leaves_out_means_that_are_nan(tmp_path: Path) -> None:
    made = report(tmp_path, lambda _, cell: result(math.nan if cell == "ensemble" else 0.5))
    assert {(found.rho, found.methods) for found in made.agreement} == {(None, 1)}


def interval(d: float, s: float) -> tuple[float, float]:
    """Return the 95 % interval of the mean of two runs minus one run of the paper."""
    low, high = stats.t(1, d, s * (1 / 2 + 1) ** 0.5).interval(0.95)
    return float(low), float(high)


def test_a_part_of_the_runs_is_a_form_of_its_own(tmp_path: Path) -> None:
    """A report on a part of the runs has the variant "partial".

    It does not matter whether only this part was requested or only this part exists.
    The report is not written to the folder of the whole variant.
    """
    for part in (
        asked(tmp_path, only={"beta": [1]}),
        asked(tmp_path, seeds_asked=[0]),
        asked(tmp_path, seeds_asked=[0, 1, 2]),
        asked(tmp_path, lambda job, method: None if job.seed else result(0.5)),
        asked(tmp_path, extra=["rounds=3"]),
    ):
        assert part.report.variant == "partial"
        assert "These are not exactly the runs of the full variant" in part.report.warnings
    whole = asked(tmp_path, extra=["output_root=elsewhere", "logger=wandb"])
    assert whole.report.variant == "full"
    smaller = asked(tmp_path, smoke={"what": "tiny"}, variant="smoke", only={"beta": [1]})
    assert smaller.report.variant == "smoke"
    folders = {
        report_folder(tmp_path, "a/b", variant, part)
        for variant in ("full", "reduced", "smoke")
        for part in (True, False)
    }
    assert len(folders) == 6


def test_what_is_left_out_is_listed(tmp_path: Path) -> None:
    part = report(tmp_path, only={"beta": [1]}, omits=["the panel on the left"])
    assert part.left_out == ("beta=2 (2 cells)", "the panel on the left")
    half = report(
        tmp_path,
        lambda job, m: result(0.5) if m == "local" or job.overrides[0].endswith("2") else None,
    )
    assert half.left_out == ("method=ensemble beta=1",)
    assert report(tmp_path).left_out == ()


def test_a_column_that_reads_anothers_numbers_is_held_against_them(tmp_path: Path) -> None:
    methods = [
        *TINY["methods"],
        {"key": "plain", "label": "Plain", "overrides": [], "role": "ours", "reads": "ensemble"},
    ]
    made = report(tmp_path, methods=methods)
    assert [c.paper for c in made.cells if c.method == "plain"] == [60.0, 90.0]
    assert made.methods[-1].role == "ours"


def test_columns_that_are_equal_by_construction_say_so(tmp_path: Path) -> None:
    first, second, *others = TINY["methods"]
    second = {**second, "equals": {"column": "local", "where": {"beta": 2}}}
    made = report(tmp_path, methods=[first, second, *others])
    assert [c.same_as for c in made.cells if c.method == "ensemble"] == ["", "local"]


def test_a_columns_own_seeds(tmp_path: Path) -> None:
    first, *others = TINY["methods"]
    made = report(tmp_path, methods=[{**first, "seeds": [0, 1, 2, 3]}, *others])
    assert [c.n for c in made.cells] == [4, 2, 0] * 2 and made.variant == "full"


def test_a_report_of_the_record_is_the_report_of_the_runs(tmp_path: Path) -> None:
    """The reports are equal for all unusual runs.

    There are failed runs, absent runs, runs without the headline number, runs of other
    code, and infinite numbers.
    """

    def odd(job: Job, method: str) -> CellRun | dict[str, Any] | None:
        config = CONFIG
        if method == "local" and job.seed:
            return CellRun(
                job, tmp_path / "runs" / "x", config, status="failed", error='loss, "NaN"\nor so'
            )
        if method == "local":
            return CellRun(
                job, tmp_path / "cafe", config, result(float("inf")), other_code=True, status="done"
            )
        if "partition.alpha=1" in job.overrides:
            return {key: value for key, value in result(0.5).items()} if job.seed else None
        return result(0.61 + 0.1 * job.seed, split=f"s{job.seed}")

    node = {"_target_": f"{__name__}.Square"}
    for change in (odd, None):
        one = asked(tmp_path, change, drawings=[node], claims=[CLAIM])
        made, missed = draw_figures(one.table, one.cells, one.runs, one.report)
        record = replace(one.record, figures=[(p.name, p.title) for p in made], missed=missed)
        whole = with_pictures(one.report, made, missed)
        folder = tmp_path / "report"
        write(one.table, record, folder)
        write_report(whole, folder)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        again = read(one.table, folder)
        assert again.runs == record.runs and again.curves == record.curves
        same = with_pictures(
            build_report(one.table, one.cells, again), pictures(again, folder), again.missed
        )
        assert markdown(same) == markdown(whole) and same == whole
        write_report(same, folder)
        write(one.table, again, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_what_the_table_has_got_since_the_record_is_missing_from_it(tmp_path: Path) -> None:
    old = asked(tmp_path)
    write(old.table, old.record, tmp_path / "report")
    first, *others = TINY["methods"]
    new = {
        "key": "plain",
        "label": "Plain",
        "overrides": ["method=plain"],
        "role": "ours",
        "reads": "ensemble",
    }
    now = asked(tmp_path, methods=[{**first, "seeds": [0, 1, 2]}, *others, new])
    made = build_report(now.table, now.cells, read(now.table, tmp_path / "report"))
    assert [(c.method, c.n) for c in made.cells[:4]] == [
        ("local", 2),
        ("ensemble", 2),
        ("dense", 0),
        ("plain", 0),
    ]
    assert made.variant == "partial" and dict(made.facts)["runs"] == "8 of 14"
    assert [c.mean for c in made.cells[:2]] == [c.mean for c in old.report.cells[:2]]


def test_a_record_is_completed_with_what_others_have_and_it_lacks(tmp_path: Path) -> None:
    whole = asked(tmp_path)
    own = {key: run for key, run in whole.record.runs.items() if key[1] == "local"}
    wrong = {key: replace(run, value=0.0) for key, run in own.items()}
    empty = {
        key: replace(run, value=None, status="missing")
        for key, run in whole.record.runs.items()
        if key not in own
    }
    first = replace(
        whole.record,
        runs={**own, **empty},
        configs={name: {} for name in {r.config for r in own.values()}},
    )
    other = replace(whole.record, runs={**whole.record.runs, **wrong})
    together = completed(first, [other])
    assert build_report(whole.table, whole.cells, together) == whole.report
    assert together.configs.keys() == whole.record.configs.keys()
    failed = {
        key: replace(run, value=None, status="failed") for key, run in whole.record.runs.items()
    }
    bare = replace(
        whole.record, runs=empty | {key: replace(run, value=None) for key, run in own.items()}
    )
    assert all(
        run.status == "failed"
        for run in completed(replace(whole.record, runs=failed), [bare]).runs.values()
    )
    with pytest.raises(ConfigError, match="records of different seeds") as refused:
        completed(first, [replace(other, seeds=[7])])
    assert "expected: the table's" in str(refused.value) and "got:      7" in str(refused.value)


def test_completed_record_has_the_cells_of_all_records(tmp_path: Path) -> None:
    (low, high) = (asked(tmp_path, only={"beta": [beta]}).record for beta in (1, 2))
    assert low.runs and not low.runs.keys() & high.runs.keys()
    both = completed(low, [high])
    assert both.only == {"beta": [1, 2]} and both.runs == {**low.runs, **high.runs}
    # A record that contains the other one keeps its cells.
    part = replace(low, only={"beta": [1], "method": ["local"]})
    assert completed(part, [low]).only == completed(low, [part]).only == {"beta": [1]}
    assert completed(low, [asked(tmp_path).record]).only == {}
    # One restriction to the cells of both would have further cells.
    with pytest.raises(ConfigError, match="differ in several conditions"):
        completed(part, [high])


def test_report_of_some_cells_says_so_in_every_variant(tmp_path: Path) -> None:
    warning = "Only some cells of the table were asked for: beta=1"
    variants: dict[str, dict[str, Any]] = {"full": {}, "smoke": {"smoke": {"what": "tiny"}}}
    for variant, changes in variants.items():
        given = changes | {"variant": variant}
        assert warning in report(tmp_path, only={"beta": [1]}, **given).warnings
        assert warning not in report(tmp_path, **given).warnings


# The values of the last rounds, by seed. A spreadsheet takes a text that starts with a
# minus sign for a formula.
TAILS = {0: [-0.25, 0.5, 0.125], 1: [0.75, 0.3125, 0.0625]}


def tailed(job: Job, method: str) -> dict[str, Any]:
    """Return a result with values of the last rounds, as `fedexp.running.summary` does."""
    return {**result(0.5), "last_10": {"test/acc": TAILS[job.seed], "test/loss": [9.0, 8.0]}}


POOLING: dict[str, Any] = {
    "headline": {"value": "headline.value", "scale": 100, "pooled_rounds": "last_10.test/acc"}
}
_FIRST, _SECOND, *_OTHERS = TINY["methods"]


def test_the_last_rounds_of_all_runs_are_pooled_and_a_record_keeps_them(tmp_path: Path) -> None:
    one = asked(
        tmp_path,
        tailed,
        **POOLING,
        methods=[_FIRST, {**_SECOND, "value": "metrics.test/acc"}, *_OTHERS],
    )
    local, ensemble, dense = one.report.cells[:3]
    together = [100 * value for seed in (0, 1) for value in TAILS[seed]]
    assert (
        local.pooled_sd
        == pytest.approx(statistics.stdev(together))
        != pytest.approx(statistics.pstdev(together))
    )
    assert local.pooled_mean == pytest.approx(statistics.mean(together)) and local.sd == 0
    # This column reads another number.
    assert ensemble.n == 2 and ensemble.last_10 == ()
    assert dense.pooled_mean is None and dense.pooled_sd is None
    write(one.table, one.record, tmp_path / "report")
    write_report(one.report, tmp_path / "report")
    with (tmp_path / "report" / RUNS).open(newline="") as file:
        first, second, *_ = csv.DictReader(file)
    assert (first["last_10"], second["last_10"]) == ("'-25.0 50.0 12.5", "75.0 31.25 6.25")
    with (tmp_path / "report" / "report.csv").open(newline="") as file:
        first, second, *_ = csv.DictReader(file)
    assert (
        float(first["pooled_sd"]) == pytest.approx(statistics.stdev(together))
        and second["pooled_sd"] == ""
    )
    assert (
        float(first["pooled_mean"]) == pytest.approx(statistics.mean(together))
        and second["pooled_mean"] == ""
    )
    again = read(one.table, tmp_path / "report")
    assert again.runs == one.record.runs and build_report(one.table, one.cells, again) == one.report


def test_without_all_runs_last_rounds_or_the_key_nothing_is_pooled(tmp_path: Path) -> None:
    whole = asked(tmp_path, tailed, **POOLING)
    assert texts.POOLED in markdown(whole.report)
    write(whole.table, whole.record, tmp_path / "report")
    path = tmp_path / "report" / RUNS
    with path.open(newline="") as file:
        rows = [
            {key: text for key, text in row.items() if key != "last_10"}
            for row in csv.DictReader(file)
        ]
    # Older records have no such column.
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    old = build_report(whole.table, whole.cells, read(whole.table, tmp_path / "report"))
    assert [c.values for c in old.cells] == [c.values for c in whole.report.cells]
    assert all(c.pooled_sd is None for c in old.cells) and texts.POOLED not in markdown(old)

    def older(job: Job, method: str) -> dict[str, Any]:
        found = tailed(job, method)
        return (
            {key: own for key, own in found.items() if key != "last_10"}
            if job.seed and method == "local"
            else found
        )

    assert [c.pooled_sd is None for c in report(tmp_path, older, **POOLING).cells] == [
        True,
        False,
        True,
    ] * 2
    # The metric of this config belongs to another kind of method.
    elsewhere = {"headline": {**POOLING["headline"], "pooled_rounds": "last_10.test/global/acc"}}
    for made in (report(tmp_path, tailed), report(tmp_path, tailed, **elsewhere)):
        assert all(c.n == 2 and c.last_10 == () for c in made.cells if c.method != "dense")


# The values of each grid point on test data and on held-out data.
SCORES = {"0.5": (0.60, 0.70), "1": (0.65, 0.55)}


def scored(job: Job, method: str) -> dict[str, Any]:
    """Return the result of a run of a grid, which improves with the seed.

    Others get 0.5.
    """
    test, held = SCORES.get(job.point, (0.5, 0.5))
    return result(test + 0.01 * job.seed) | {"metrics": {"val/global/acc": held}}


def test_a_column_has_the_best_of_a_grid_by_test_or_held_out_data(tmp_path: Path) -> None:
    claim = {**CLAIM, "a": ["local"], "b": ["ensemble"]}
    oracle = asked(tmp_path, scored, methods=gridded(), claims=[claim]).report
    held = asked(
        tmp_path, scored, methods=gridded(by="metrics.val/global/acc"), claims=[claim]
    ).report
    for made, values, points in (
        (oracle, (65.0, 66.0), ("1", "1")),
        (held, (60.0, 61.0), ("0.5", "0.5")),
    ):
        assert made.cells[0].values == pytest.approx(values) and made.cells[0].chosen == points
        assert (
            made.cells[0].seeds == (0, 1) and made.cells[1].chosen == () and made.variant == "full"
        )
        (row, _) = made.claims[0].rows
        # Claims use the chosen point.
        assert row.estimate == pytest.approx(values[0] - 50) and row.n == 2
        assert dict(made.facts)["runs"] == "12 of 12"
    assert [bool(made.methods[0].oracle) for made in (oracle, held)] == [True, False]
    assert dict(held.assumptions)[
        "Local acc: the step with the highest metrics.val/global/acc in every trial"
    ] == ("held-out data choose")
    best = gridded(by="metrics.val/global/acc", best="lowest")
    assert report(tmp_path, scored, methods=best).cells[0].chosen == ("1", "1")


def test_a_grid_with_a_point_missing_is_incomplete(tmp_path: Path) -> None:
    """The best of the existing points need not be the best point of the grid."""

    def lacking(job: Job, method: str) -> CellRun | dict[str, Any] | None:
        if job.point == "0.5" and job.seed:
            return CellRun(
                job,
                tmp_path,
                ResolvedConfig({"dataset": DATASET}),
                status="failed",
                error="no memory",
            )
        return scored(job, method)

    made = report(tmp_path, lacking, methods=gridded(), only={"beta": [1]})
    assert made.cells[0].values == pytest.approx((65.0,)) and made.variant == "partial"
    said = "the grid of step is incomplete: seed=1 has no number at 1 of 2 values: 0.5 (no memory)"
    assert (
        said in made.cells[0].reason
        and "1 cell with runs missing: local beta=1 1/2" in made.warnings
    )
    none = report(
        tmp_path,
        lambda j, m: None if j.point == "1" else scored(j, m),
        methods=gridded(),
        only={"beta": [1]},
    )
    assert (
        none.cells[0].verdict == "not run"
        and "seed=0 has no number at 1 of 2 values: 1 (missing)" in none.cells[0].reason
    )
    other = report(tmp_path, scored, methods=gridded(by="metrics.val/acc"), only={"beta": [1]})
    assert (
        other.cells[0].values == ()
        and "0.5 (result.json has no 'metrics.val/acc')" in other.cells[0].reason
    )


def test_a_point_that_diverged_is_the_worst_and_of_equal_ones_the_first_counts(
    tmp_path: Path,
) -> None:
    def odd(job: Job, method: str) -> dict[str, Any]:
        return result(float("nan") if job.point == "0.5" and not job.seed else 0.4)

    for best, higher in (("highest", True), ("lowest", False)):
        made = report(tmp_path, odd, methods=gridded(best=best), higher_is_better=higher)
        assert made.cells[0].chosen == ("1", "0.5")


def test_one_run_may_hold_a_whole_grid(tmp_path: Path) -> None:
    """The points are distinguished by a value that each iteration of a trace has."""
    methods = gridded(overrides=[], by="trace.1.lam={point}.fused/val/acc")
    methods[0]["value"] = "trace.1.lam={point}.fused/acc"
    rows = [
        {"iteration": 0, "lam": 0.5, "fused/acc": 0.6, "fused/val/acc": 0.8},
        {"iteration": 1, "lam": 1.0, "fused/acc": 0.7, "fused/val/acc": 0.6},
    ]
    one = asked(tmp_path, methods=methods)
    for run in one.runs.values():
        write_json(run.folder / "trace" / "1.json", rows)
    one = asked(tmp_path, methods=methods)
    assert one.report.cells[0].values == pytest.approx((60.0, 60.0)) and one.report.cells[
        0
    ].chosen == ("0.5", "0.5")
    assert dict(one.report.facts)["runs"] == "8 of 8"
    run = one.runs[one.cells[0].jobs[0].overrides]
    assert (
        read_value(run, "trace.1.lam=5e-1.fused/acc")
        == read_value(run, "trace.1.0.fused/acc")
        == 0.6
    )
    with pytest.raises(ConfigError, match=r"no iteration with lam=0\.7") as error:
        read_value(run, "trace.1.lam=0.7.fused/acc")
    assert "0.5, 1" in str(error.value)
    write(one.table, one.record, tmp_path / "record")
    again = read(one.table, tmp_path / "record")
    assert again.runs == one.record.runs and len(again.runs) == 2 * 2 * 3
    assert build_report(one.table, one.cells, again) == one.report


CLAIM = {
    "id": "more",
    "where": "text",
    "says": "more is better",
    "test": "above",
    "a": ["ensemble"],
    "b": ["local"],
}


def test_a_claim_without_its_curves_stays_open(tmp_path: Path) -> None:
    """The runs were not traced, or their code numbered the iterations differently."""
    curve = {"curve": "mean_v/acc", "target": {"share": 0.9}, "test": "sooner"}
    one = asked(tmp_path, claims=[{**CLAIM, **curve}])
    write_json(
        one.runs[one.cells[0].jobs[0].overrides].folder / "trace" / "1.json",
        [{"step": 1, "mean_v/acc": 0.5}],
    )
    again = asked(tmp_path, claims=[{**CLAIM, **curve}])
    assert again.record.curves == {} and again.report.claims[0].state == "undecided"
    write_text(one.runs[one.cells[0].jobs[0].overrides].folder / "trace" / "1.json", "[{")
    again = asked(tmp_path, claims=[{**CLAIM, **curve, "a": ["local"], "b": ["ensemble"]}])
    damaged = next(run for run in again.record.runs.values() if run.status == "damaged")
    assert damaged.error == "1.json is damaged" and any(
        "1.json" in text for text in again.report.cells[0].failed
    )


def test_a_claim_about_rows_that_are_not_asked_for_stays_open(tmp_path: Path) -> None:
    def better(job: Job, method: str) -> dict[str, Any]:
        return result(0.6 + 0.01 * job.seed if method == "ensemble" else 0.5)

    (whole,) = report(tmp_path, better, claims=[CLAIM]).claims
    assert (whole.state, whole.printed, whole.contradicted_in_print) == (
        "supported",
        "2 of 2 rows",
        False,
    )
    (part,) = report(tmp_path, better, claims=[CLAIM], only={"beta": [1]}).claims
    assert part.state == "undecided" and "1 of 2 rows lack runs of a column" in part.reason
    (smaller,) = report(
        tmp_path, better, claims=[CLAIM], smoke={"what": "tiny"}, variant="smoke"
    ).claims
    assert smaller.state == "undecided" and "smoke" in smaller.reason


def test_another_tables_record_is_refused(tmp_path: Path) -> None:
    one = asked(tmp_path)
    with pytest.raises(ConfigError, match="no record of a table"):
        read(one.table, tmp_path)
    write(one.table, one.record, tmp_path)
    with pytest.raises(ConfigError, match="another table's"):
        read(replace(one.table, name="other/table"), tmp_path)


@pytest.mark.parametrize(("keys", "got"), [
    (("beta", "clients"), "without clients"),
    ((), "several runs of method="),
])  # fmt: skip
def test_record_of_a_table_with_other_keys_is_refused(
    keys: tuple[str, ...], got: str, tmp_path: Path
) -> None:
    one = asked(tmp_path)
    write(one.table, one.record, tmp_path)
    assert one.table.keys == ("beta",)
    with pytest.raises(ConfigError, match="other keys than the table") as refused:
        read(replace(one.table, keys=keys), tmp_path)
    assert got in str(refused.value)


def test_record_of_cells_with_another_condition_is_refused(tmp_path: Path) -> None:
    one = asked(tmp_path)
    write(one.table, replace(one.record, only={"bta": [0.1]}), tmp_path)
    with pytest.raises(ConfigError, match="other keys than the table") as refused:
        read(one.table, tmp_path)
    assert "a record made with --only bta=0.1" in str(refused.value)


@pytest.mark.parametrize(("name", "old", "new", "got"), [
    ("record.json", '"only": {}', '"only": []', "'only' has the wrong type"),
    ("record.json", '"only": {}', '"only": {"beta": 0.1}', "'only.beta' has the wrong type"),
    ("record.json", '"extra": []', '"extra": [1]', "'extra[0]' has the wrong type"),
    ("record.json", '"seeds": null', '"seeds": ["x"]', "'seeds[0]' has the wrong type"),
    ("record.json", '"full"', '"ful"', "'ful' is not a choice of 'form'"),
    ("record.json", '"form"', '"forms"', "no key 'form'"),
    ("record.json", '"command"', '"commands"', "no key 'command'"),
    ("record.json", "}", "", "it is not JSON"),
    ("runs.csv", "done,", "", "line 2: the number of cells is not that of line 1"),
    ("runs.csv", "done,", "done,,", "line 2: the number of cells is not that of line 1"),
    ("runs.csv", ",50.0,", ",5o.0,", "line 2: could not convert string to float: '5o.0'"),
    ("runs.csv", ",1.5,", ",,", "line 2: could not convert string to float: ''"),
    ("runs.csv", ",False,", ",Fals,", "line 2: expected True or False, got 'Fals'"),
    ("runs.csv", ",value,", ",valve,", "no column 'value'"),
    ("runs.csv", "tiny,1,", "tiny,[1],", "line 2: expected one value, got '[1]'"),
    ("curves.csv", ",x,", ",z,", "no column 'x'"),
    ("curves.csv", ",0.5\n", ",o.5\n", "line 2: could not convert string to float: 'o.5'"),
    ("curves.csv", "\n1,", "\n{},", "line 2: expected one value, got '{}'"),
    ("configs.json", '"of each"', '"each"', "no key 'of each'"),
    ("configs.json", '"of each": {', '"of each": {"a": 1,', "'of each.a' has the wrong type"),
])  # fmt: skip
def test_damaged_record_is_refused(name: str, old: str, new: str, got: str, tmp_path: Path) -> None:
    one = asked(tmp_path)
    key = next(iter(one.record.runs))
    curves = {(*key[:3], "curve"): ((1.0, 0.5), (2.0, 0.25))}
    write(one.table, replace(one.record, curves=curves), tmp_path)
    text = (tmp_path / name).read_text()
    assert old in text, text
    (tmp_path / name).write_text(text.replace(old, new))
    with pytest.raises(StorageError, match=f"{name} is damaged") as refused:
        read(one.table, tmp_path)
    assert got in str(refused.value) and "fedexp-table" in str(refused.value)


@pytest.mark.parametrize(("name", "content", "got"), [
    ("record.json", b"", "it is not JSON"),
    ("record.json", b"null", "it is not a JSON object"),
    ("record.json", b"[]", "it is not a JSON object"),
    ("record.json", b"{}", "no key 'table'"),
    ("configs.json", b"[]", "it is not a JSON object"),
    ("runs.csv", b"", "it is empty"),
    ("runs.csv", b"\n", "no column 'method'"),
    ("runs.csv", b"null\n", "no column 'method'"),
    ("runs.csv", b"\xff\n", "can't decode byte"),
])  # fmt: skip
def test_file_of_a_record_with_other_content_is_refused(
    name: str, content: bytes, got: str, tmp_path: Path
) -> None:
    one = asked(tmp_path)
    write(one.table, one.record, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StorageError, match=f"{name} is damaged") as refused:
        read(one.table, tmp_path)
    assert got in str(refused.value)
    if name == "record.json":
        with pytest.raises(StorageError, match=f"{name} is damaged"):
            name_of_table(tmp_path)


def test_incomplete_last_line_of_a_record_is_refused(tmp_path: Path) -> None:
    one = asked(tmp_path)
    write(one.table, one.record, tmp_path)
    text = (tmp_path / "runs.csv").read_text()
    (tmp_path / "runs.csv").write_text(text[:-2])
    with pytest.raises(StorageError, match="its last line is incomplete"):
        read(one.table, tmp_path)


def test_unequal_n_is_never_silent(tmp_path: Path) -> None:
    made = report(tmp_path, lambda job, m: None if job.seed == 1 and m == "local" else result(0.5))
    assert any("unequal numbers of runs: n is 1, 2" in w for w in made.warnings)
    assert any("local beta=1 1/2" in w for w in made.warnings)
    assert "one seed" in made.cells[0].reason
    everywhere = report(tmp_path, lambda job, m: None if job.seed == 1 else result(0.5))
    assert not any("unequal" in w for w in everywhere.warnings)
    assert any("4 cells with runs missing" in w for w in everywhere.warnings)


def test_different_splits_of_a_row_are_explained(tmp_path: Path) -> None:
    """The ensemble withholds data for the server, so its clients have fewer samples."""

    def change(job: Job, method: str) -> CellRun:
        size = 0.02 if method == "ensemble" else 0
        config = CONFIG.with_values(proxy={"size": size, "labelled": bool(size)}, rounds=1)
        made = result(0.5, split=method)
        made["hashes"] = {"config": method, "code": "abcdef12"}
        folder = tmp_path / "runs" / method / "-".join(job.overrides)
        return CellRun(job, folder, config, made, status="done")

    one = asked(tmp_path, change)
    configs = {name: {**config, "rounds": 1} for name, config in one.record.configs.items()}
    assert configs
    (warning,) = [w for w in one.report.warnings if "different data splits" in w]
    assert warning.endswith("proxy.size is 0 (local) or 0.02 (ensemble)")


def test_runs_at_chance_level_are_named_and_stay_in_the_mean(tmp_path: Path) -> None:
    def change(job: Job, method: str) -> dict[str, Any]:
        made = result(0.1 if job.seed == 0 and method == "ensemble" else 0.6)
        made["choices"]["dataset"] = "fashion_mnist"
        return made

    column = {"key": "ensemble", "label": "E", "role": "local", "overrides": ["method=ensemble"]}
    made = report(tmp_path, change, methods=[column], reference=[])
    assert [cell.did_not_learn for cell in made.cells] == [(True, False)] * 2
    assert made.cells[0].mean == pytest.approx(35.0)
    assert any(w.startswith("2 numbers of runs that did not learn") for w in made.warnings)


def test_a_record_names_threads_and_engine(tmp_path: Path) -> None:
    engine = {"_target_": "fedexp.engines.vectorized.Vectorized", "stack": 8, "kernel": "auto"}

    def change(job: Job, method: str) -> dict[str, Any]:
        return result(0.5) | {"numerics": {"threads": 2, "engine": engine}}

    one = asked(tmp_path, change)
    write(one.table, one.record, tmp_path / "record")
    with (tmp_path / "record" / RUNS).open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["threads"], row["engine"], row["processor"]) for row in rows} == {
        ("2", "Vectorized kernel=auto stack=8", "x")
    }
    again = read(one.table, tmp_path / "record")
    assert {(run.threads, run.engine) for run in again.runs.values()} == {
        (2, "Vectorized kernel=auto stack=8")
    }
    assert ("threads", "2") in one.report.facts


def test_reserved_server_data_are_removed_in_every_column(tmp_path: Path) -> None:
    one = asked(tmp_path, server_data="reserved")
    for planned in one.cells:
        for job in planned.jobs:
            assert {"proxy.source=train", "proxy.size=0.02"} <= set(job.overrides)
    plain = asked(tmp_path)
    assert not any("proxy" in o for c in plain.cells for job in c.jobs for o in job.overrides)
    rule = [{"where": {"method": "ensemble"}, "overrides": ["proxy.size=200"]}]
    with pytest.raises(ConfigError, match="'local' and 'ensemble' would reserve different"):
        asked(tmp_path, server_data="reserved", rules=rule)
    everywhere = [{"where": {}, "overrides": ["proxy.size=200"]}]
    one = asked(tmp_path, server_data="reserved", rules=everywhere)
    assert all("proxy.size=200" in job.overrides for c in one.cells for job in c.jobs)


def test_mixed_splits_data_rules_and_code_are_told(tmp_path: Path) -> None:
    split = report(tmp_path, lambda job, m: result(0.5, split=m if job.seed == 1 else "s"))
    (warning,) = split.warnings
    assert "different data splits: beta=1 seed=1; beta=2 seed=1" in warning
    data = report(tmp_path, lambda job, m: result(0.5, data=f"d{job.seed}"))
    assert ["Data set digits was not the same" in w for w in data.warnings] == [True]
    rules = report(
        tmp_path, lambda job, m: result(0.5, rule="last" if job.seed else "best_on_val", method=m)
    )
    assert ["different headline rules: best_on_val, last" in w for w in rules.warnings] == [True]

    def other(job: Job, method: str) -> CellRun:
        config = CONFIG
        folder = tmp_path / method / "-".join(job.overrides)
        return CellRun(job, folder, config, result(0.5), other_code=job.seed == 1, status="done")

    code = report(tmp_path, other)
    assert ["4 runs of 8 were made by other code" in w for w in code.warnings] == [True]
    assert "made by other code" in code.cells[0].reason

    def waiting(job: Job, method: str) -> CellRun:
        return CellRun(job, tmp_path / "cafe", others=(tmp_path,))

    assert any("--any-code" in w for w in report(tmp_path, waiting).warnings)


def test_what_is_smaller_altered_or_lossy_is_never_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = report(tmp_path, smoke={"what": "tiny data"}, variant="smoke")
    assert {c.verdict for c in smaller.cells if c.values} == {"not comparable"}
    assert smaller.cells[0].reduced == smaller.cells[0].reason == "tiny data"

    def altered(job: Job, method: str) -> CellRun:
        config = CONFIG
        return CellRun(job, tmp_path, config, result(0.5), altered=True, status="done")

    changed = report(tmp_path, altered, extra=["rounds=3"])
    assert (
        changed.cells[0].verdict == "not comparable"
        and changed.cells[0].reason == "run with rounds=3"
    )
    from fedexp.data.digits import Digits

    monkeypatch.setattr(Digits, "faithful", False, raising=False)
    lossy = report(tmp_path)
    assert (lossy.cells[0].verdict, lossy.cells[0].reason) == (
        "not comparable", "the data differ from the paper's: digits",
    )  # fmt: skip


def test_a_run_counts_once_however_many_conditions_it_stands_for(tmp_path: Path) -> None:
    pooled = report(tmp_path, keys=[], reference=[], extra=["partition.alpha=3"])
    assert [cell.n for cell in pooled.cells] == [2, 2, 0] and not any(
        "missing" in w for w in pooled.warnings
    )


def test_failures_are_told_with_their_error(tmp_path: Path) -> None:
    def failing(job: Job, method: str) -> CellRun | dict[str, Any]:
        if method == "local":
            return CellRun(
                job,
                tmp_path / "runs" / "x",
                ResolvedConfig({"dataset": DATASET}),
                status="failed",
                error="loss is NaN",
            )
        return result(0.5)

    made = report(tmp_path, failing)
    assert made.cells[0].verdict == "not run" and made.cells[0].reason == "failed: loss is NaN"
    assert made.cells[0].failed == ("runs/x: loss is NaN",)
    assert any(w.startswith("2 runs failed, in local beta=1, local beta=2") for w in made.warnings)


def test_numbers_are_read_by_path() -> None:
    stored = {
        "metrics": {"test/global/acc": 0.5},
        "per_client": {"test/local/acc": [0.1, 0.2]},
        "rounds_to": {"0.30": 7, "0": 1},
        "name": "x",
        "none": None,
    }
    assert read_path(stored, "metrics.test/global/acc") == 0.5
    assert read_path(stored, "per_client.test/local/acc.1") == 0.2
    assert read_path(stored, "rounds_to.0.30") == 7 and read_path(stored, "rounds_to.0") == 1
    for path in (
        "rounds_to.0.3",
        "metrics.test",
        "per_client.test/local/acc.2",
        "name",
        "none",
        "metrics",
    ):
        with pytest.raises(ConfigError):
            read_path(stored, path)


@dataclass(frozen=True)
class Torn(Drawing):
    """A drawing that cannot be drawn."""

    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        raise DataError("the paper is torn")


@dataclass(frozen=True)
class Square(Drawing):
    def draw(self, runs: Sequence[DrawnRun], notes: Sequence[str] = ()) -> tuple[Picture, ...]:
        return (Picture("square", " ".join([f"{len(runs)} runs", *notes]), "<svg/>", b"png"),)


def test_a_drawing_that_cannot_be_made_is_a_warning_and_the_others_stay(tmp_path: Path) -> None:
    nodes = [{"_target_": f"{__name__}.Torn"}, {"_target_": f"{__name__}.Square"}]
    made = table(tmp_path, drawings=[*nodes, nodes[1]])
    cells = planned_cells(made)
    found = {
        job.overrides: CellRun(job, tmp_path, ResolvedConfig(), result(0.5), status="done")
        for s in cells
        for job in s.jobs
    }
    whole = report(tmp_path)
    whole = with_pictures(whole, *draw_figures(made, cells, found, whole))
    assert "Torn is not drawn: the paper is torn" in whole.warnings
    assert "Square is not drawn: another picture is called square: give it a name" in whole.warnings
    assert [picture.name for picture in whole.pictures] == ["square", "delta", "curves"]
    alone = report(tmp_path, reference=[])
    alone = with_pictures(alone, *draw_figures(made, cells, found, alone))
    assert [picture.name for picture in alone.pictures] == ["square"]
    count = f"{sum(len(s.jobs) for s in cells)} runs"
    stamp = "my/tiny, full variant; n = 2 runs per cell; commit 1234."
    assert whole.pictures[0].title == f"{count} Full: all of the table's cells and runs. {stamp}"
    ((smaller,), _) = draw_figures(
        table(tmp_path, drawings=[nodes[1]]), cells, found, replace(alone, variant="smoke")
    )
    assert smaller.title.startswith(f"{count} Smoke test: ")


def test_row_of_two_versions_is_warned_about(tmp_path: Path) -> None:
    def of_version(job: Job, method: str) -> dict[str, Any] | None:
        new = {"fedexp_version": "0.2.0"} if method == "local" or job.seed else {}
        return result(0.5) | new

    made = report(tmp_path, of_version)
    (warning,) = [text for text in made.warnings if "version" in text]
    assert warning == (
        "Runs of one row are of different versions of fedexp: "
        "beta=1 (0.1, 0.2.0); beta=2 (0.1, 0.2.0)"
    )
    made = report(tmp_path, lambda job, method: result(0.5) | {"fedexp_version": "0.2.0"})
    assert not [text for text in made.warnings if "version" in text]
    record = asked(tmp_path)
    write(record.table, record.record, tmp_path)
    assert "fedexp_version" in (tmp_path / "runs.csv").read_text().splitlines()[0].split(",")
