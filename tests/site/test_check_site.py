"""Tests of the faults that `scripts/check_site.py` finds in pages in Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import check_site

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs Debian's chromium and chromium-driver",
)
DOT = (
    "data:image/svg+xml,"
    "%3Csvg xmlns='http://www.w3.org/2000/svg' width='100' height='10'%3E%3C/svg%3E"
)


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with check_site.chromium() as window:
        yield window


def faults(window: Any, folder: Path, body: str, smallest: float = 9.0) -> list[str]:
    path = folder / "page.html"
    path.write_text(f"<!DOCTYPE html><html lang=en><body>{body}</body></html>", encoding="utf-8")
    window.get(path.as_uri())
    return check_site.layout_faults(window, smallest)


def test_page_without_faults_has_none(window: Any, tmp_path: Path) -> None:
    body = (
        "<p style='width: 6em'>several words on several lines, and a-hyphen</p>"
        "<div style='width: 3em; overflow-x: auto; white-space: nowrap'>a text that scrolls</div>"
        f'<img src="{DOT}" data-font=7 data-width=70>'
        "<code style='width: 5em; display: block; overflow-wrap: anywhere'>0123456789abcdef0</code>"
    )
    assert faults(window, tmp_path, body) == []


def test_clipped_text_is_a_fault(window: Any, tmp_path: Path) -> None:
    body = "<div style='width: 3em; overflow: hidden; white-space: nowrap'>a text is cut off</div>"
    assert faults(window, tmp_path, body) == ['clipped at the side: <div> "a text is cut off"']
    body = "<div style='height: 1em; overflow: hidden'>two<br>lines</div>"
    assert faults(window, tmp_path, body) == ['clipped below: <div> "twolines"']


def test_text_beyond_the_window_is_a_fault(window: Any, tmp_path: Path) -> None:
    body = "<style>html { overflow-x: hidden }</style><p style='width: 9000px; margin: 0'>wide</p>"
    assert 'beyond the window: <p> "wide"' in faults(window, tmp_path, body)


def test_name_on_two_lines_is_a_fault(window: Any, tmp_path: Path) -> None:
    body = (
        "<p style='width: 4em; font: 16px monospace; overflow-wrap: anywhere'>MoFedSAM_variant</p>"
    )
    assert faults(window, tmp_path, body) == ["broken name: MoFedSAM_variant"]


def test_table_of_many_columns_must_scroll(window: Any, tmp_path: Path) -> None:
    table = f"<table><tr>{'<td>1</td>' * 9}</tr></table>"
    [fault] = faults(window, tmp_path, table)
    assert fault.startswith("a table of 9 columns does not scroll")
    assert faults(window, tmp_path, f"<div style='overflow-x: auto'>{table}</div>") == []
    assert faults(window, tmp_path, table.replace("<td>1</td>", "", 1)) == []


def test_small_labels_are_a_fault(window: Any, tmp_path: Path) -> None:
    # 7 points of 100 are 7 pixels if the drawing is 100 pixels wide.
    # The image is so far below that the browser loads it late.
    space = "<div style='height: 30000px'></div>"
    body = f'{space}<img src="{DOT}" data-font=7 data-width=100 loading=lazy>'
    [fault] = faults(window, tmp_path, body)
    assert fault.startswith("labels of 7.0 pixels")
    assert faults(window, tmp_path, body, smallest=0.0) == []
    inline = "<svg data-font=5 data-width=100 aria-label=a width=100 height=9></svg>"
    assert faults(window, tmp_path, inline) == ["labels of 5.0 pixels: a"]


def test_drawing_without_sizes_is_a_fault(window: Any, tmp_path: Path) -> None:
    [fault] = faults(window, tmp_path, f'<img src="{DOT}">')
    assert fault.startswith("a drawing has no data-font and data-width")


def test_page_that_is_twice_in_the_navigation_is_a_fault(window: Any, tmp_path: Path) -> None:
    links = "<a href=a.html>A</a> <a href=b.html>B</a> <a href=a.html#x>C</a>"
    body = f"<ul class=md-tabs__list><li>{links}</li></ul>"
    [fault] = faults(window, tmp_path, body)
    assert fault.startswith("twice in the navigation:") and fault.endswith("/a.html")


def test_two_pages_with_one_title_are_a_fault(window: Any, tmp_path: Path) -> None:
    items = "".join(
        f"<li class=md-nav__item><a class=md-nav__link href={page}.html>Rounds</a></li>"
        for page in "ab"
    )
    body = f"<nav class=md-nav--primary><ul class=md-nav__list>{items}</ul></nav>"
    assert faults(window, tmp_path, body) == ["two pages in the navigation have one title: Rounds"]
