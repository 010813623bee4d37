"""A spreadsheet of a run's rounds."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedexp.storage.files import write_text
from fedexp.tracking.logger import Logger, RunInfo


@dataclass
class Csv(Logger):
    """Writes ``metrics.csv`` next to metrics.jsonl: one row a round, the union of all metrics as columns.

    Rounds that were not evaluated leave cells empty. The file is written whole, atomically, when a run opens and ends.
    """

    _path: Path | None = field(init=False, default=None, repr=False)
    _rows: list[dict[str, Any]] = field(init=False, default_factory=list, repr=False)

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin with the rows of earlier attempts."""
        self._path, self._rows = run.folder / "metrics.csv", list(history)
        self._write()

    def log(self, row: dict[str, Any]) -> None:
        """Keep the row until the end: a new metric may still add a column."""
        self._rows.append(row)

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """Write all rows."""
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        columns = ["round", *(name for name in dict.fromkeys(k for row in self._rows for k in row) if name != "round")]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self._path, text.getvalue())
