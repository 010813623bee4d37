"""A search for names of version 0.1 in YAML and Python files.

The files are read but not executed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from fedexp.config.folders import conf_dir
from fedexp.config.yaml_files import read_yaml
from fedexp.core.errors import ConfigError
from fedexp.core.renames import Finding, old_imports, renames

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_PATH = re.compile(r"(?<![\w.])fedexp(?:\.\w+)+")


def in_yaml(
    path: Path, home: Path | None, fields: Mapping[str, frozenset[str]]
) -> Iterator[Finding]:
    """Yield the lines of a YAML file that use an old name.

    Args:
        path: The file.
        home: The folder of configs that contains the file, or None. The name of the
            file's topmost folder in `home` is its group.
        fields: Names that the user's classes define, by class.
    """
    text = _read(path)
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            "a config file is not YAML", where=f"{path}: {' '.join(str(error).split())}"
        ) from None
    if node is not None:
        yield from _in_node(node, _package(path, home, text), fields)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("a file is not text in UTF-8", where=str(path)) from None


def _package(path: Path, home: Path | None, text: str) -> str:
    """Return the dotted key that a file's keys are below, or an empty string."""
    group = "" if home is None else ".".join(path.relative_to(home).parent.parts[:1])
    given = _PACKAGE.search(text)
    if given is None:
        return group
    return given[1].replace("_global_", "").replace("_group_", group).strip(".")


