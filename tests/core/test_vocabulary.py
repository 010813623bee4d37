"""Tests that identifiers use standard words instead of private ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fedexp

# Words that this project once used in a private sense. Examples are "told" for an error
# message, "standing" for a status, "parcel" for a batch and "settle" for the choice of
# an engine.
PRIVATE = set(
    [
        "adopt",
        "company",
        "crew",
        "gather",
        "gathered",
        "glimpse",
        "glimpsed",
        "guilty",
        "keep",
        "kept",
        "litter",
        "looks",
        "memo",
        "nursery",
        "parcel",
        "passing",
        "recall",
        "recalled",
        "retain",
        "said",
        "settle",
        "settled",
        "standing",
        "told",
        "trial",
        "untold",
    ]
)
# Identifiers that may contain such a word, each with the reason.
EXCEPTIONS = {
    "keep": "the mask of dropout, an option of samples and of rows",
    "keep_bank": "a config key of the methods with a bank of images",
    "keep_data": "an argument of save_models",
    "keep_files": "a verb with its object",
    "keep_freed_memory": "a verb with its object",
    "keep_only": "the name of the style guide",
    "memo": "the config key of the client cache, which stored configs contain",
    "trial": "Optuna's word for a point of a study",
    "TrialRow": "Optuna's word for a point of a study",
    "_KEPT": "bytes that stay with the process",
}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_identifiers_have_no_private_word() -> None:
    found = {
        name
        for path in Path(fedexp.__file__).parent.rglob("*.py")
        for name in names_in(ast.parse(path.read_text()))
        if words_of(name) & PRIVATE
    }
    assert found == EXCEPTIONS.keys()
