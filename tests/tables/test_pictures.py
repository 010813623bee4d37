"""Tests of the pictures.

They show which pictures are drawn, that every number is at its place, and that a
picture loads nothing.
"""

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
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.image import imread

from fedexp.core.errors import ConfigError
from fedexp.tables.plot_styles import FILE, read_plot_styles
from fedexp.tables.report import canvas, curves, delta, texts
from fedexp.tables.report.picture_sizes import sizes_of_png, sizes_of_svg
from fedexp.tables.report.pictures import pictures
from fedexp.tables.report.report import Method, PlotStyle, Report
from tests.tables.reports import cell, report


def names(of: Report) -> list[str]:
    return [picture.name for picture in pictures(of)]


def test_a_numeric_last_key_is_an_axis_another_one_is_not() -> None:
    assert names(report()) == ["delta", "curves"]
    words = tuple(
        replace(
            c, conditions={"clients": c.conditions["clients"], "beta": f"b{c.conditions['beta']}"}
        )
        for c in report().cells
    )
    assert names(report(cells=words)) == ["delta", "rows"]
    flags = tuple(
        replace(c, conditions={**c.conditions, "beta": c.conditions["beta"] == 0.5})
        for c in report().cells
    )
    assert names(report(cells=flags)) == ["delta", "rows"]


def test_a_method_with_one_row_is_named_once() -> None:
    """If all rows have the same conditions, only the heads name the methods."""
    seen = {}
    for c in report().cells:
        if c.delta is not None and math.isfinite(c.delta):
            seen.setdefault(c.method, replace(c, conditions=report().cells[0].conditions))
    figure = delta.difference_figure(report(cells=tuple(seen.values())))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert len(axes.texts) == len(seen) == len(axes.get_yticklabels()) > 1
    assert not any(one.get_text() for one in axes.get_yticklabels())


def test_without_references_nothing_is_compared_and_without_runs_nothing_is_drawn() -> None:
    assert names(report(cells=tuple(replace(c, paper=None) for c in report().cells))) == ["curves"]
    assert names(report(cells=tuple(replace(c, values=(), seeds=()) for c in report().cells))) == []
    diverged = tuple(replace(c, values=(math.nan,), seeds=(0,)) for c in report().cells)
    assert names(report(cells=diverged)) == []


def test_an_interval_that_rounding_left_beside_its_number_is_drawn() -> None:
    equal = tuple(
        replace(c, interval=(c.delta + 1e-14, c.delta + 1e-14))
        for c in report().cells
        if c.delta is not None
    )
    assert "delta" in names(report(cells=equal))


