"""Tests that the labels from which seeds are computed do not change.

A label is a string literal that reaches `seed_of` or a noise function, directly or
through functions that pass it on. Names of modules and functions are not listed, so
code can move.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fedexp
import fedexp.methods
from fedexp.core.probe import Probe

# Number of uses in the package by label. In an f-string, {} stands for each value.
LABELS = {
    "augment/crop": 1,
    "augment/flip": 1,
    "augment/offset": 1,
    "augmentation": 1,
    "centres": 1,
    "check": 2,
    "choice": 1,
    "client": 1,
    "cvae/z": 1,
    "directions": 1,
    "distillation": 4,
    "drawn": 1,
    "drawn classes": 1,
    "drawn models": 1,
    "dropout": 1,
    "feature skew": 1,
    "features": 1,
    "folding": 1,
    "generator": 3,
    "graduated assignment": 1,
    "groups": 1,
    "head": 1,
    "held out": 1,
    "init": 2,
    "labels": 1,
    "latent codes": 1,
    "layers": 1,
    "local epochs": 1,
    "loss": 1,
    "ma_echo": 1,
    "models": 1,
    "noise": 4,
    "order": 3,
    "own": 1,
    "pictures": 2,
    "pixels": 1,
    "probe": 1,
    "proxy": 1,
    "proxy noise": 1,
    "restart": 1,
    "sample": 1,
    "server": 4,
    "shapes": 1,
    "shapes_masks": 2,
    "stacked": 1,
    "start": 1,
    "statistics": 2,
    "structure": 2,
    "student": 1,
    "student noise": 1,
    "synthesis": 4,
    "synthetic": 2,
    "test": 2,
    "train": 2,
    "val": 1,
    "values": 1,
    "visiting order": 1,
    "weight matching": 1,
    "weights": 1,
    "z": 1,
    "{} features": 1,
}
PROBES = ["class_counts", "projections"]

# Parameters that take labels, by function, with their position in a call. The name "*"
# stands for all arguments from that position on. The collector finds functions that
# pass their own parameters on to these.
SINKS = {("seed_of", "*"): 0, ("noise", "name"): 0}
KEYWORD_ONLY = 1_000_000

Function = ast.FunctionDef | ast.Lambda
Sinks = dict[tuple[str, str], int]
Scopes = tuple[ast.AST, ...]


class Call(NamedTuple):
    """A call in the package.

    Args:
        node: Syntax tree of the call.
        scopes: Module and functions around the call, innermost last.
    """

    node: ast.Call
    scopes: Scopes

    @property
    def name(self) -> str:
        """Return the name of the called function without the object in front of it."""
        function = self.node.func
        return getattr(function, "attr", None) or getattr(function, "id", "")


def calls_in(node: ast.AST, scopes: Scopes = ()) -> Iterator[Call]:
    """Yield the calls in a syntax tree."""
    if isinstance(node, ast.Call):
        yield Call(node, scopes)

    if isinstance(node, Function | ast.Module):
        scopes = (*scopes, node)
    for child in ast.iter_child_nodes(node):
        yield from calls_in(child, scopes)


class Collector:
    """A search for labels, from `SINKS` backwards through variables and parameters.

    Attributes:
        labels: Labels found so far, by their nodes.
        sinks: Parameters that take labels, found so far.
    """

    def __init__(self, calls: list[Call]) -> None:
        self.labels: dict[ast.expr, str] = {}
        self.sinks: Sinks = dict(SINKS)
        self._seen: set[ast.AST] = set()

        known: Sinks = {}
        while known != self.sinks:
            known = dict(self.sinks)
            for call in calls:
                for argument in label_arguments(call, known):
                    self._follow(argument, call.scopes)

    def _follow(self, node: ast.AST, scopes: Scopes) -> None:
        if node in self._seen:
            return
        self._seen.add(node)

        match node:
            case ast.Constant(value=str()):
                self.labels[node] = node.value
            case ast.JoinedStr():
                parts = (part.value for part in node.values)
                self.labels[node] = "".join(
                    part if isinstance(part, str) else "{}" for part in parts
                )
                for part in node.values:
                    if isinstance(part, ast.FormattedValue):
                        self._follow(part.value, scopes)
            case ast.IfExp():
                self._follow(node.body, scopes)
                self._follow(node.orelse, scopes)
            case ast.Starred() | ast.Tuple() | ast.List() | ast.BinOp() | ast.BoolOp():
                for child in ast.iter_child_nodes(node):
                    self._follow(child, scopes)
            case ast.Name():
                self._follow_variable(node.id, scopes)

    def _follow_variable(self, name: str, scopes: Scopes) -> None:
        """Follow the values of a variable in the innermost scope that defines it."""
        while scopes:
            scope = scopes[-1]
            values = assigned(scope, name)

            if isinstance(scope, Function) and name in (own := parameters(scope)):
                position, annotation, default = own[name]
                if isinstance(scope, ast.FunctionDef) and annotation in (
                    "",
                    "str",
                    "Any",
                    "object",
                ):
                    is_vararg = scope.args.vararg is not None and scope.args.vararg.arg == name
                    self.sinks[scope.name, "*" if is_vararg else name] = position
                    values += [default] if default is not None else []

                for value in values:
                    self._follow(value, scopes)
                return

            if values:
                for value in values:
                    self._follow(value, scopes)
                return
            scopes = scopes[:-1]


def label_arguments(call: Call, sinks: Sinks) -> Iterator[ast.expr]:
    """Yield the arguments of `call` that are labels."""
    for (function, parameter), position in sinks.items():
        if function == call.name:
            last = None if parameter == "*" else position + 1
            yield from call.node.args[position:last]
            yield from (keyword.value for keyword in call.node.keywords if keyword.arg == parameter)


def parameters(function: Function) -> dict[str, tuple[int, str, ast.expr | None]]:
    """Return each parameter's position, annotation and default.

    The position does not count `self` or `cls`.
    """
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults

    found = [
        (place - bound, *pair) for place, pair in enumerate(zip(positional, defaults, strict=True))
    ]
    found += [
        (KEYWORD_ONLY, *pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.vararg is not None:
        found.append((len(positional) - bound, given.vararg, None))

    return {
        arg.arg: (place, ast.unparse(arg.annotation) if arg.annotation else "", default)
        for place, arg, default in found
    }


def assigned(scope: ast.AST, name: str) -> list[ast.expr]:
    """Return the values that a function, or a module, assigns to a variable."""
    values: list[ast.expr] = []
    for node in scope.body if isinstance(scope, ast.Module) else ast.walk(scope):
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                targets = [target]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case _:
                continue

        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            values.append(value)
    return values


def test_seed_labels_match_the_committed_list() -> None:
    files = sorted(Path(fedexp.__file__).parent.rglob("*.py"))
    calls = [call for file in files for call in calls_in(ast.parse(file.read_text()))]

    found = Counter(Collector(calls).labels.values())

    changed = {
        label: f"{LABELS.get(label, 0)} uses listed, {found[label]} found"
        for label in sorted({*LABELS, *found})
        if LABELS.get(label, 0) != found[label]
    }
    assert not changed, (
        f"Seed labels are data: {changed}. A label that was renamed or removed changes the random "
        "numbers of its stream, so restore it. List a new label in LABELS. If uses were merged, "
        "correct their number. If seed_of or noise has another name, correct SINKS."
    )


def test_probe_names_match_the_committed_list() -> None:
    """Each probe has a random stream of its name."""
    for module in pkgutil.walk_packages(fedexp.methods.__path__, "fedexp.methods."):
        importlib.import_module(module.name)

    found = sorted(
        probe.name for probe in Probe.__subclasses__() if probe.__module__.startswith("fedexp.")
    )

    assert found == PROBES, "Probe names are data: a renamed probe draws other random numbers."
