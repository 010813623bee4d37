"""A report's files: Markdown, CSV, LaTeX and one page of HTML."""

from __future__ import annotations

from pathlib import Path

from fedexp.storage.files import write_bytes, write_text
from fedexp.tables.csv import to_csv
from fedexp.tables.latex import latex
from fedexp.tables.markdown import markdown
from fedexp.tables.page import page
from fedexp.tables.report import Form, Report


def report_folder(root: Path, name: str, form: Form) -> Path:
    """``<output root>/tables/<paper>/<table>[-<form>]``."""
    return root / "tables" / (name if form == "full" else f"{name}-{form}")


def write_report(report: Report, folder: Path) -> Path:
    """Write ``report.{md,csv,tex,html}`` and ``<picture>.{png,svg}`` into `folder`, each replaced as a whole.

    Returns:
        the page's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for ending, text in (
        ("md", markdown(report)),
        ("csv", to_csv(report)),
        ("tex", latex(report)),
        ("html", page(report)),
    ):
        write_text(folder / f"report.{ending}", text)
    for picture in report.pictures:
        write_bytes(folder / f"{picture.name}.png", picture.png)
        write_text(folder / f"{picture.name}.svg", picture.svg)
    return folder / "report.html"
