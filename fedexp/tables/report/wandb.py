"""A table's summary as a run of W&B: the comparison as a W&B Table, the pictures, beside the runs of its cells."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedexp.core.build import build
from fedexp.tables.report.report import Report
from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.wandb import Wandb

_COLUMNS = ("method", "label", "paper", "paper_sd", "mean", "sd", "n", "delta", "verdict", "reason", "runs")


def send_summary(report: Report, logger: Mapping[str, Any], group: str, folder: Path) -> bool:
    """Write the summary run into ``<folder>/wandb`` (offline unless the logger's mode says online).

    Args:
        logger: the node of the config; group: that of the cells' runs.

    Returns:
        False where the logger is not W&B, and nothing was sent.
    """
    tracker = build(Logger, logger, "logger")  # type: ignore[type-abstract]
    if not isinstance(tracker, Wandb):
        return False
    import wandb
    from PIL import Image

    id = hashlib.blake2b(f"{group} {folder}".encode(), digest_size=8).hexdigest()
    config = {"method": "summary", "table": report.name, "form": report.form, "command": report.command}
    folder.mkdir(parents=True, exist_ok=True)
    tracker.open(RunInfo(id, f"{report.name} {report.form}", group, config, folder, ("table", report.form), False), [])
    status = "failed"
    try:
        values: dict[str, Any] = {
            "round": 1,
            "step": 1,
            "comparison": wandb.Table(columns=_columns(report), data=_rows(report)),
        }
        for picture in report.pictures:
            image = Image.open(io.BytesIO(picture.png))
            values[f"pictures/{picture.name}"] = wandb.Image(image, caption=picture.title)
        tracker.log(values)
        status = "done"
    finally:
        tracker.close(status, None)
    return True


def _columns(report: Report) -> list[str | int]:
    return [*report.keys, *_COLUMNS]


def _rows(report: Report) -> list[list[Any]]:
    """One row a cell. Conditions as text: a W&B column has one type."""
    labels = {method.key: method.label for method in report.methods}
    return [
        [
            *(str(cell.conditions[key]) for key in report.keys),
            *(labels[cell.method] if name == "label" else getattr(cell, name) for name in _COLUMNS[:-1]),
            " ".join(cell.runs),
        ]
        for cell in report.cells
    ]