def _in_node(
    node: yaml.Node, prefix: str, fields: Mapping[str, frozenset[str]]
) -> Iterator[Finding]:
    """Yield the findings of a node whose keys are below `prefix`."""
    if isinstance(node, yaml.ScalarNode):
        yield from _in_text(node.value, node.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _in_node(entry, prefix, fields)
    elif isinstance(node, yaml.MappingNode):
        target = next((str(v.value) for k, v in node.value if k.value == "_target_"), "")
        for key, value in node.value:
            place = f"{prefix}.{key.value}".strip(".")
            if (found := _old_key(place, target, fields)) is not None:
                yield Finding(key.start_mark.line + 1, *found)
            yield from _in_node(value, place, fields)


def _old_key(
    place: str, target: str, fields: Mapping[str, frozenset[str]]
) -> tuple[str, str] | None:
    """Return the old and the new name of a key, or None if the key is not an old name.

    Args:
        place: Dotted key.
        target: Path of the class that the node of the key names. Empty if it names
            none.
        fields: Names that the user's classes define, by class.
    """
    name = place.rpartition(".")[2]
    if name in fields.get(target.rpartition(".")[2], ()):
        return None
    for old, key in renames().keys.items():
        if place == old or place.endswith(f".{old}"):
            kind = renames().new_path(target) or target
            is_other = kind.startswith("fedexp.") and kind not in _kinds(old, key.options)
            return None if key.options and is_other else (old, key.new)
    return None


@functools.cache
def _kinds(key: str, options: tuple[str, ...]) -> frozenset[str]:
    """Return the classes of the built-in `options` in the group that contains `key`."""
    group = conf_dir() / key.partition(".")[0]
    return frozenset(read_yaml(group / f"{option}.yaml")["_target_"] for option in options)


def _in_text(text: str, line: int) -> Iterator[Finding]:
    """Yield old paths and old keys in a value, an override or an interpolation."""
    for found in _PATH.finditer(text):
        new = renames().new_path(found[0])
        if new is not None:
            yield Finding(line + text[: found.start()].count("\n"), found[0], new)
    for old, key in renames().keys.items():
        for place in re.finditer(rf"(?<![\w.]){re.escape(old)}(?![\w.])", text):
            yield Finding(line + text[: place.start()].count("\n"), old, key.new)


class PythonFiles:
    """The Python files of a user, whose classes may derive from each other's classes.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._trees = {path: _parse(path) for path in paths}
        self._classes = {
            node.name: node
            for tree in self._trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        self._origins: dict[str, str] = {}
        for tree in self._trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        self._origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        self.fields = {name: frozenset(_defined(node)) for name, node in self._classes.items()}

    def findings(self, path: Path) -> Iterator[Finding]:
        """Yield the lines of a file that use an old name."""
        tree = self._trees[path]
        yield from _paths(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from _in_text(node.value, node.lineno)
            elif isinstance(node, ast.ClassDef):
                yield from self._in_class(node)
            elif isinstance(node, ast.FunctionDef):
                yield from _in_function(node)
            elif isinstance(node, ast.Call):
                yield from _in_call(node)

    def _in_class(self, node: ast.ClassDef) -> Iterator[Finding]:
        """Yield old members that a class defines or reads from `self`."""
        members: dict[str, str] = {}
        values: dict[str, Mapping[str, str]] = {}
        for kind in self._bases(node, set()):
            members |= renames().members_of(kind)
            values |= renames().values_of(kind)

        own = _defined(node)
        for name, statement in own.items():
            if name in members and members[name] not in own:
                yield Finding(statement.lineno, name, members[name])
            value = getattr(statement, "value", None)
            if name in values and isinstance(value, ast.Constant):
                new = values[name].get(str(value.value))
                if new is not None:
                    yield Finding(value.lineno, f"{name} = {value.value!r}", f"{name} = {new!r}")
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                old = inner.attr
                if inner.value.id == "self" and old in members and members[old] not in own:
                    yield Finding(inner.lineno, f"self.{old}", f"self.{members[old]}")

    def _bases(self, node: ast.ClassDef, seen: set[str]) -> Iterator[type]:
        """Yield the fedexp classes that a user's class derives from."""
        seen.add(node.name)
        for base in node.bases:
            name = ast.unparse(base)
            short = name.rpartition(".")[2]
            path = self._origins.get(short, name)
            if path.startswith("fedexp."):
                module, _, leaf = (renames().new_path(path) or path).rpartition(".")
                try:
                    kind = getattr(importlib.import_module(module), leaf, None)
                except ImportError:
                    continue
                if isinstance(kind, type):
                    yield kind
            elif short in self._classes and short not in seen:
                yield from self._bases(self._classes[short], seen)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(_read(path), str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"a module is not Python: {error.msg}", where=f"{path}:{error.lineno}"
        ) from None


def _defined(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the statements that define a class's methods and attributes, by name."""
    found: dict[str, ast.stmt] = {}
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = statement
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            found |= dict.fromkeys(names, statement)
    return found


def _paths(tree: ast.Module) -> Iterator[Finding]:
    """Yield old names that a module imports, and the later lines that use them."""
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
            # `walk` visits the longest chain of attributes before the chains inside it,
            # and the longest chain has the most specific name.
            inner |= {id(part) for part in ast.walk(node)}
            path = ast.unparse(node)
            if _PATH.fullmatch(path) and (new := renames().new_path(path)) is not None:
                yield Finding(node.lineno, path, new)


def _in_function(node: ast.FunctionDef) -> Iterator[Finding]:
    """Yield old members of arguments that fedexp passes, such as ``env.budget``."""
    table = renames()
    renamed = {
        argument.arg: members
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for path, members in table.members.items()
        if members.argument is not None and _is_instance(argument, path, members.argument)
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            name = inner.value.id
            new = renamed[name].renamed.get(inner.attr) if name in renamed else None
            if new is not None:
                yield Finding(inner.lineno, f"{name}.{inner.attr}", f"{name}.{new}")
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            name = ast.unparse(inner.func.value)
            for keyword in inner.keywords if name in renamed else ():
                old = f"{inner.func.attr}.{keyword.arg}"
                new = renamed[name].renamed.get(old)
                if new is not None:
                    yield Finding(keyword.lineno, f"{keyword.arg}=", f"{new.rpartition('.')[2]}=")


def _is_instance(argument: ast.arg, path: str, usual: str) -> bool:
    """Return whether an argument is an instance of the class at `path`.

    The annotation decides. An argument without an annotation must have the usual name.
    """
    if argument.annotation is None:
        return argument.arg == usual
    return (
        ast.unparse(argument.annotation).strip("'\"").rpartition(".")[2] == path.rpartition(".")[2]
    )


def _in_call(node: ast.Call) -> Iterator[Finding]:
    """Yield old keywords and old argument values in a call of a fedexp class.

    An example is ``Outcome(models, "model")``.
    """
    table = renames()
    name = ast.unparse(node.func).rpartition(".")[2]
    for path, members in table.members.items():
        for keyword in node.keywords if path.rpartition(".")[2] == name else ():
            new = members.renamed.get(str(keyword.arg))
            if new is not None:
                yield Finding(keyword.lineno, f"{keyword.arg}=", f"{new}=")
    for path, attributes in table.values.items():
        if path.rpartition(".")[2] != name:
            continue
        new_values = {old: new for values in attributes.values() for old, new in values.items()}
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            value = argument.value if isinstance(argument, ast.Constant) else None
            if isinstance(value, str) and value in new_values:
                yield Finding(argument.lineno, repr(value), repr(new_values[value]))