@pytest.mark.parametrize("many", [1, 12])
def test_pictures_are_svg_and_png_without_anything_from_outside(many: int) -> None:
    # The labels must be shown as they are. They must not be read as mathematics, and
    # they must not be hidden.
    methods = tuple(Method(f"m{i}", f"$_{i}^") for i in range(many))
    cells = tuple(
        cell({"rank": r}, m.key, 1.0, r / 10, r / 9) for m in methods for r in (1, 10, 100)
    )
    drawn = pictures(report(keys=("rank",), methods=methods, cells=cells))
    assert len(drawn) == 2
    for picture in drawn:
        assert ET.fromstring(picture.svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "currentColor" in picture.svg
        assert "<dc:date>" not in picture.svg
        assert not re.search(r'href="(?!#)|#1b1f26|#c4c9d1', picture.svg)
        image = imread(io.BytesIO(picture.png))
        assert np.allclose(image[0, 0, :3], 1.0)  # The background is white.
        assert image.std() > 0.01


def test_render_picture_stores_smallest_font_and_width() -> None:
    with canvas.use_style():
        figure = canvas.figure(5.0, 3.0)
        axes = canvas.axes(figure, 1, 1, 1)
        axes.text(0.5, 0.5, "small", fontsize=6)
        # Invisible texts do not count.
        axes.text(0.5, 0.5, " ", fontsize=2)
        axes.text(0.5, 0.5, "hidden", fontsize=2, visible=False)
        drawn = canvas.render_picture("p", "p", figure)

    assert sizes_of_svg(drawn.svg) == (6.0, 360.0)
    assert sizes_of_png(drawn.png) == (6.0, pytest.approx(360.0, rel=1e-3))
    assert sizes_of_svg("<svg></svg>") is None and sizes_of_png(b"") is None


def test_labels_of_the_axis_have_a_margin_in_the_png() -> None:
    with canvas.use_style():
        figure = canvas.figure(5.6, 4.0)
        axes = canvas.axes(figure, 1, 1, 1)
        axes.set_yticks([0, 1], ["dirichlet, 0.6", "pathological, 6"], fontsize=7.5)
        drawn = canvas.render_picture("p", "p", figure)

    margin = imread(io.BytesIO(drawn.png))[:, :4, :3]
    assert np.allclose(margin, 1.0)


def test_difference_figure_of_many_methods_fits_beside_the_text() -> None:
    methods = tuple(Method(f"m{i}", f"m{i}") for i in range(13))
    cells = tuple(cell({"rank": r}, m.key, 1.0, r / 10, r / 9) for m in methods for r in range(9))
    drawn = {
        picture.name: picture
        for picture in pictures(report(keys=("rank",), methods=methods, cells=cells))
    }
    font, width = sizes_of_svg(drawn["delta"].svg) or (0.0, 0.0)
    # The text column of a page is about 690 pixels wide. Labels need a height of 9
    # pixels.
    assert font * 690 / width >= 9


def test_the_users_own_style_changes_nothing() -> None:
    plain = pictures(report())
    with mpl.rc_context(
        {"font.size": 20.0, "axes.facecolor": "red", "text.usetex": False, "lines.linewidth": 9.0}
    ):
        assert pictures(report()) == plain


@contextmanager
def bars() -> Iterator[list[tuple[Any, Any, dict[str, Any]]]]:
    """Record what is drawn on the panels with bars: x, y and the style."""
    from matplotlib.axes import Axes

    drawn: list[tuple[Any, Any, dict[str, Any]]] = []
    original = Axes.errorbar

    def spy(self, x, y, **look):
        drawn.append((list(x), list(y), look))
        return original(self, x, y, **look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "errorbar", spy)
        yield drawn


def test_a_difference_has_its_interval_its_verdict_and_its_place_inside_the_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.axes import Axes

    limits, bands = [], []
    for name, kept in (("set_xlim", limits), ("fill_betweenx", bands)):
        original = getattr(Axes, name)

        def spy(self, *values, _original=original, _kept=kept, **look):
            _kept.append(values)
            return _original(self, *values, **look)

        monkeypatch.setattr(Axes, name, spy)
    one, two, three = report().methods
    of = report(methods=(one, two, replace(three, tolerance=20.0)))
    with bars() as drawn:
        delta.difference_figure(of)
    shown = [
        c
        for m in ("ma_echo", "fedavg", "ot")
        for c in of.cells
        if c.method == m and c.delta is not None
    ]
    # The proposed method comes first. A diverged run has no row.
    shown = [c for c in shown if math.isfinite(c.delta or 0.0)]
    assert [x for x, _, _ in drawn] == [[c.delta] for c in shown]
    for (_, _, look), c in zip(drawn, shown, strict=True):
        colour, marker, _ = delta.VERDICT_STYLES[texts.verdict_name(c)]
        assert (look["color"], look["marker"]) == (canvas.COLOURS[colour], marker)
        low, high = c.interval or (c.delta, c.delta)
        assert look["xerr"] == [[c.delta - low], [high - c.delta]]
        assert limits[-1][0] < low and high < limits[-1][1]
    assert [(low, high) for _, low, high in bands] == [(-20.0, 20.0), (-5.0, 5.0), (-5.0, 5.0)]
    assert len({(marker, full) for _, marker, full in delta.VERDICT_STYLES.values()}) == len(
        delta.VERDICT_STYLES
    )  # The styles also differ without colour.


def test_every_point_of_a_curve_stands_at_its_value_and_so_do_the_ticks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.axes import Axes

    ticks = []
    original = Axes.set_xticks

    def spy(self, at, labels=None, **look):
        if labels is not None:
            ticks.append(list(zip(at, labels, strict=True)))
        return original(self, at, labels, **look)

    monkeypatch.setattr(Axes, "set_xticks", spy)
    with bars() as drawn:
        curves.over_last_key(report())
    assert drawn[0][2]["yerr"][0] == report().cells[2].sd
    # No line is drawn across a missing value.
    assert [x for x, _, _ in drawn] == [[0.01, 0.5], [0.01, 0.5], [0.01], [0.5], [0.01, 0.5]]
    assert drawn[0][1] == [80.0, 66.13]
    assert ticks == [[(0.01, "0.01"), (0.5, "0.5")]] * 2
    apart = [look["transform"].transform((0.1, 50.0)) for _, _, look in drawn]
    # The offsets in pixels are so small that no other value is near.
    assert max(abs(a[0] - b[0]) for a, b in combinations(apart[:3], 2)) < 8.1 / 72 * 100


def test_the_proposed_method_stands_out_and_reference_points_step_back() -> None:
    look = canvas.default_style(0)
    proposed, other, point = (
        canvas.line_properties(look, role) for role in ("proposed", "baseline", "reference")
    )
    for key in ("linewidth", "markersize", "alpha", "zorder"):
        assert proposed[key] > other[key] > point[key], key


@contextmanager
def watched(method: str, of: Any = None) -> Iterator[list[Any]]:
    """Record the first argument of each call of a method of `Figure`, or of `of`."""
    from matplotlib.figure import Figure

    seen: list[Any] = []
    of = of or Figure
    original = getattr(of, method)

    def spy(self, *args, **look):
        seen.append(args[0] if args else look["handles"])
        return original(self, *args, **look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, method, spy)
        yield seen


@pytest.mark.parametrize(
    ("variant", "said", "words"),
    [
        ("full", "Full: all of the table's cells and runs.", False),
        ("partial", "Partial: not exactly the cells and runs of the full variant.", False),
        (
            "reduced",
            "Reduced: these runs are smaller than the paper's.",
            True,
        ),
        ("smoke", "Smoke test: the runs show that the pipeline works;", False),
    ],
)
def test_every_picture_names_its_form_inside(variant: Any, said: str, words: bool) -> None:
    cells = tuple(replace(c, conditions={"clients": str(c.conditions)}) for c in report().cells)
    of = report(cells=cells, keys=("clients",), agreement=()) if words else report()
    with watched("supxlabel") as notes:
        made = pictures(replace(of, variant=variant))
    assert [" ".join(note.split("\n")).startswith(said) for note in notes] == [True, True]
    assert ["† has seen test data" in note for note in notes] == [True, True]
    stamp = (
        f"ma_echo/table1, {variant} variant; n = 1 to 3 runs per cell; commit 4f4ac65; 2026-11-02."
    )
    assert [stamp in " ".join(note.split("\n")) for note in notes] == [True, True]
    assert all(f"({variant})" in picture.title for picture in made)


def test_no_note_about_test_data_where_no_column_has_seen_them() -> None:
    of = report()
    with watched("supxlabel") as notes:
        pictures(replace(of, methods=tuple(replace(m, oracle="") for m in of.methods)))
    assert ["†" in note for note in notes] == [False, False]


def test_what_was_chosen_on_test_data_is_marked_even_where_its_label_is_cut() -> None:
    methods = (Method("m", "a label of very, very many letters", oracle="best round"),)
    from matplotlib.axes import Axes

    with watched("legend") as legends, watched("annotate", Axes) as headings:
        pictures(report(keys=(), methods=methods, cells=(cell({}, "m", 1.0, 2.0),), agreement=()))
    assert [legends[1][0].get_label(), *headings] == ["a label of very, very many lett… †"] * 2


def test_long_legends_and_notes_leave_room_for_the_panel() -> None:
    """Matplotlib warns if they leave no room."""
    methods = tuple(
        Method(f"m{i}", f"a label of {i} and many letters", oracle="best of a grid")
        for i in range(12)
    )
    cells = tuple(cell({"kind": "one"}, m.key, 1.0, 2.0) for m in methods)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures(report(keys=("kind",), methods=methods, cells=cells, agreement=()))


def many(count: int) -> Report:
    methods = tuple(Method(f"m{i}", f"M{i}") for i in range(count))
    cells = tuple(
        cell({"rank": r}, m.key, None, 10.0 * i + r)
        for i, m in enumerate(methods)
        for r in range(3)
    )
    return report(keys=("rank",), methods=methods, cells=cells, agreement=())


def test_no_two_of_24_series_look_alike_even_in_grey() -> None:
    with watched("legend") as legends:
        pictures(many(24))
    (handles,) = legends
    assert len({(h.get_marker(), str(h._unscaled_dash_pattern)) for h in handles}) == 24


def test_a_method_has_the_style_of_its_paper_and_others_one_that_is_free() -> None:
    # The second method would otherwise have this style.
    own = PlotStyle("ochre", "s", "dashed")
    plot_styles = canvas.distinct_styles([None, None, own, None])
    assert plot_styles[2] == own
    assert len({(look.marker, look.dash) for look in plot_styles}) == 4
    methods = (Method("a", "A"), Method("b", "B", plot_style=own))
    cells = tuple(cell({"rank": r}, m.key, None, 1.0 + r) for m in methods for r in range(3))
    with bars() as drawn:
        pictures(report(keys=("rank",), methods=methods, cells=cells, agreement=()))
    style = drawn[1][2]
    assert (style["color"], style["marker"], style["linestyle"]) == (
        "#a37800",
        "s",
        canvas.DASHES["dashed"],
    )


def test_styles_that_grey_confuses_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        "a: {colour: blue, marker: o, dash: solid}\nb: {colour: pink, marker: o, dash: solid}\n"
    )
    with pytest.raises(ConfigError, match="'a' and 'b' have the same marker and dash"):
        read_plot_styles(tmp_path)
    (tmp_path / FILE).write_text("a: {colour: mauve, marker: o, dash: solid}\n")
    with pytest.raises(ConfigError, match="'mauve' is not a choice"):
        read_plot_styles(tmp_path)


def test_colours_are_told_apart_and_seen_on_both_grounds() -> None:
    def linear(colour: str) -> np.ndarray:
        value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)

    def lab(colour: str) -> np.ndarray:
        to_xyz = np.array(
            [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        )
        x, y, z = np.cbrt(to_xyz @ linear(colour) / np.array([0.9505, 1.0, 1.089]))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    assert (
        min(np.linalg.norm(lab(a) - lab(b)) for a, b in combinations(canvas.COLOURS.values(), 2))
        > 30
    )
    for ground in ("#ffffff", "#14171c"):
        for colour in canvas.COLOURS.values():
            dark, bright = sorted(
                float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (ground, colour)
            )
            assert (bright + 0.05) / (dark + 0.05) >= 3, colour


def test_a_png_keeps_every_series_colour() -> None:
    (drawn,) = pictures(many(8))
    image = imread(io.BytesIO(drawn.png))
    found = {
        tuple(pixel) for pixel in np.rint(image[..., :3] * 255).astype(int).reshape(-1, 3).tolist()
    }
    assert {
        tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in canvas.COLOURS.values()
    } <= found
    assert len(found) > 256  # The picture is not limited to a palette of 256 colours.
