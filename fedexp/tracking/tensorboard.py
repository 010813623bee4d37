"""Logger of TensorBoard event files (extra: ``pip install 'fedexp[tensorboard]'``)."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedexp.core.errors import ConfigError
from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.numbers import number_text
from fedexp.tracking.pictures import pictures_of


@dataclass
class TensorBoard(Logger):
    """A logger that writes ``<run folder>/tensorboard``.

    To compare runs, point ``tensorboard --logdir`` at ``outputs/runs``. Every attempt
    at a run replaces earlier event files and writes all rounds again. The files
    therefore contain each round exactly once.
    """

    _writer: Any = field(init=False, default=None, repr=False)
    _folder: Path = field(init=False, default=Path(), repr=False)

    def check(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "TensorBoard is not installed",
                where="logger",
                do="pip install 'fedexp[tensorboard]', or use logger=local",
            )

    def open(self, run: RunInfo, history: list[dict[str, Any]]) -> None:
        """Begin a new event file with the rows of earlier attempts."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder
        folder = run.folder / "tensorboard"
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        # If TensorBoard is already showing this run, it discards the rounds that it has
        # read. This is the effect of purge_step.
        self._writer = SummaryWriter(str(folder), purge_step=1 if run.resumed else None)
        self._writer.add_text(
            "config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```", 0
        )
        for row in history:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        """Write one scalar per metric and the pictures.

        Scalars and pictures are logged at ``step``, the number of finished steps.
        """
        from matplotlib.image import imread

        for name, value in row.items():
            if name not in ("round", "step") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])
        for name, path in pictures_of(self._folder, row["step"]).items():
            self._writer.add_image(f"pictures/{name}", imread(path), row["step"], dataformats="HWC")

    def close(self, status: str, result: dict[str, Any] | None) -> None:
        """Write the status and the headline as text, and close the event file."""
        if self._writer is None:
            return
        text = status
        if result is not None:
            headline = result["headline"]
            value = number_text(headline["value"])
            text = f"{status}: {headline['metric']} ({headline['rule']}) {value}"
        self._writer.add_text("result", text, 0)
        self._writer.close()
        self._writer = None
