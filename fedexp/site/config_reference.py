"""Pages that list every config key and every option of every group.

Defaults and comments are read from the config folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fedexp.config.comments import Key, first_sentence, header, keys_of
from fedexp.config.folders import conf_dir
from fedexp.config.groups import groups
from fedexp.site.markdown import code, escaped, table
from fedexp.site.page import Page
from fedexp.storage.yaml_files import read_yaml

# Folder of the pages.
FOLDER = "reference/config"


def about(group: str, option: str) -> str:
    """Return the first sentence of the comment at the top of an option's file."""
    return first_sentence(header(conf_dir() / group / f"{option}.yaml"))


def link(key: str) -> str:
    """Return the link to the explanation of a key, relative to the site's root.

    Args:
        key: A key of config.yaml (``rounds``), a group (``trainer``), or a key of a
            group's option (``trainer.mu``).
    """
    top = key.partition(".")[0]
    return f"{FOLDER}/{top}.md" if (conf_dir() / top).is_dir() else f"{FOLDER}/index.md#{key}"


def pages() -> list[Page]:
    """Return the page of config.yaml and one page per group."""
    folder = conf_dir()
    found = dict(groups((folder,)))
    return [
        _main(folder, found),
        *(_group(folder, name, options) for name, options in found.items()),
    ]


def _main(folder: Path, options: dict[str, list[str]]) -> Page:
    path = folder / "config.yaml"
    chosen = {
        group: option
        for entry in read_yaml(path)["defaults"]
        if isinstance(entry, dict)
        for group, option in entry.items()
    }

    rows = [
        [
            f"[{code(name)}]({name}.md)",
            code(str(chosen[name])) if chosen.get(name) else "none",
            str(len(options[name])),
        ]
        for name in options
    ]

    parts = [
        "# Configuration",
        escaped(header(path)),
        "Set keys on the command line as `key=value`, and options of groups as `group=option`."
        " The keys of an option are below its group's name: `trainer.mu` with `trainer=fedprox`."
        " `fedexp --cfg job` prints the resolved config of an experiment."
        " `fedexp --help KEY` prints the part of this page that explains a key.",
        "## Groups",
        table(["group", "default", "options"], rows),
    ]
    return Page(
        f"{FOLDER}/index.md",
        "Configuration",
        "\n\n".join([*parts, *_sections(keys_of(path)[1:])]) + "\n",
    )


def _sections(keys: list[Key]) -> Iterator[str]:
    """Yield tables and sections of keys, in the order of the keys.

    Keys without subkeys become rows of tables. A key with subkeys gets its own section.
    """
    by_top: dict[str, list[Key]] = {}
    for key in keys:
        by_top.setdefault(key.top, []).append(key)

    flat: list[Key] = []
    titled = False
    for top, below in by_top.items():
        first, *rest = below
        if first.note or rest:
            yield from _table(flat, "" if titled else "## The experiment")
            flat, titled = [], titled or bool(flat)
        if first.note:
            yield escaped(first.note)
        if not rest:
            flat.append(first)
            continue
        yield f"## {top} {{#{top}}}"
        if first.comment:
            yield escaped(_sentence(first.comment))
        yield from _table(rest, "")
    yield from _table(flat, "")


def _sentence(comment: str) -> str:
    return comment[0].upper() + comment[1:] + ("" if comment.endswith(".") else ".")


def _table(keys: list[Key], title: str, prefix: str = "") -> Iterator[str]:
    if not keys:
        return
    if title:
        yield title
    rows = [_row(key, prefix) for key in keys if key.default is not None or key.comment]
    yield table(["key", "default", "meaning"], rows)


def _row(key: Key, prefix: str) -> list[str]:
    """Return the row of a key.

    On the page of a group, `prefix` is not empty. It precedes the row's anchor, and the
    row also contains the key's note.
    """
    meaning = " ".join(filter(None, (key.note if prefix else "", key.comment)))
    return [
        f'<a id="{prefix}{key.name}"></a>{code(key.name)}',
        "" if key.default is None else code(key.default),
        escaped(meaning),
    ]


def _group(folder: Path, name: str, options: list[str]) -> Page:
    """Return the page of a group with one section per option.

    The page of the group ``method`` is an exception. It only links to the methods'
    pages.
    """
    parts = [
        f"# {name}",
        f"Set it by {code(f'{name}=OPTION')}. {code(f'fedexp --help {name}')} prints the list.",
    ]
    if name == "method":
        rows = [
            [f"[{code(one)}](../../methods/{one}.md)", escaped(about(name, one))] for one in options
        ]
        return Page(
            f"{FOLDER}/{name}.md",
            name,
            "\n\n".join([*parts, table(["option", "description"], rows)]) + "\n",
        )

    for option in options:
        path = folder / name / f"{option}.yaml"
        anchor = re.sub(r"[^\w-]", "-", option)
        target = (read_yaml(path) or {}).get("_target_")
        keys = [key for key in keys_of(path) if key.name != "_target_"]
        parts += [f"## {option} {{#{anchor}}}", escaped(header(path))]
        if target:
            parts.append(f"Class {code(target)}.")
        parts += _table(keys, "", f"{anchor}.")
    return Page(f"{FOLDER}/{name}.md", name, "\n\n".join(part for part in parts if part) + "\n")
