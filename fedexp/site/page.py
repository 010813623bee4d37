"""The pages that the generators of the site return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One page of Markdown.

    Args:
        path: Path of the Markdown file in the site's sources, such as
            ``methods/ma_echo.md``. It is unique.
        title: Title in the navigation.
        text: Markdown, which may use the extensions tables, toc, attr_list, admonition,
            md_in_html, superfences and highlight. Links are relative to `path`.
    """

    path: str
    title: str
    text: str


@dataclass(frozen=True)
class Mention:
    """A table that contains our results of a method.

    Args:
        label: The table's name.
        link: Address of the table's page, or of one of its cells, relative to the
            site's root.
        text: Our results as text, such as "85.6 ± 0.3 (n = 3), reduced".
    """

    label: str
    link: str
    text: str
