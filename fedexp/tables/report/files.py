"""The files of a report: Markdown, CSV, LaTeX, one page of HTML, and its pictures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from fedexp.storage.files import write_bytes, write_text
from fedexp.tables.report.csv import to_csv
from fedexp.tables.report.latex import latex
from fedexp.tables.report.markdown import markdown
from fedexp.tables.report.page import Links, page
from fedexp.tables.report.report import Report, Variant

# Files that a run's folder may contain, by the names of their links on the page.
_OF_A_RUN = {
    "config": "config.yaml",
    "result": "result.json",
    "curve": "metrics.jsonl",
    "split": "partition.safetensors",
    "environment": "environment.json",
}
_BESIDE = ("report.csv", "runs.csv", "curves.csv", "configs.json")


def report_folder(root: Path, name: str, variant: Variant, part: bool) -> Path:
    """Return the folder of a report.

    It is ``<output root>/tables/<paper>/<table>[-reduced|-smoke][-partial]``, so a
    smaller variant never overwrites a larger one.

    Args:
        root: Output root.
        name: Name of the table.
        variant: Variant of the table.
        part: Whether the report lacks runs of the variant, or contains other runs.
    """
    return (
        root
        / "tables"
        / (
            name
            + (f"-{variant}" if variant in ("reduced", "smoke") else "")
            + ("-partial" if part else "")
        )
    )


def write_report(
    report: Report,
    folder: Path,
    root: Path | None = None,
    configs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Path:
    """Write ``report.{md,csv,tex,html}`` and ``report-<picture>.{png,svg}``.

    Each file is replaced as a whole. Pictures of an earlier report are removed if this
    report does not have them.

    Args:
        report: The report.
        folder: Folder of the files.
        root: Output root with the runs that the page links to. None: the page links to
            no runs.
        configs: Configs of the runs by their hashes. The page shows them.

    Returns:
        Path of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in (("md", markdown(report)), ("csv", to_csv(report)), ("tex", latex(report))):
        write_text(folder / f"report.{ending}", text)
    names = {f"report-{picture.name}" for picture in report.pictures}
    for path in [*folder.glob("report-*.png"), *folder.glob("report-*.svg")]:
        if path.stem not in names:
            path.unlink()
    for picture in report.pictures:
        write_bytes(folder / f"report-{picture.name}.png", picture.png)
        write_text(folder / f"report-{picture.name}.svg", picture.svg)
    write_text(folder / "report.html", page(report, links(report, folder, root, configs)))
    return folder / "report.html"


def links(
    report: Report, folder: Path, root: Path | None, configs: Mapping[str, Mapping[str, Any]]
) -> Links:
    """Return relative links from the page of a report to files that exist.

    The files are beside the page in `folder`, or belong to the runs in `root`.
    """
    runs: dict[str, dict[str, str]] = {}
    names = dict.fromkeys(run for cell in report.cells for run in cell.runs)
    for run in names if root is not None else ():
        assert root is not None
        files = {name: root / run / file for name, file in _OF_A_RUN.items()}
        found = {name: _relative(path, folder) for name, path in files.items() if path.is_file()}
        if found:
            runs[run] = {"folder": _relative(root / run, folder), **found}
    return Links(runs, tuple(name for name in _BESIDE if (folder / name).is_file()), configs)


def _relative(path: Path, folder: Path) -> str:
    return quote(Path(os.path.relpath(path, folder.resolve())).as_posix())
