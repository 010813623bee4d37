"""Names of version 0.1 that changed in version 0.2, and the errors for old names.

The file `renames.yaml` contains the table of names. Old names do not work any more. A
config or a module that uses an old name is refused, and the error message states the
new name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from fedexp.core.errors import ConfigError

T = TypeVar("T")

FILE = Path(__file__).with_name("renames.yaml")
HOW = (
    "'fedexp-runs check-conf ./conf' lists the lines with old paths and keys, "
    "docs/0.1-to-0.2.md every name"
)


class RenamedError(ConfigError):
    """A config or a module that uses a name of an earlier version."""


class Finding(NamedTuple):
    """A line that uses an old name.

    Args:
        line: Number of the line, from 1.
        old: The old name.
        new: The new name.
    """

    line: int
    old: str
    new: str


@dataclass(frozen=True)
class RenamedKey:
    """A renamed config key.

    Args:
        new: The new key.
        options: Options of the key's config group that have this key. Empty if the key
            is not in a config group.
    """

    new: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Renames:
    """The table of old and new names.

    Args:
        modules: New name of each renamed module, by its old name.
        names: New dotted paths by old dotted paths, for classes and functions whose
            path does not follow from `modules`.
        members: Renamed hooks, fields and properties. ``members[CLASS][OLD]`` is the
            new name of OLD, and CLASS is the new path of the class. If OLD has the form
            ``method.argument``, it is an argument of a method.
        values: Renamed values of class attributes. ``values[CLASS][ATTRIBUTE][OLD]`` is
            the new value, and CLASS is the new path of the class.
        keys: Renamed config keys by the old dotted key.
    """

    modules: Mapping[str, str]
    names: Mapping[str, str]
    members: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Mapping[str, Mapping[str, str]]]
    keys: Mapping[str, RenamedKey]

    def new_path(self, path: str) -> str | None:
        """Return the new path of a renamed module, class or attribute, or None."""
        for known in (self.names, self.modules):
            if path in known:
                return known[path]

        parent, _, rest = path.rpartition(".")
        if not parent or self._is_package(parent):
            return None
        new = self.new_path(parent)
        return None if new is None else f"{new}.{rest}"

    def _is_package(self, path: str) -> bool:
        """Return whether `path` was a package that contained renamed modules."""
        return any(module.startswith(f"{path}.") for module in self.modules)

    def members_of(self, kind: type) -> dict[str, str]:
        """Return the new names of members of a class and its bases, by old name."""
        return _of_class(self.members, kind)

    def values_of(self, kind: type) -> dict[str, Mapping[str, str]]:
        """Return the renamed values of a class and of its bases, by attribute."""
        return _of_class(self.values, kind)


def _of_class(table: Mapping[str, Mapping[str, T]], kind: type) -> dict[str, T]:
    """Merge the table's entries for a class and its bases.

    Entries of a derived class take precedence.
    """
    paths = (f"{base.__module__}.{base.__qualname__}" for base in reversed(kind.__mro__))
    return {name: new for path in paths for name, new in table.get(path, {}).items()}


@functools.cache
def renames() -> Renames:
    """Read the table of renamed names from `renames.yaml`."""
    node: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return Renames(
        modules=node["modules"],
        names=node["names"],
        members=node["members"],
        values=node["values"],
        keys={
            old: RenamedKey(key["new"], tuple(key.get("options", ())))
            for old, key in node["keys"].items()
        },
    )


def renamed_path(path: str, where: str) -> RenamedError | None:
    """Return the error for a dotted path of an earlier version, or None.

    Args:
        path: Value of a ``_target_``.
        where: Config key that names the path.
    """
    new = renames().new_path(path)
    if new is None:
        return None
    return RenamedError(
        f"'{path}' has another name since version 0.2",
        where=where,
        expected=new,
        got=path,
        do=f"write {new}: {HOW}",
    )


def renamed_key(key: str, where: str | None = None) -> RenamedError | None:
    """Return the error for a config key of an earlier version, or None.

    Args:
        key: Dotted key.
        where: Override that sets the key, for the message. If None, the message
            contains the key itself.
    """
    found = renames().keys.get(key)
    if found is None:
        return None
    return RenamedError(
        f"unknown key '{key}': it has another name since version 0.2",
        where=where or key,
        expected=found.new,
        got=key,
        do=f"write {found.new}: {HOW}",
    )


def renamed_import(module: str, place: str | None, where: str) -> RenamedError | None:
    """Return the error for a failed import of a name of an earlier version, or None.

    Args:
        module: The module that cannot be imported.
        place: ``file:line`` of the failed import.
        where: Config key that names the module.
    """
    file, _, line = (place or "").rpartition(":")
    if not file.endswith(".py"):
        return None
    statement = next(
        (
            node
            for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            and node.lineno <= int(line) <= (node.end_lineno or node.lineno)
        ),
        None,
    )
    found = [] if statement is None else [*old_imports(statement)]
    if statement is None or not found:
        return None

    new = ", ".join(finding.new for finding in found)
    return RenamedError(
        f"module '{module}' imports {', '.join(finding.old for finding in found)}: "
        "it has another name since version 0.2",
        where=f"{place} ({where})",
        expected=new,
        got=ast.unparse(statement),
        do=f"import {new}: {HOW}",
    )


def old_imports(statement: ast.Import | ast.ImportFrom) -> Iterator[Finding]:
    """Yield the old names that an import statement imports."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            old, new = alias.name, renames().new_path(alias.name)
        elif statement.level or statement.module is None:
            continue
        elif alias.name == "*":
            old, new = statement.module, renames().new_path(statement.module)
        else:
            old = f"{statement.module}.{alias.name}"
            new = renames().new_path(old)
        if new is not None:
            yield Finding(alias.lineno, old, new)


def attribute_hint(error: AttributeError) -> str | None:
    """Return the new name of the attribute that `error` reports as missing, or None.

    It is None if the attribute was not renamed.
    """
    if not isinstance(error.name, str) or error.obj is None:
        return None
    return renames().members_of(type(error.obj)).get(error.name)
