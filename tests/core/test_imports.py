"""The tree keeps its shape: what may import what."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imports() -> dict[str, set[str]]:
    """Modules of the package by name, each with those that it imports anywhere, under TYPE_CHECKING and in functions too."""
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "fedexp").rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                graph[name] |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & files.keys()
    return graph


def test_no_circle_anywhere() -> None:
    graph = imports()
    waiting = {name: set(uses) - {name} for name, uses in graph.items()}
    while free := [name for name, uses in waiting.items() if not uses]:
        for name in free:
            del waiting[name]
        for uses in waiting.values():
            uses.difference_update(free)
    assert not waiting, sorted(waiting)


def test_core_imports_nothing_of_the_rest_and_nothing_imports_the_commands() -> None:
    for name, uses in imports().items():
        if name.startswith("fedexp.core"):
            assert all(used.startswith("fedexp.core") for used in uses), name
        if not name.startswith("fedexp.commands") and name != "fedexp.__main__":
            assert not any(used.startswith("fedexp.commands") for used in uses), name
