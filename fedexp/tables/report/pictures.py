"""The report's pictures: ours less the paper's cell by cell, and each method over the table's last key, or row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedexp.tables.report import canvas, curves, delta, texts
from fedexp.tables.report.report import Picture, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESERVED = ("delta", "curves", "rows")  # names of its pictures


def pictures(report: Report) -> tuple[Picture, ...]:
    """What can be drawn of a report; empty where nothing has been measured.

    `delta`: every cell that has both numbers, ours less the paper's. `curves`: over the last key where that is a number, one
    panel a block of the table; `rows` otherwise. All name the variant, the number of runs, commit and date. The same report gives
    the same bytes.
    """
    if not any(cell.mean is not None and math.isfinite(cell.mean) for cell in report.cells):
        return ()
    with canvas.use_style():
        return tuple(_all_pictures(report))


def _all_pictures(report: Report) -> Iterator[Picture]:
    source = f"{report.source}{texts.variant_suffix(report)}"
    if delta.drawable(report):
        title = f"{source}: our means less the paper's numbers; bars: {delta.BARS}; band: the tolerance of that method"
        yield _picture("delta", title, delta.difference_figure(report), report)
    theirs = "the paper hollow, " if any(cell.paper is not None for cell in report.cells) else ""
    if curves.has_axis(report):
        title = f"{source}: over {report.keys[-1]}; {theirs}our runs filled, with standard deviations over seeds"
        yield _picture("curves", title, curves.over_last_key(report), report)
    else:
        title = (
            f"{source}: row by row; {theirs}our runs filled, with standard deviations over seeds"
        )
        yield _picture("rows", title, curves.row_by_row(report), report)


def _picture(name: str, title: str, figure: Figure, report: Report) -> Picture:
    """With what must not be lost where the picture is shown without the report."""
    notes = [texts.variant_note(report), texts.stamp(report), texts.oracle_note(report)]
    if name == "delta":
        notes.insert(1, delta.note(report))
    return canvas.render_picture(name, title, figure, filter(None, notes))
