"""Plain text and code as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_SPECIAL = str.maketrans({letter: f"&#{ord(letter)};" for letter in "&<>*_[]|\\~$"})


def escaped(text: str, links: Mapping[str, str] | None = None) -> str:
    """Render a line of plain text as Markdown, which also works in a table's cell.

    Special characters are escaped. Text between backticks becomes code.

    Args:
        text: The text.
        links: Link targets. The keys are texts between backticks.
    """
    return "".join(
        _code(part.strip("`").strip(), links or {})
        if part.startswith("`")
        else part.translate(_SPECIAL)
        for part in _CODE.split(text)
    )


def code(text: str) -> str:
    """Render any text as code, for a line of text or a table's cell."""
    return f"<code>{text.translate(_SPECIAL).replace('`', '&#96;')}</code>"


def _code(text: str, links: Mapping[str, str]) -> str:
    shown = code(" ".join(text.split()))
    return f"[{shown}]({links[text]})" if text in links else shown


def fenced(text: str, language: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table. Its cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
