"""What the pictures hold: which are drawn, every number in its place, nothing from outside."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from fedexp.tables.report.pictures import pictures
from fedexp.tables.report.report import Method, Report
from tests.tables.reports import cell, report


def names(of: Report) -> list[str]:
    return [picture.name for picture in pictures(of)]


def test_a_numeric_last_key_is_an_axis_another_one_is_not() -> None:
    assert names(report()) == ["agreement", "curves"]
    words = tuple(
        replace(c, conditions={"clients": c.conditions["clients"], "beta": f"b{c.conditions['beta']}"})
        for c in report().cells
    )
    assert names(report(cells=words)) == ["agreement", "rows"]
    flags = tuple(replace(c, conditions={**c.conditions, "beta": c.conditions["beta"] == 0.5}) for c in report().cells)
    assert names(report(cells=flags)) == ["agreement", "rows"]


def test_without_references_nothing_is_compared_and_without_runs_nothing_is_drawn() -> None:
    assert names(report(cells=tuple(replace(c, paper=None) for c in report().cells))) == ["curves"]
    assert names(report(cells=tuple(replace(c, values=(), seeds=()) for c in report().cells))) == []
    diverged = tuple(replace(c, values=(math.nan,), seeds=(0,)) for c in report().cells)
    assert names(report(cells=diverged)) == []


@pytest.mark.parametrize("many", [1, 12])
def test_pictures_are_svg_and_png_without_anything_from_outside(many: int) -> None:
    methods = tuple(Method(f"m{i}", f"$_{i}^") for i in range(many))  # neither mathematics nor hidden
    cells = tuple(cell({"rank": r}, m.key, 1.0, r / 10, r / 9) for m in methods for r in (1, 10, 100))
    drawn = pictures(report(keys=("rank",), methods=methods, cells=cells))
    assert len(drawn) == 2
    for picture in drawn:
        assert ET.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "currentColor" in picture.svg
        assert "<dc:date>" not in picture.svg
        assert not re.search(r'href="(?!#)|#1b1f26|#c4c9d1', picture.svg)
        image = imread(io.BytesIO(picture.png))
        assert np.allclose(image[0, 0, :3], 1.0)  # white ground
        assert image.std() > 0.01


def test_the_users_own_style_changes_nothing() -> None:
    plain = pictures(report())
    with mpl.rc_context({"font.size": 20.0, "axes.facecolor": "red", "text.usetex": False, "lines.linewidth": 9.0}):
        assert pictures(report()) == plain


def test_every_point_stands_where_both_numbers_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[list[float], list[float], list[float]]] = []
    original = Axes.errorbar

    def spy(self, x, y, yerr=None, **look):
        drawn.append((list(x), list(y), list(yerr)))
        return original(self, x, y, yerr=yerr, **look)

    monkeypatch.setattr(Axes, "errorbar", spy)
    cells = report().cells
    pictures(report())
    assert drawn[0][:2] == ([20.97, 64.94], [64.25 / 3, 66.125])  # Average: one diverged, one not run
    assert drawn[0][2] == [cells[0].sd, 0.0]
    curves = drawn[3:]
    assert [len(x) for x, _, _ in curves] == [2, 1, 2, 2, 1]  # no line crosses a hole
    assert [y for _, y, _ in curves][2] == [80.0, 66.13]
