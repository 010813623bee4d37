"""Logger for runs without a tracker. Local files are always written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedexp.tracking.logger import Logger, RunInfo


@dataclass
class LocalLogger(Logger):
    """A logger that writes nothing besides the run's local files.

    These are metrics.jsonl, result.json and the files next to them.
    """

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Do nothing."""

    def log(self, row: dict[str, Any]) -> None:
        """Do nothing, because the row is in metrics.jsonl already."""

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """Do nothing."""
