"""Verdicts, agreement and warnings, from runs that are made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedexp.core.errors import ConfigError, DataError
from fedexp.tables.cells import Job, slots
from fedexp.tables.drawing import Drawing, DrawnRun
from fedexp.tables.gather import judge, make_report, with_pictures
from fedexp.tables.lookup import CellRun, read_path
from fedexp.tables.ranks import spearman, tied
from fedexp.tables.report.report import Cell, Picture, Report
from tests.tables.test_schema import table

DATASET = {"_target_": "fedexp.data.digits.Digits"}


@pytest.mark.parametrize("seed", range(30))
def test_spearman_is_scipys_ties_included(seed: int) -> None:
    rng = random.Random(seed)
    a = [rng.randint(0, 4) for _ in range(7)]
    b = [rng.randint(0, 9) for _ in range(7)]
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


def test_spearman_of_nothing_to_rank_is_none() -> None:
    assert spearman([1], [2]) is None and spearman([1, 1], [1, 2]) is None and spearman([], []) is None


def test_methods_that_lie_close_together_are_tied() -> None:
    assert tied([24.65, 20.97, 80.31, 20.97, 50.5], 5) == [20.97, 20.97, 80.31, 20.97, 50.5]
    assert tied([1, 5, 9], 4.5) == [1, 1, 1]  # linked through the middle one
    assert tied([1, 6, 11], 5) == [1, 6, 11]  # just as far apart as it takes
    assert tied([3, 3, 1], 0) == [3, 3, 1]


def cell(paper: float | None, *values: float) -> Cell:
    return Cell({}, "m", paper, None, values, tuple(range(len(values))), "not run")


@pytest.mark.parametrize(("case", "tolerance", "objection", "verdict"), [
    (cell(80.0), 5, "", "not run"),
    (cell(80.0, 74.0, 78.0), 5, "", "reproduced"),
    (cell(80.0, 75.0), 5, "", "reproduced"),  # just within
    (cell(80.0, 85.5), 5, "", "deviates"),
    (cell(80.0, 74.0), 5, "", "deviates"),
    (cell(None, 74.0), 5, "", "no reference"),
    (cell(80.0, 80.0), 5, "smaller", "not comparable"),
    (cell(80.0, 80.0), None, "", "no reference"),
])  # fmt: skip
def test_verdicts(case: Cell, tolerance: float | None, objection: str, verdict: str) -> None:
    assert judge(case, tolerance, "points", objection)[0] == verdict


def result(
    value: float, split: str = "s", data: str = "d", rule: str = "last", method: str = "local"
) -> dict[str, Any]:
    return {
        "status": "done",
        "headline": {"metric": "test/acc", "rule": rule, "value": value},
        "seconds": {"total": 1.5},
        "partition": {"sha256": split, "data_sha256": data},
        "hashes": {"config": "c", "code": "abcdef12"},
        "environment": {"commit": "1234", "packages": {"torch": "2"}, "processor": "x"},
        "choices": {"dataset": "digits", "method": method},
    }


def report(tmp_path: Path, change: Any = None, **changes: Any) -> Report:
    """Of a table with rows beta 1, 2 and seeds 0, 1; `change(job, cell)` gives a run's result, or None, or a `CellRun`."""
    printed = [
        {"beta": 1, "method": "local", "value": 50.0},
        {"beta": 1, "method": "ensemble", "value": 60.0},
        {"beta": 2, "method": "local", "value": 50.0},
        {"beta": 2, "method": "ensemble", "value": 90.0},
    ]
    extra = changes.pop("extra", ())
    form = changes.pop("form", "full")
    given = {"keys": ["beta"], "conditions": {"beta": "partition.alpha={beta}"}, "grids": [{"beta": [1, 2]}]}
    made = table(tmp_path, **(given | {"reference": printed} | changes))
    cells = slots(made, form, extra=extra)
    found = {}
    for slot in cells:
        for job in slot.jobs:
            run = change(job, slot.method) if change else result(0.5)
            if not isinstance(run, CellRun):
                config = {"dataset": DATASET, "choices": {"dataset": "digits"}}
                folder = tmp_path / "runs" / slot.method / f"{job.seed}"
                run = CellRun(job, folder, config, run or {}, status="done" if run else "missing")
            found[job.overrides] = run
    return make_report(made, form, cells, found, root=tmp_path, command="typed", extra=extra)


def test_a_whole_report(tmp_path: Path) -> None:
    def run(job: Job, method: str) -> dict[str, Any]:
        high = 0.62 if "partition.alpha=1" in job.overrides else 0.8
        return result((high if method == "ensemble" else 0.5) + 0.01 * job.seed, f"s{job.seed}{job.overrides[0]}")

    made = report(tmp_path, run)
    assert [(c.method, c.verdict) for c in made.cells] == [
        ("local", "reproduced"), ("ensemble", "reproduced"), ("dense", "not run"),
        ("local", "reproduced"), ("ensemble", "deviates"), ("dense", "not run"),
    ]  # fmt: skip
    assert made.cells[1].values == pytest.approx((62.0, 63.0)) and made.cells[1].seeds == (0, 1)
    assert made.cells[1].runs == ("runs/ensemble/0", "runs/ensemble/1")
    assert made.cells[2].reason == "not here" and made.cells[4].reason == "-9.5 percent, and the tolerance is 5"
    assert made.warnings == ()
    assert [a.rho for a in made.agreement] == [1.0, 1.0] and made.agreement[0].methods == 2
    assert dict(made.facts)["runs"] == "8 of 8" and dict(made.facts)["computing time"] == "12 s"


