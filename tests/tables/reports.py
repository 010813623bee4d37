"""Example reports, with one that contains everything that a page must handle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fedexp.tables.report.report import (
    Agreement,
    Cell,
    ClaimResult,
    ClaimRow,
    Method,
    Report,
    Summary,
    Value,
)
from fedexp.tables.verdicts import judge

HOSTILE = "<script>document.title='taken'</script>\"'&"

CLAIMS = (
    ClaimResult(
        id="beats_ot",
        where="text",
        says="is better than OT",
        state="supported",
        scope="full form",
        reason="2 of 2 rows yes, 0 no, 0 undecided",
        needed="all",
        rows=(
            ClaimRow({"clients": 5}, "yes", 41.25, 3, 3, printed=True),
            ClaimRow({"clients": 10}, "yes", 20.5, 3, 3, printed=True),
        ),
        printed="2 of 2 rows",
    ),
    ClaimResult(
        id="more_clients",
        where="caption",
        says="gains with clients",
        state="contradicted",
        scope="full form",
        reason="0 of 1 rows yes, 1 no, 0 undecided",
        needed="most",
        rows=(ClaimRow({}, "no", -14.6, 3, 0, printed=False),),
        printed="0 of 1 rows",
        contradicted_in_print=True,
    ),
    ClaimResult(
        "unseen",
        "text",
        "holds on CNNs",
        "undecided",
        "full form",
        "no row has all of its columns",
        "2",
        (),
    ),
    ClaimResult(
        "seeds",
        "ours",
        "varies little",
        "supported",
        "full form",
        "1 of 1 rows yes",
        "all",
        (ClaimRow({}, "yes", 1.0, 2, 2),),
    ),
)


def cell(
    conditions: dict[str, Value], method: str, paper: float | None, *values: float, **more: Any
) -> Cell:
    """Return a cell with seeds 0, 1, ... and the verdict of a tolerance of 5."""
    found: dict[str, Any] = {"verdict": "not run"}
    if values:
        found = {"verdict": "no reference"}
        if paper is not None:
            found = vars(judge(values, paper, more.get("paper_sd"), 5.0, 3))
    return Cell(
        **{
            "conditions": conditions,
            "method": method,
            "paper": paper,
            "paper_sd": None,
            "values": values,
            "seeds": tuple(range(len(values))),
            **found,
            **more,
        }
    )


def report(**changes: Any) -> Report:
    """Return a report of two blocks of two rows and three methods.

    It contains a missing cell, a failed run, a diverged run, a tie and a cell without a
    reference.
    """
    rows: list[dict[str, Value]] = [{"clients": c, "beta": b} for c in (5, 10) for b in (0.01, 0.5)]
    cells = (
        cell(rows[0], "fedavg", 20.97, 22.5, 21.25, 20.5, runs=("runs/fedavg-mnist-0a/1b",)),
        cell(rows[0], "ot", 28.835, 36.112, 38.77, failed=("OSError: disk full",)),
        cell(rows[0], "ma_echo", 80.31, 79.0, 81.0),
        cell(rows[1], "fedavg", 64.94, 66.125, paper_sd=1.5),
        cell(rows[1], "ot", 64.94, math.nan, 60.0, same_as="fedavg"),
        cell(rows[1], "ma_echo", 78.34, 66.13, 66.13),
        cell(rows[2], "fedavg", 17.61, math.inf),
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
        variant="full",
        keys=("clients", "beta"),
        methods=(
            Method("fedavg", "Average"),
            Method("ot", "OT", oracle="best of a grid"),
            Method("ma_echo", "Ours", role="proposed"),
        ),
        cells=cells,
        agreement=(
            Agreement(rows[0], 1.0, 3),
            Agreement(rows[1], 0.5, 3),
            Agreement(rows[2], None, 1),
        ),
        tolerance=5.0,
        assumptions=(("batch size 64", "The paper is silent."),),
        warnings=("One cell has two seeds where others have three.",),
        facts=(("commit", "4f4ac65"), ("date", "2026-11-02"), ("hardware", "two cores")),
        command="fedexp-table run ma_echo/table1",
        claims=CLAIMS,
        summaries=(
            Summary("fedavg", 3, 2, -1.204, (-3.0, 0.5)),
            Summary("ma_echo", 2, 1, -6.5, None),
        ),
        left_out=("method=pooled (4 cells)", "panel b"),
    )
    return replace(whole, **changes)
