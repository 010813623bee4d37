"""Docstrings and comments as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_SPECIAL = str.maketrans({letter: f"&#{ord(letter)};" for letter in "&<>*_[]|\\~$"})
_SECTION = re.compile(r"((?:Args|Raises|Returns)[^:\n]*):(.*)", re.DOTALL)
_ITEM = re.compile(r"([\w*]+(?:, [\w*]+)*): ")
_NEXT = re.compile(r"; (?=[\w*]+(?:, [\w*]+)*: )")


def escaped(text: str, links: Mapping[str, str] | None = None) -> str:
    """A line of plain text as Markdown, also for a table's cell; what stands between backticks becomes code.

    Args:
        links: where code of these words leads.
    """
    return "".join(
        _code(part.strip("`").strip(), links or {})
        if part.startswith("`")
        else part.translate(_SPECIAL)
        for part in _CODE.split(text)
    )


def code(text: str) -> str:
    """Text as code in a line or in a table's cell, whatever letters it has."""
    return f"<code>{text.translate(_SPECIAL).replace('`', '&#96;')}</code>"


def _code(text: str, links: Mapping[str, str]) -> str:
    shown = code(" ".join(text.split()))
    return f"[{shown}]({links[text]})" if text in links else shown


def docstring(text: str, links: Mapping[str, str] | None = None) -> str:
    """A cleaned docstring (`ast.get_docstring`) as Markdown.

    Paragraphs, sections (Args, Raises, Returns) as lists, and blocks that are indented, formulas say, as they are.
    """
    made: list[str] = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):  # formulas
            made.append(fenced(textwrap.dedent(block), "text"))
            continue
        start = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
        if lines[:start]:
            made.append(escaped(" ".join(line.strip() for line in lines[:start]), links))
        if lines[start:]:
            made.append(_section("\n".join(lines[start:]), links))
    return "\n\n".join(made)


def _section(text: str, links: Mapping[str, str] | None) -> str:
    """``Args:`` and what follows it, indented or not, or on the same line."""
    found = _SECTION.match(text)
    assert found is not None
    head, rest = found[1], found[2]
    first, _, body = rest.partition("\n")
    items: list[str] = [" ".join(rest.split())] if first.strip() else []
    for line in [] if items else textwrap.dedent(body).splitlines():
        if line.startswith(" ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line.strip())
    each = (one for item in items for one in (_NEXT.split(item) if _ITEM.match(item) else [item]))
    return "\n".join(
        [f"{escaped(head, links)}:", "", *(f"- {_item(item, links)}" for item in each)]
    )


def _item(text: str, links: Mapping[str, str] | None) -> str:
    named = _ITEM.match(text)
    return (
        f"{code(named[1])}: {escaped(text[named.end() :], links)}"
        if named
        else escaped(text, links)
    )


def fenced(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Of cells that are Markdown already."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def first_sentence(text: str) -> str:
    """Up to a full stop that a capital letter or a dotted key follows."""
    return re.split(r"(?<=\.) (?=[A-Z]|\w+\.\w)", text, maxsplit=1)[0]
