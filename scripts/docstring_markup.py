"""An extension of Griffe for this project's docstrings on the pages of mkdocstrings.

Griffe reads the docstrings for mkdocstrings. Labels such as Update become bold words. A
name in single backticks becomes a link if an API page describes the named object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

from fedexp.site.api_reference import MODULES
from fedexp.site.docstrings import as_markdown

_NAME = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")


class DocstringMarkup(griffe.Extension):
    """The extension of Griffe, which creates an object of this class."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        described = {kind.path for module in MODULES for kind in _described(pkg[module[7:]])}
        for module in MODULES:
            for kind in _described(pkg[module[7:]]):
                docstring = kind.docstring
                if docstring is not None:
                    docstring.value = _linked(as_markdown(docstring.value), kind, described)


def _described(kind: griffe.Object | griffe.Alias) -> Iterator[griffe.Object]:
    """Yield `kind` and the public objects that it defines and that have a docstring."""
    if kind.is_alias or (kind.docstring is None and not kind.is_class):
        return
    yield kind  # type: ignore[misc]
    if kind.is_module or kind.is_class:
        for member in kind.members.values():
            if not re.match("_[^_]", member.name):
                yield from _described(member)


def _linked(text: str, place: griffe.Object, described: set[str]) -> str:
    def made(match: re.Match[str]) -> str:
        target = _resolved(match[1], place)
        return f"[{match[0]}][{target}]" if target in described else match[0]

    return _NAME.sub(made, text)


def _resolved(name: str, place: griffe.Object) -> str:
    """Return the full path of the object that a name in a docstring refers to."""
    if name.startswith("fedexp."):
        return name
    first, dot, rest = name.partition(".")
    try:
        return f"{place.resolve(first)}{dot}{rest}"
    except griffe.NameResolutionError:
        return ""
