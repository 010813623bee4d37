"""Pages of the classes and functions that a user's code calls or derives from.

They are read from the sources without any import, so a page takes milliseconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fedexp.site.page import Page
from fedexp.site.prose import code, docstring, fenced, table

PACKAGE = Path(__file__).resolve().parents[1]

# Modules with the interfaces of plug-ins, and with the arguments of their hooks.
MODULES = (
    "fedexp.api",
    "fedexp.core.trainer",
    "fedexp.core.aggregator",
    "fedexp.methods.bases.averaging",
    "fedexp.methods.fedavg",
    "fedexp.methods.bases.fusion",
    "fedexp.methods.bases.server_trained",
    "fedexp.methods.bases.distilling",
    "fedexp.methods.bases.data_free",
    "fedexp.methods.bases.replay",
    "fedexp.core.server_optimizer",
    "fedexp.core.task",
    "fedexp.core.probe",
    "fedexp.core.needs",
    "fedexp.core.env",
    "fedexp.core.jobs",
    "fedexp.core.outcome",
    "fedexp.core.weights",
    "fedexp.core.net",
    "fedexp.core.layers",
    "fedexp.core.trees",
    "fedexp.core.seeds",
    "fedexp.core.dropout",
    "fedexp.core.data",
    "fedexp.core.errors",
    "fedexp.data.dataset",
    "fedexp.data.partition",
    "fedexp.server_training.optimizers",
    "fedexp.server_training.batches",
    "fedexp.server_training.forward",
    "fedexp.server_training.gradients",
    "fedexp.matching.structure",
    "fedexp.distillation.ensemble",
)
# Decorators that a page shows.
_SHOWN = ("property", "cached_property", "classmethod", "staticmethod", "abstractmethod")


def page_of(module: str) -> str:
    """Return the path of a module's page, relative to the site's root."""
    return f"api/{module.removeprefix('fedexp.')}.md"


def pages() -> list[Page]:
    """Return one page per module, after a page that lists them."""
    sources = {
        module: PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py") for module in MODULES
    }
    trees = {module: ast.parse(path.read_text()) for module, path in sources.items()}

    links = {module: Path(page_of(module)).name for module in MODULES}
    for module, tree in trees.items():
        for node in _public(tree):
            links.setdefault(node.name, f"{links[module]}#{node.name}")
            links[f"{module}.{node.name}"] = f"{links[module]}#{node.name}"

    rows = [
        [
            f"[{code(module)}]({links[module]})",
            # The first paragraph.
            docstring((ast.get_docstring(tree) or "").partition("\n\n")[0], links),
            _names(tree, links[module]),
        ]
        for module, tree in trees.items()
    ]

    about = docstring(
        ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text())) or "", links
    )
    index = Page(
        "api/index.md",
        "API",
        f"# API\n\n{about}\n\n{table(['module', 'contents', 'names'], rows)}\n",
    )
    return [index, *(_page(module, tree, links) for module, tree in trees.items())]


def _public(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]


def _names(tree: ast.Module, page: str) -> str:
    return ", ".join(f"[{code(node.name)}]({page}#{node.name})" for node in _public(tree))


def _page(module: str, tree: ast.Module, links: dict[str, str]) -> Page:
    parts = [f"# {module}", docstring(ast.get_docstring(tree) or "", links)]
    for node in _public(tree):
        parts += (
            _class(node, links)
            if isinstance(node, ast.ClassDef)
            else _function(node, node.name, "##", links)
        )
    return Page(
        page_of(module),
        module.removeprefix("fedexp."),
        "\n\n".join(part for part in parts if part) + "\n",
    )


def _class(node: ast.ClassDef, links: dict[str, str]) -> Iterator[str]:
    """Yield the bases, the fields with their defaults, and the methods of a class.

    The methods are all public methods, and the special methods with a docstring.
    """
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    fields = [
        ast.unparse(item)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and not _hidden(item)
    ]

    yield f"## {node.name} {{#{node.name}}}"
    yield fenced(
        "\n".join([f"class {node.name}{bases}:", *(f"    {line}" for line in fields or ["..."])]),
        "python",
    )
    yield docstring(ast.get_docstring(node) or "", links)

    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not _hidden(item):
            yield from _function(item, f"{node.name}.{item.name}", "###", links)


def _hidden(item: ast.AnnAssign | ast.FunctionDef) -> bool:
    """Return whether an item is private, or a special method without a docstring."""
    name = item.name if isinstance(item, ast.FunctionDef) else ast.unparse(item.target)
    special = name.startswith("__") and not (
        isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
    )
    return special or (name.startswith("_") and not name.startswith("__"))


def _function(node: ast.FunctionDef, name: str, level: str, links: dict[str, str]) -> Iterator[str]:
    marks = [f"@{mark}" for mark in map(ast.unparse, node.decorator_list) if mark in _SHOWN]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield f"{level} {name} {{#{name}}}"
    yield fenced(
        "\n".join([*marks, f"def {node.name}({ast.unparse(node.args)}){returns}"]), "python"
    )
    yield docstring(ast.get_docstring(node) or "", links)
