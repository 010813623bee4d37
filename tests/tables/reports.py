"""Reports to show: one with everything in it that a page has to cope with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fedexp.tables.report.report import Agreement, Cell, Method, Report, Value, Verdict

HOSTILE = "<script>document.title='taken'</script>\"'&"


def cell(conditions: dict[str, Value], method: str, paper: float | None, *values: float, **more: Any) -> Cell:
    """A cell with seeds 0, 1, ... and the verdict that a tolerance of 5 gives."""
    verdict: Verdict = "not run"
    if values:
        verdict = "no reference" if paper is None else "reproduced"
        if paper is not None and not abs(sum(values) / len(values) - paper) <= 5:
            verdict = "deviates"
    return Cell(
        **{
            "conditions": conditions,
            "method": method,
            "paper": paper,
            "paper_sd": None,
            "values": values,
            "seeds": tuple(range(len(values))),
            "verdict": verdict,
            **more,
        }
    )


def report(**changes: Any) -> Report:
    """Two blocks of two rows, three methods: a hole, a failure, a divergence, a tie, a cell without reference."""
    rows: list[dict[str, Value]] = [{"clients": c, "beta": b} for c in (5, 10) for b in (0.01, 0.5)]
    cells = (
        cell(rows[0], "fedavg", 20.97, 22.5, 21.25, 20.5, runs=("runs/fedavg-mnist-0a/1b",)),
        cell(rows[0], "ot", 28.835, 36.112, 38.77, reason="Outside of the tolerance.", failed=("OSError: disk full",)),
        cell(rows[0], "ma_echo", 80.31, 79.0, 81.0),
        cell(rows[1], "fedavg", 64.94, 66.125, paper_sd=1.5),
        cell(rows[1], "ot", 64.94, math.nan, 60.0, verdict="deviates", reason="A run diverged."),
        cell(rows[1], "ma_echo", 78.34, 66.13, verdict="deviates"),
        cell(rows[2], "fedavg", 17.61, math.inf, verdict="deviates"),
        cell(rows[2], "ot", None, 19.5),
        cell(rows[3], "fedavg", 59.75),
        cell(rows[3], "ot", 59.75, 58.0, 61.5, reduced="2 of 10 epochs", verdict="not comparable"),
        cell(rows[3], "ma_echo", 81.8, 80.25, 82.5, 83.0),
    )
    whole = Report(
        name="ma_echo/table1",
        paper="A paper, 2023",
        source="Table 1",
        title="One-shot aggregation of MLPs",
        metric="test_accuracy",
        unit="percent",
        higher_is_better=True,
        form="full",
        keys=("clients", "beta"),
        methods=(Method("fedavg", "Average"), Method("ot", "OT"), Method("ma_echo", "Ours")),
        cells=cells,
        agreement=(Agreement(rows[0], 1.0, 3), Agreement(rows[1], 0.5, 3), Agreement(rows[2], None, 1)),
        tolerance=5.0,
        assumptions=(("batch size 64", "The paper is silent."),),
        warnings=("One cell has two seeds where others have three.",),
        facts=(("commit", "4f4ac65"), ("hardware", "two cores")),
        command="fedexp-table run ma_echo/table1",
    )
    return replace(whole, **changes)
