"""The summary of a study: its trials, the best point and the test runs."""

from __future__ import annotations

import csv
import io
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedexp.core.errors import FedexpError
from fedexp.core.metrics import deviation
from fedexp.tuning.objective import Objective
from fedexp.tuning.space import Range
from fedexp.tuning.study import TrialRow


@dataclass(frozen=True)
class TestRun:
    """A run of the best point with a seed that was not used for tuning.

    Args:
        seed: The seed.
        value: Headline of the run, or None if the run failed.
    """

    __test__ = False  # pytest would take the class for a test

    seed: int
    value: float | None


@dataclass(frozen=True)
class Summary:
    """The outcome of a study.

    Args:
        command: Command that made it.
        objective: Number by which points were compared.
        held_out: Description of the held-out data.
        seeds: Seeds of the tuning runs.
        rows: All trials.
        best: Best trial.
        space: Ranges.
        headline: Metric of the test runs.
        tests: Test runs.
        fixed: Overrides of the test runs, without the point, and the search path.
    """

    command: str
    objective: Objective
    held_out: str
    seeds: tuple[int, ...]
    rows: tuple[TrialRow, ...]
    best: TrialRow
    space: tuple[Range, ...]
    headline: str
    tests: tuple[TestRun, ...]
    fixed: tuple[str, ...]

    @property
    def point(self) -> list[str]:
        """Overrides of the best point."""
        return [f"{key}={value}" for key, value in self.best.point.items()]

    @property
    def best_command(self) -> str:
        """The command that runs the best point with all test seeds."""
        seeds = ",".join(str(test.seed) for test in self.tests)
        several = ["-m"] if len(self.tests) > 1 else []
        return shlex.join(["fedexp", *several, *self.fixed, *self.point, f"seed={seeds}"])

    @property
    def edges(self) -> list[str]:
        """Warnings about values at the edge of their range."""
        return edge_warnings(self.space, self.best.point)

    @property
    def ties(self) -> list[str]:
        """Warnings about other points whose value equals that of the best trial."""
        equal: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            is_other = row.state == "done" and row.point != self.best.point
            if is_other and row.value == self.best.value:
                equal.setdefault((*row.point.values(),), row.number)
        return [
            f"trial {number} has the same value as trial {self.best.number}, which came first"
            for number in equal.values()
        ]

    @property
    def test_text(self) -> str:
        """Mean and sample standard deviation of the test runs."""
        values = [test.value for test in self.tests if test.value is not None]
        missing = len(self.tests) - len(values)
        text = f"{self.headline} " + (f"{statistics.fmean(values):.4f}" if values else "-")
        if len(values) > 1:
            text += f" ± {deviation(values, is_sample=True):.4f}"
        seeds = ", ".join(str(test.seed) for test in self.tests)
        return f"{text} (seeds {seeds})" + (f", {missing} failed" if missing else "")

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain values for ``result.json``."""
        return {
            "command": self.command,
            "objective": self.objective.path,
            "held_out": self.held_out,
            "tuning_seeds": list(self.seeds),
            "ranges": {one.key: one.text.partition("=")[2] for one in self.space},
            "trials": [asdict(row) for row in self.rows],
            "best": asdict(self.best),
            "at_edge": self.edges,
            "ties": self.ties,
            "test": {
                "metric": self.headline,
                "runs": [asdict(test) for test in self.tests],
            },
            "best_command": self.best_command,
        }


def edge_warnings(space: Sequence[Range], point: Mapping[str, str]) -> list[str]:
    """Return one warning for each value of a point at the edge of its range."""
    return [
        f"{one.key}={point[one.key]} is at the {edge} edge of {one.text}: "
        "a wider range may contain a better value"
        for one in space
        if (edge := one.edge(point[one.key])) is not None
    ]


def require_best(best: TrialRow | None, rows: Sequence[TrialRow]) -> TrialRow:
    """Return the best trial.

    Raises:
        FedexpError: No trial is done.
    """
    if best is None:
        errors = dict.fromkeys(row.error for row in rows if row.error)
        counts = Counter(row.state for row in rows)
        raise FedexpError(
            "no trial was finished: "
            + ", ".join(f"{number} {state}" for state, number in sorted(counts.items())),
            got="; ".join(map(str, errors)) or None,
            do=f"correct the ranges{' or leave out halving' if counts['stopped'] else ''}, "
            "then enter the command again",
        )
    return best


def trials_csv(rows: Sequence[TrialRow]) -> str:
    """Return the trials as CSV, one row per trial."""
    keys = list(rows[0].point) if rows else []
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    # A search over the rounds already has this column
    rounds = [] if "rounds" in keys else ["rounds"]
    writer.writerow(["trial", *keys, "state", "value", *rounds, "error"])
    for row in rows:
        own = [row.rounds] if rounds else []
        cells = [row.number, *row.point.values(), row.state, row.value, *own, row.error]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return file.getvalue()
