"""One page per public module, which mkdocstrings fills with the docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

from fedexp.site.markdown import code, escaped, table
from fedexp.site.page import Page

_PACKAGE = Path(__file__).resolve().parents[1]

# Modules that define the interfaces of plug-ins, and modules that define the types of
# the arguments which these interfaces receive.
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


def page_of(module: str) -> str:
    """Return the path of a module's page, relative to the site's root."""
    return f"reference/api/{module}.md"


def pages() -> list[Page]:
    """Return a page that lists the modules, then one page per module."""
    rows = [[f"[{code(module)}]({module}.md)", escaped(_summary(module))] for module in MODULES]
    index = (
        "# API\n\n"
        "These modules contain what a user's code calls or derives from. `import fedexp` has the "
        f"functions of [`fedexp.api`](fedexp.api.md).\n\n{table(['module', 'contents'], rows)}\n"
    )
    return [
        Page("reference/api/index.md", "API", index),
        *(
            Page(page_of(module), module.removeprefix("fedexp."), f"::: {module}\n")
            for module in MODULES
        ),
    ]


def _summary(module: str) -> str:
    source = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())
