"""A search for paths, imports and keys of version 0.1 in YAML and Python files.

The files are read but not executed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from fedexp.config.folders import conf_dir
from fedexp.core.errors import ConfigError
from fedexp.core.renames import Finding, old_imports, renames
from fedexp.storage.yaml_files import read_yaml

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_PATH = re.compile(r"(?<![\w.])fedexp(?:\.\w+)+")


def in_yaml(path: Path, home: Path | None) -> Iterator[Finding]:
    """Yield the lines of a YAML file that use an old name.

    Args:
        path: The file.
        home: The folder of config files that contains the file, or None. The config
            group of the file is the name of its topmost folder in `home`.
    """
    text = _read(path)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            "a config file is not YAML", where=f"{path}: {' '.join(str(error).split())}"
        ) from None
    if node is not None:
        yield from _in_node(node, _package(path, home, text))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("a file is not text in UTF-8", where=str(path)) from None


def _package(path: Path, home: Path | None, text: str) -> str:
    """Return the dotted key under which Hydra puts the keys of a file.

    The result is "" if the keys are top-level keys of the config.
    """
    group = "" if home is None else ".".join(path.relative_to(home).parent.parts[:1])
    given = _PACKAGE.search(text)
    if given is None:
        return group
    return given[1].replace("_global_", "").replace("_group_", group).strip(".")


def _in_node(node: yaml.Node, prefix: str) -> Iterator[Finding]:
    """Yield the old names in a YAML node whose keys are below the key `prefix`."""
    if isinstance(node, yaml.ScalarNode):
        yield from _in_text(node.value, node.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _in_node(entry, prefix)
    elif isinstance(node, yaml.MappingNode):
        target = next((str(v.value) for k, v in node.value if k.value == "_target_"), "")
        for key, value in node.value:
            place = f"{prefix}.{key.value}".strip(".")
            if (found := _old_key(place, target)) is not None:
                yield Finding(key.start_mark.line + 1, *found)
            yield from _in_node(value, place)


def _old_key(place: str, target: str) -> tuple[str, str] | None:
    """Return the old and the new name of a renamed key, or None for another key.

    Args:
        place: Dotted key.
        target: Value of ``_target_`` in the node that contains the key, or an empty
            string.
    """
    for old, key in renames().keys.items():
        if place == old or place.endswith(f".{old}"):
            kind = renames().new_path(target) or target
            is_other = kind.startswith("fedexp.") and kind not in _kinds(old, key.options)
            return None if key.options and is_other else (old, key.new)
    return None


@functools.cache
def _kinds(key: str, options: tuple[str, ...]) -> frozenset[str]:
    """Return the class paths of built-in options.

    Args:
        key: Dotted key that begins with the config group of the options.
        options: Names of the options.
    """
    group = conf_dir() / key.partition(".")[0]
    return frozenset(read_yaml(group / f"{option}.yaml")["_target_"] for option in options)


def _in_text(text: str, line: int) -> Iterator[Finding]:
    """Yield old paths and old keys in a text.

    The text is the value of a YAML key or a string of a Python file. It may contain
    overrides or interpolations.
    """
    for found in _PATH.finditer(text):
        new = renames().new_path(found[0])
        if new is not None:
            yield Finding(line + text[: found.start()].count("\n"), found[0], new)
    for old, key in renames().keys.items():
        for place in re.finditer(rf"(?<![\w.]){re.escape(old)}(?![\w.])", text):
            yield Finding(line + text[: place.start()].count("\n"), old, key.new)


def in_python(path: Path) -> Iterator[Finding]:
    """Yield the lines of a Python file that use an old path, import or config key."""
    try:
        tree = ast.parse(_read(path), str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"a module is not Python: {error.msg}", where=f"{path}:{error.lineno}"
        ) from None

    yield from _paths(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _in_text(node.value, node.lineno)


def _paths(tree: ast.Module) -> Iterator[Finding]:
    """Yield old names that a module imports, and the lines that use these names."""
    renamed: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        bound = {alias.name for alias in node.names if alias.asname is None}
        for finding in old_imports(node):
            yield finding
            old_name, new_name = (path.rpartition(".")[2] for path in (finding.old, finding.new))
            if isinstance(node, ast.ImportFrom) and old_name in bound and old_name != new_name:
                renamed[old_name] = new_name

    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renamed:
            yield Finding(node.lineno, node.id, renamed[node.id])
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            # `walk` visits a chain of attributes (a.b.c) before the shorter chains that
            # it contains (a.b). Only the longest chain is looked up.
            inner |= {id(part) for part in ast.walk(node)}
            path = ast.unparse(node)
            if _PATH.fullmatch(path) and (new := renames().new_path(path)) is not None:
                yield Finding(node.lineno, path, new)
