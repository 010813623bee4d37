"""Comments in config files, which the command's help and the documentation show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Key:
    """One key of a YAML file.

    Args:
        name: The dotted key, such as ``local.lr``.
        default: The value as it is written in the file, or None if the key contains
            other keys.
        comment: The comment on the key's line. If there is none, the comment above the
            key. If the value is a list, the comments of the list's entries.
        note: The comment above the key, or "" if it is already in `comment`. The first
            key of a file has no note, because the comment above it describes the file.
    """

    name: str
    default: str | None
    comment: str
    note: str

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def keys_of(path: Path) -> list[Key]:
    """Return the keys of a config file in their order.

    They include ``defaults``, which lists the options that the file chooses for config
    groups.
    """
    text = path.read_text()
    root = yaml.compose(text)
    return [] if root is None else list(_keys(root, "", text.splitlines(), text))


def _keys(node: yaml.MappingNode, above: str, lines: list[str], text: str) -> Iterator[Key]:
    for number, (key, value) in enumerate(node.value):
        name, line = f"{above}{key.value}", key.start_mark.line
        note = "" if not above and number == 0 else _comment_above(lines, line)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield _key(name, None, _comment(lines[line][key.end_mark.column :]), note)
            yield from _keys(value, f"{name}.", lines, text)
        elif isinstance(value, yaml.SequenceNode) and not value.flow_style:
            items = [
                text[item.start_mark.index : item.end_mark.index].strip() for item in value.value
            ]
            comments = [_comment(lines[item.start_mark.line]) for item in value.value]
            yield Key(name, "; ".join(items), "; ".join(filter(None, comments)), note)
        else:
            written = text[value.start_mark.index : value.end_mark.index]
            yield _key(
                name, written, _comment(lines[value.end_mark.line][value.end_mark.column :]), note
            )


def _key(name: str, default: str | None, comment: str, note: str) -> Key:
    """Return a `Key`. If `comment` is empty, `note` takes its place."""
    return Key(name, default, comment, note) if comment else Key(name, default, note, "")


def _comment(rest: str) -> str:
    return rest.partition("#")[2].strip()


def _comment_above(lines: list[str], line: int) -> str:
    above: list[str] = []
    while line and lines[line - 1].strip().startswith("#"):
        line -= 1
        above.insert(0, lines[line].strip().removeprefix("#").strip())
    return " ".join(above)


def header(path: Path) -> str:
    """Return the comment at the beginning of a config file as one line."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return " ".join(
        line.removeprefix("#").strip() for line in lines if not line.startswith("# @package")
    )


def first_sentence(text: str) -> str:
    """Return the first sentence of a text.

    It ends at a full stop that is followed by a capital letter or a dotted key.
    """
    return re.split(r"(?<=\.) (?=[A-Z]|\w+\.\w)", text, maxsplit=1)[0]
