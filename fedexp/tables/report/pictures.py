"""The pictures of a report's numbers.

One picture shows our numbers minus the paper's. Another one shows the numbers of each
method. Its horizontal axis is the last key, which is the last of the conditions that
identify a row. If the values of the last key are not numbers, the rows are drawn below
each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from fedexp.tables.report import canvas, curves, delta, texts
from fedexp.tables.report.report import Picture, Report

# Names of the report's own pictures.
RESERVED = ("delta", "curves", "rows")


def pictures(report: Report) -> tuple[Picture, ...]:
    """Draw the numbers of a report. There are no pictures if nothing has been measured.

    - `delta` shows our number minus the paper's, for every cell that has both.
    - `curves` shows the numbers over the last key if its values are numbers. It has one
      panel per block of rows that differ only in this key.
    - `rows` replaces `curves` for other keys. It shows the numbers row by row.

    All pictures name the variant, the number of runs, the commit and the date. The same
    report gives the same bytes.
    """
    if not any(cell.mean is not None and math.isfinite(cell.mean) for cell in report.cells):
        return ()
    with canvas.use_style():
        return tuple(_all_pictures(report))


def _all_pictures(report: Report) -> Iterator[Picture]:
    source = f"{report.source}{texts.variant_suffix(report)}"

    if delta.drawable(report):
        title = (
            f"{source}: our means minus the paper's numbers; bars: {delta.BARS}; band: "
            f"the tolerance of that method"
        )
        yield _picture("delta", title, delta.difference_figure(report), report)

    theirs = "the paper hollow, " if any(cell.paper is not None for cell in report.cells) else ""

    meaning = f"{theirs}our runs filled, with standard deviations over seeds"
    if curves.has_axis(report):
        title = f"{source}: over {report.keys[-1]}; {meaning}"
        yield _picture("curves", title, curves.over_last_key(report), report)
    else:
        title = f"{source}: row by row; {meaning}"
        yield _picture("rows", title, curves.row_by_row(report), report)


def _picture(name: str, title: str, figure: Figure, report: Report) -> Picture:
    """Render a picture with the notes that it needs when shown outside the report."""
    notes = [
        texts.variant_note(report),
        delta.note(report) if name == "delta" else "",
        texts.stamp(report),
        texts.oracle_note(report),
    ]
    return canvas.render_picture(name, title, figure, filter(None, notes))
