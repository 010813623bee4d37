"""What the generators of the site hand over: pages of Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One page.

    Args:
        path: where in the site's sources, ``methods/ma_echo.md``; unique.
        title: the navigation's words.
        text: Markdown (tables, toc, attr_list, admonition, md_in_html, superfences, highlight); links are relative to `path`.
    """

    path: str
    title: str
    text: str


@dataclass(frozen=True)
class Mention:
    """A table in which a method appears with our numbers.

    Args:
        label: the table's name; link: its page or a cell of it, relative to the site's root.
        text: our numbers in words, "85.6 ± 0.3 (n = 3), reduced".
    """

    label: str
    link: str
    text: str