def test_unequal_n_is_never_silent(tmp_path: Path) -> None:
    made = report(tmp_path, lambda job, m: None if job.seed == 1 and m == "local" else result(0.5))
    assert any("unequal numbers of runs: n is 1, 2" in w for w in made.warnings)
    assert any("local beta=1 1/2" in w for w in made.warnings)
    everywhere = report(tmp_path, lambda job, m: None if job.seed == 1 else result(0.5))
    assert not any("unequal" in w for w in everywhere.warnings)
    assert any("4 cells with runs missing" in w for w in everywhere.warnings)


def test_mixed_splits_data_rules_and_code_are_told(tmp_path: Path) -> None:
    split = report(tmp_path, lambda job, m: result(0.5, split=m if job.seed == 1 else "s"))
    (warning,) = split.warnings
    assert "different data splits: beta=1 seed=1; beta=2 seed=1" in warning
    data = report(tmp_path, lambda job, m: result(0.5, data=f"d{job.seed}"))
    assert ["Data set digits was not the same" in w for w in data.warnings] == [True]
    rules = report(tmp_path, lambda job, m: result(0.5, rule="last" if job.seed else "best_on_val", method=m))
    assert ["different headline rules: best_on_val, last" in w for w in rules.warnings] == [True]

    def other(job: Job, method: str) -> CellRun:
        config = {"dataset": DATASET, "choices": {"dataset": "digits"}}
        return CellRun(job, tmp_path / "cafe", config, result(0.5), other_code=job.seed == 1, status="done")

    code = report(tmp_path, other)
    assert ["4 runs of 8 were made by other code" in w for w in code.warnings] == [True]
    assert "made by other code" in code.cells[0].reason

    def waiting(job: Job, method: str) -> CellRun:
        return CellRun(job, tmp_path / "cafe", others=(tmp_path,))

    assert any("--any-code" in w for w in report(tmp_path, waiting).warnings)


def test_what_is_smaller_altered_or_lossy_is_never_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = report(tmp_path, smoke={"what": "tiny data"}, form="smoke")
    assert {c.verdict for c in smaller.cells if c.values} == {"not comparable"}
    assert smaller.cells[0].reduced == smaller.cells[0].reason == "tiny data"

    def altered(job: Job, method: str) -> CellRun:
        config = {"dataset": DATASET, "choices": {"dataset": "digits"}}
        return CellRun(job, tmp_path, config, result(0.5), altered=True, status="done")

    changed = report(tmp_path, altered, extra=["rounds=3"])
    assert changed.cells[0].verdict == "not comparable" and changed.cells[0].reason == "run with rounds=3"
    from fedexp.data.digits import Digits

    monkeypatch.setattr(Digits, "faithful", False, raising=False)
    lossy = report(tmp_path)
    assert (lossy.cells[0].verdict, lossy.cells[0].reason) == (
        "not comparable", "the data are not the paper's bits: digits",
    )  # fmt: skip


def test_a_run_counts_once_however_many_conditions_it_stands_for(tmp_path: Path) -> None:
    pooled = report(tmp_path, keys=[], reference=[], extra=["partition.alpha=3"])
    assert [cell.n for cell in pooled.cells] == [2, 2, 0] and not any("missing" in w for w in pooled.warnings)


def test_failures_are_told_with_their_error(tmp_path: Path) -> None:
    def failing(job: Job, method: str) -> CellRun | dict[str, Any]:
        if method == "local":
            return CellRun(job, tmp_path / "runs" / "x", status="failed", error="loss is NaN")
        return result(0.5)

    made = report(tmp_path, failing)
    assert made.cells[0].verdict == "not run" and made.cells[0].reason == "failed: loss is NaN"
    assert made.cells[0].failed == ("runs/x: loss is NaN",) * 2
    assert any(w.startswith("4 runs failed, in local beta=1, local beta=2") for w in made.warnings)


def test_numbers_are_read_by_path() -> None:
    stored = {
        "metrics": {"test/global/acc": 0.5},
        "per_client": {"test/local/acc": [0.1, 0.2]},
        "name": "x",
        "none": None,
    }
    assert read_path(stored, "metrics.test/global/acc") == 0.5
    assert read_path(stored, "per_client.test/local/acc.1") == 0.2
    for path in ("metrics.test", "per_client.test/local/acc.2", "name", "none", "metrics"):
        with pytest.raises(ConfigError):
            read_path(stored, path)


@dataclass(frozen=True)
class Torn(Drawing):
    """Cannot be drawn."""

    def draw(self, runs: Sequence[DrawnRun]) -> tuple[Picture, ...]:
        raise DataError("the paper is torn")


@dataclass(frozen=True)
class Square(Drawing):
    def draw(self, runs: Sequence[DrawnRun]) -> tuple[Picture, ...]:
        return (Picture("square", f"{len(runs)} runs", "<svg/>", b""),)


def test_a_drawing_that_cannot_be_made_is_a_warning_and_the_others_stay(tmp_path: Path) -> None:
    nodes = [{"_target_": f"{__name__}.Torn"}, {"_target_": f"{__name__}.Square"}]
    made = table(tmp_path, drawings=[*nodes, nodes[1]])
    cells = slots(made)
    found = {job.overrides: CellRun(job, tmp_path, {}, result(0.5), status="done") for s in cells for job in s.jobs}
    whole = with_pictures(report(tmp_path), made, cells, found)
    assert "Torn is not drawn: the paper is torn" in whole.warnings
    assert "Square is not drawn: another picture is called square: give it a name" in whole.warnings
    assert [picture.name for picture in whole.pictures] == ["square", "agreement", "curves"]
    alone = with_pictures(report(tmp_path, reference=[]), made, cells, found)
    assert [picture.name for picture in alone.pictures] == ["square"]
    assert (whole.pictures[0].name, whole.pictures[0].title) == ("square", f"{sum(len(s.jobs) for s in cells)} runs")
