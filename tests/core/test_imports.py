"""Tests of the rules for imports between packages."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imports() -> dict[str, set[str]]:
    """Return the imports of each module of the package.

    Imports under TYPE_CHECKING and in functions are included.
    """
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts): p
        for p in (ROOT / "fedexp").rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                used = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            graph[name] |= used & files.keys()
    return graph


def test_imports_have_no_cycle() -> None:
    graph = imports()
    waiting = {name: set(uses) - {name} for name, uses in graph.items()}
    while free := [name for name, uses in waiting.items() if not uses]:
        for name in free:
            del waiting[name]
        for uses in waiting.values():
            uses.difference_update(free)
    assert not waiting, sorted(waiting)


# Apart from itself, a package may import only from packages above it in this list.
LAYERS = (
    {"core"},
    {"matching", "server_training", "storage", "tasks", "tracking"},
    {"config", "data", "models", "runtime"},
    {"distillation", "evaluation"},
    {"engines", "methods"},
    {"running"},
    {"tuning"},
    {"tables"},
    {"analysis"},
    {"api", "site"},
    {"commands"},
)


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_packages_import_only_from_lower_layers() -> None:
    level = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    for name, uses in imports().items():
        if name in ("fedexp.__init__", "fedexp.__main__"):
            continue
        package = package_of(name)
        for used in map(package_of, uses):
            assert used == package or level[used] < level[package], f"{name} imports {used}"
