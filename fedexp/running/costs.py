"""What a run cost: steps that were executed, seconds by phase, memory; over all attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedexp.core.engine import Engine
from fedexp.running.peak_memory import Peak, largest


class Meter:
    """Counts the local steps that an engine executes, a step of the run at a time; work that the memo recalls is none.

    Args:
        engine: what runs the jobs, a `ClientCache` around it included.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = self._totals()

    def step(self, steps: int) -> dict[str, int]:
        """Of a step with `steps` local steps in its results: how many were executed since the last call, how many stacked."""
        cached, stacked = self._totals()
        before, self._seen = self._seen, (cached, stacked)
        return {"executed": steps - (cached - before[0]), "stacked": stacked - before[1]}

    def _totals(self) -> tuple[int, int]:
        return self._engine.cached_steps, self._engine.stacked_steps


def costs(timing: Sequence[dict[str, Any]], others: dict[str, float], peak: Peak) -> dict[str, Any]:
    """The costs in ``result.json``.

    Args:
        timing: rows of ``timing.jsonl``; of a step that was computed again, the last counts.
        others: seconds outside steps, by phase.
        peak: memory of this attempt; earlier ones' are in `timing`.

    ``steps_per_second`` are executed steps over the training seconds of steps of the run that executed some, None without any;
    ``stacked_share`` is the share of executed steps that ran stacked with other clients'.
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
