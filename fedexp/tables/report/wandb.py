"""A table's report as a W&B run, in the same W&B group as the runs of its cells.

The summary of this W&B run has counts of claims and verdicts. Its history has the
comparison and the claims as W&B Tables, and the pictures. Its artifact has the report's
files.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedexp.core.build import build
from fedexp.tables.report import csv, layout, texts
from fedexp.tables.report.report import Report
from fedexp.tracking.logger import Logger, RunInfo
from fedexp.tracking.wandb import Wandb

_CLAIM = (
    "id",
    "where",
    "says",
    "state",
    "scope",
    "reason",
    "needed",
    "printed",
    "contradicted_in_print",
)


def send_summary(report: Report, logger: Mapping[str, Any], group: str, folder: Path) -> bool:
    """Write the report as a W&B run into ``<folder>/wandb``.

    The run is offline unless the mode of the logger is ``online``.

    Args:
        report: The report.
        logger: The node ``logger`` of the config.
        group: W&B group of the cells' runs.
        folder: Folder of the report, whose files are the artifact.

    Returns:
        False if the logger is not W&B. Then nothing was sent.
    """
    tracker = build(Logger, logger, "logger")  # type: ignore[type-abstract]
    if not isinstance(tracker, Wandb):
        return False
    import wandb
    from PIL import Image

    id = hashlib.blake2b(f"{group} {folder}".encode(), digest_size=8).hexdigest()
    config = {
        "method": "summary",
        "table": report.name,
        "form": report.variant,
        "command": report.command,
        "headline": dict(texts.headline(report)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tracker.open(
        RunInfo(
            id,
            f"{report.name} {report.variant}",
            group,
            config,
            folder,
            ("table", report.variant),
            False,
        ),
        [],
    )
    status = "failed"
    try:
        # A column of a W&B Table has only one type, so conditions are written as text.
        keys = 1 + len(report.keys)
        cells = [[*map(str, line[:keys]), *line[keys:]] for line in csv.lines(report)]
        values: dict[str, Any] = {
            "round": 1,
            "step": 1,
            "comparison": wandb.Table(columns=list(csv.columns(report)), data=cells),
        }
        if report.claims:
            values["claims"] = wandb.Table(columns=[*_CLAIM, "rows"], data=_claim_rows(report))
        for picture in report.pictures:
            values[f"pictures/{picture.name}"] = wandb.Image(
                Image.open(io.BytesIO(picture.png)), caption=picture.title
            )
        tracker.log(values)
        tracker.summarize(counts(report))
        name = re.sub(r"[^\w.-]+", "-", f"{report.name}-{report.variant}")
        tracker.log_artifact(
            name, "report", sorted(path for path in folder.iterdir() if path.is_file())
        )
        status = "done"
    finally:
        tracker.close(status, None)
    return True


def counts(report: Report) -> dict[str, int]:
    """Return `texts.headline` as numbers, such as ``claims/supported``.

    Claims of our own are counted under ``ours/`` instead of ``claims/``.
    """
    found = Counter(
        f"{'ours' if claim.is_ours else 'claims'}/{claim.state}" for claim in report.claims
    )
    for role, cells in layout.counted_cells(report).items():
        found.update(f"{role}/{cell.verdict}" for cell in cells)
    return dict(found)


def _claim_rows(report: Report) -> list[list[Any]]:
    return [
        [*(getattr(claim, name) for name in _CLAIM), "; ".join(map(texts.claim_row, claim.rows))]
        for claim in report.claims
    ]
