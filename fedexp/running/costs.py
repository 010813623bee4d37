"""Costs of a run: executed local steps, seconds by phase, and peak memory.

They cover all attempts of the run. An attempt is one launch: the first or a resume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedexp.core.engine import Engine
from fedexp.running.peak_memory import Peak, largest


class Meter:
    """A counter of the local steps that an engine executes.

    The counter is read once per step of the run. A local step is not counted if its
    result was read from the client cache (config key ``memo``).

    Args:
        engine: Engine that runs the jobs. If the client cache is enabled, this is the
            `ClientCache` that wraps the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = self._totals()

    def step(self, steps: int) -> dict[str, int]:
        """Count the local steps of one step of the run.

        Args:
            steps: Number of local steps that the clients report for this step of the
                run.

        Returns:
            The number of local steps executed since the last call (``executed``), and
            how many of them were computed together with steps of other clients in one
            stack (``stacked``).
        """
        cached, stacked = self._totals()
        before, self._seen = self._seen, (cached, stacked)
        return {"executed": steps - (cached - before[0]), "stacked": stacked - before[1]}

    def _totals(self) -> tuple[int, int]:
        return self._engine.cached_steps, self._engine.stacked_steps


def read_timing(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read ``timing.jsonl`` and skip damaged lines.

    A damaged line raises no error. A run should not be refused only because its costs
    cannot be read.

    Args:
        path: The file, which may be absent.

    Returns:
        The rows, and the number of damaged lines. An incomplete last line, which a
        crash may leave, is not counted.
    """
    rows, damaged = [], 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if _is_timing(row):
            rows.append(row)
        else:
            damaged += 1
    return rows, damaged


def _is_timing(row: Any) -> bool:
    """Return whether `row` contains the values that `costs` reads."""
    if not isinstance(row, dict) or not all(
        isinstance(row.get(name), int) for name in ("step", "executed", "stacked")
    ):
        return False
    seconds, peak = row.get("seconds"), row.get("peak_memory", {})
    return (
        isinstance(seconds, dict)
        and "train" in seconds
        and isinstance(peak, dict)
        and peak.keys() <= {"ram", "gpu"}
        and all(isinstance(value, int | float) for value in seconds.values())
        and all(isinstance(value, int) for value in peak.values())
    )


def costs(timing: Sequence[dict[str, Any]], others: dict[str, float], peak: Peak) -> dict[str, Any]:
    """Compute the costs in ``result.json``.

    ``steps_per_second`` is the number of executed local steps divided by training
    seconds. Training seconds are counted only for steps of the run in which a local
    step was executed. ``steps_per_second`` is None if no local step was executed.

    ``stacked_share`` is the share of the executed local steps that were computed
    together with local steps of other clients in one stack. It is 0 if no local step
    was executed. A step that a client of a stack takes on its own, for example because
    no other client has a batch of the same length, does not count as stacked.

    Args:
        timing: Rows of ``timing.jsonl``. If a step was computed again after a crash,
            only the seconds and steps in its last row count.
        others: Seconds that were spent outside of steps, by phase.
        peak: Peak memory of this attempt. The peaks of earlier attempts are in
            `timing`.
    """
    seconds = dict(others)
    executed = stacked = 0
    training = 0.0
    for row in timing:
        peak = largest(peak, row.get("peak_memory", {}))

    for row in {row["step"]: row for row in timing}.values():
        for phase, value in row["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + value
        if row["executed"]:
            executed += row["executed"]
            stacked += row["stacked"]
            training += row["seconds"]["train"]

    return {
        "seconds": {
            **{k: round(v, 3) for k, v in seconds.items()},
            "total": round(sum(seconds.values()), 3),
        },
        "steps_per_second": round(executed / training, 3) if training else None,
        "stacked_share": round(stacked / executed, 4) if executed else 0.0,
        "peak_memory": peak,
    }
