"""A report's files: Markdown, CSV, LaTeX, one page of HTML, and its pictures."""

from __future__ import annotations

from pathlib import Path

from fedexp.storage.files import write_bytes, write_text
from fedexp.tables.report.csv import to_csv
from fedexp.tables.report.latex import latex
from fedexp.tables.report.markdown import markdown
from fedexp.tables.report.page import page
from fedexp.tables.report.report import Form, Report


def report_folder(root: Path, name: str, form: Form, part: bool) -> Path:
    """``<output root>/tables/<paper>/<table>[-reduced|-smoke][-partial]``: a smaller form never overwrites a larger one.

    Args:
        part: it does not have all runs of its form.
    """
    return (
        root / "tables" / (name + (f"-{form}" if form in ("reduced", "smoke") else "") + ("-partial" if part else ""))
    )


def write_report(report: Report, folder: Path) -> Path:
    """Write ``report.{md,csv,tex,html}`` and ``report-<picture>.{png,svg}`` into `folder`, each replaced as a whole.

    Pictures of an earlier report that this one does not have are removed.

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
    names = {f"report-{picture.name}" for picture in report.pictures}
    for path in [*folder.glob("report-*.png"), *folder.glob("report-*.svg")]:
        if path.stem not in names:
            path.unlink()
    for picture in report.pictures:
        write_bytes(folder / f"report-{picture.name}.png", picture.png)
        write_text(folder / f"report-{picture.name}.svg", picture.svg)
    return folder / "report.html"
