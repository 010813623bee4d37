"""What the pictures hold: which are drawn, every number in its place, nothing from outside."""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from fedexp.tables.report import canvas
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


@contextmanager
def watched(method: str) -> Iterator[list[Any]]:
    """First arguments of a method of matplotlib's figures, call by call."""
    from matplotlib.figure import Figure

    seen: list[Any] = []
    original = getattr(Figure, method)

    def spy(self, *args, **look):
        seen.append(args[0] if args else look["handles"])
        return original(self, *args, **look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, method, spy)
        yield seen


@pytest.mark.parametrize(
    ("form", "said", "words"),
    [
        ("full", "Full: all of the table's cells and runs.", False),
        ("partial", "Partial: a part of the full form's cells or runs.", False),
        ("reduced", "Reduced: these runs are smaller than the paper's, so no cell counts as reproduced.", True),
        ("smoke", "Smoke test: the runs show that the pipeline works;", False),
    ],
)
def test_every_picture_names_its_form_inside(form: Any, said: str, words: bool) -> None:
    cells = tuple(replace(c, conditions={"clients": str(c.conditions)}) for c in report().cells)
    of = report(cells=cells, keys=("clients",), agreement=()) if words else report()
    with watched("supxlabel") as notes:
        made = pictures(replace(of, form=form))
    assert [" ".join(note.split("\n")).startswith(said) for note in notes] == [True, True]
    assert ["† has seen test data" in note for note in notes] == [True, True]
    assert all(f"({form})" in picture.title for picture in made)
    with watched("supxlabel") as notes:
        pictures(replace(of, methods=tuple(replace(m, oracle="") for m in of.methods), form=form))
    assert ["†" in note for note in notes] == [False, False]


def test_what_was_chosen_on_test_data_is_marked_even_where_its_label_is_cut() -> None:
    methods = (Method("m", "a label of very, very many letters", oracle="best round"),)
    with watched("legend") as legends:
        pictures(report(keys=(), methods=methods, cells=(cell({}, "m", 1.0, 2.0),), agreement=()))
    for handles in legends:
        assert handles[0].get_label() == "a label of very, very many lett… †"


def test_long_legends_and_notes_leave_room_for_the_panel() -> None:
    """Matplotlib warns where they do not."""
    methods = tuple(Method(f"m{i}", f"a label of {i} and many letters", oracle="best of a grid") for i in range(12))
    cells = tuple(cell({"kind": "one"}, m.key, 1.0, 2.0) for m in methods)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures(report(keys=("kind",), methods=methods, cells=cells, agreement=()))


def many(count: int) -> Report:
    methods = tuple(Method(f"m{i}", f"M{i}") for i in range(count))
    cells = tuple(cell({"rank": r}, m.key, None, 10.0 * i + r) for i, m in enumerate(methods) for r in range(3))
    return report(keys=("rank",), methods=methods, cells=cells, agreement=())


def test_no_two_of_24_series_look_alike() -> None:
    with watched("legend") as legends:
        pictures(many(24))
    (handles,) = legends
    looks = [(h.get_color(), h.get_marker(), str(h._unscaled_dash_pattern)) for h in handles]
    assert len({(colour, marker) for colour, marker, _ in looks}) == 24  # where there is no line
    assert len({(colour, line) for colour, _, line in looks}) == 24  # where there is no marker


def test_lines_are_drawn_as_the_legend_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[Any, ...]] = []
    original = Axes.errorbar

    def spy(self, x, y, **look):
        drawn.append((look["color"], look["marker"], look["linestyle"]))
        return original(self, x, y, **look)

    monkeypatch.setattr(Axes, "errorbar", spy)
    pictures(many(14))
    assert drawn == [(*canvas.look(i).values(), canvas.dashes(i)) for i in range(14)]
    assert len(set(drawn)) == 14


def test_colours_are_told_apart_and_seen_on_both_grounds() -> None:
    def linear(colour: str) -> np.ndarray:
        value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)

    def lab(colour: str) -> np.ndarray:
        to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        x, y, z = np.cbrt(to_xyz @ linear(colour) / np.array([0.9505, 1.0, 1.089]))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    assert min(np.linalg.norm(lab(a) - lab(b)) for a, b in combinations(canvas.COLOURS, 2)) > 30
    for ground in ("#ffffff", "#14171c"):
        for colour in canvas.COLOURS:
            dark, bright = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (ground, colour))
            assert (bright + 0.05) / (dark + 0.05) >= 3, colour


def test_a_png_keeps_every_series_colour() -> None:
    (drawn,) = pictures(many(8))
    image = imread(io.BytesIO(drawn.png))
    found = {tuple(pixel) for pixel in np.rint(image[..., :3] * 255).astype(int).reshape(-1, 3).tolist()}
    assert {tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in canvas.COLOURS} <= found
    assert len(found) > 256  # no palette
