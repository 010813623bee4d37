"""Docstrings and comments as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping

_CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
_SPECIAL = str.maketrans({letter: f"&#{ord(letter)};" for letter in "&<>*_[]|\\~$"})
# Sections whose body is one entry per name.
_ENTRIES = ("Args", "Attributes", "Raises")
_LABEL = re.compile(
    rf"({'|'.join(_ENTRIES)}|Returns|Yields|Examples?|Notes?|Reference|Update|Communication"
    r"|State|Logged|Differences from [\w' ]+):"
)
_ENTRY = re.compile(r"([\w*.]+): ")


def escaped(text: str, links: Mapping[str, str] | None = None) -> str:
    """Render a line of plain text as Markdown, which also fits a cell of a table.

    Text between backticks becomes code.

    Args:
        text: The text.
        links: Link targets of words in backticks.
    """
    return "".join(
        _code(part.strip("`").strip(), links or {})
        if part.startswith("`")
        else part.translate(_SPECIAL)
        for part in _CODE.split(text)
    )


def code(text: str) -> str:
    """Render text with any characters as code in a line or in a cell of a table."""
    return f"<code>{text.translate(_SPECIAL).replace('`', '&#96;')}</code>"


def _code(text: str, links: Mapping[str, str]) -> str:
    shown = code(" ".join(text.split()))
    return f"[{shown}]({links[text]})" if text in links else shown


def docstring(text: str, links: Mapping[str, str] | None = None) -> str:
    """Render a cleaned docstring (`ast.get_docstring`) as Markdown.

    Sections with entries (Args, Attributes, Raises) become lists. Other labels, such as
    Returns and Reference, are bold words before their text. Indented blocks, such as
    formulas, are rendered as they are.

    Args:
        text: The docstring.
        links: Link targets of words in backticks.

    Returns:
        Markdown without a final line break.
    """
    made: list[str] = []
    rest: list[str] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        label = _LABEL.fullmatch(line)
        if label is None or not (lines and lines[0].startswith(" ")):
            rest.append(line)
            continue

        body: list[str] = []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        made += [*_blocks("\n".join(rest), links), *_section(label[1], body, links)]
        rest = []
    return "\n\n".join([*made, *_blocks("\n".join(rest), links)])


def _blocks(text: str, links: Mapping[str, str] | None) -> Iterator[str]:
    """Yield paragraphs, lists and indented blocks."""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            yield fenced(textwrap.dedent(block), "text")
        elif block.startswith("- "):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            yield "\n".join(f"- {escaped(' '.join(item.split()), links)}" for item in items)
        elif lines:
            yield escaped(" ".join(line.strip() for line in lines), links)


def _section(label: str, body: list[str], links: Mapping[str, str] | None) -> Iterator[str]:
    """Yield a labelled section, whose body is the indented lines below the label."""
    text = textwrap.dedent("\n".join(body))
    if label not in _ENTRIES:
        first, *others = _blocks(text, links)
        joined = not first.startswith(("- ", "```"))
        yield f"**{label}:** {first}" if joined else f"**{label}:**\n\n{first}"
        yield from others
        return

    entries: list[str] = []
    for line in text.splitlines():
        if entries and (line.startswith(" ") or not _ENTRY.match(line)):
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    yield f"**{label}:**"
    yield "\n".join(f"- {_entry(' '.join(entry.split()), links)}" for entry in entries)


def _entry(text: str, links: Mapping[str, str] | None) -> str:
    named = _ENTRY.match(text)
    if named is None:
        return escaped(text, links)
    return f"{code(named[1])}: {escaped(text[named.end() :], links)}"


def fenced(text: str, language: str) -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of cells that are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def first_sentence(text: str) -> str:
    """Return the text up to a full stop before a capital letter or a dotted key."""
    return re.split(r"(?<=\.) (?=[A-Z]|\w+\.\w)", text, maxsplit=1)[0]
