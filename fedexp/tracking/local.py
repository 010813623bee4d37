"""Local files only: they are written in any case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedexp.tracking.logger import Logger, RunInfo


@dataclass
class LocalLogger(Logger):
    """Adds nothing to metrics.jsonl, result.json and their neighbours."""

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Nothing to begin."""

    def log(self, row: dict[str, Any]) -> None:
        """The row is in metrics.jsonl already."""

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """Nothing to end."""
