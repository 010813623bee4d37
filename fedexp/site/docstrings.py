"""The labelled parts of docstrings, such as Update and Communication."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

# Labels that only this project uses. mkdocstrings knows the labels of Google style,
# such as Args, Returns and Raises.
_PART = re.compile(
    r"^(Reference|Update|Communication|State|Logged|Differences from [\w' ]+):\n"
    r"((?:[ \t]+.*(?:\n|\Z)|\n)+)",
    re.MULTILINE,
)
# The double colon that starts an indented block in reStructuredText.
_BLOCK = re.compile(r"::(?=\n\s*\n[ \t])")


@dataclass(frozen=True)
class Parts:
    """The parts of a docstring. All texts are Markdown.

    Args:
        idea: First paragraph.
        rest: Paragraphs after the first one that have no label.
        labelled: Texts of the labelled parts, by label.
    """

    idea: str
    rest: str = ""
    labelled: dict[str, str] = field(default_factory=dict)


def parts_of(text: str) -> Parts:
    """Split a docstring that `inspect.cleandoc` has cleaned."""
    labelled = {match[1]: _markdown(textwrap.dedent(match[2])) for match in _PART.finditer(text)}
    idea, _, rest = _PART.sub("", text).strip().partition("\n\n")
    return Parts(" ".join(idea.split()), _markdown(rest), labelled)


def as_markdown(text: str) -> str:
    """Replace the labels of a cleaned docstring by bold words.

    Sections of Google style, such as Args, are not changed.
    """
    return _BLOCK.sub(
        ":",
        _PART.sub(
            lambda match: f"**{match[1]}**\n\n{_markdown(textwrap.dedent(match[2]))}\n\n", text
        ),
    ).rstrip()


def _markdown(text: str) -> str:
    return _BLOCK.sub(":", text).strip("\n").rstrip()
