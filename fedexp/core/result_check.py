"""Checks of the tensors and metrics that plug-ins return.

PyTorch broadcasts shapes and promotes types without an error. Without the checks,
training could go on with tensors of a wrong shape or type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fedexp.core.errors import FedexpError
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.task import Metrics
from fedexp.core.trees import Tree
from fedexp.core.user_code import is_ours, place_of_class, place_of_hook
from fedexp.core.weights import ModelSpec, Weights, by_spec

_CPU = torch.device("cpu")
_FEW = 8  # a message contains at most this many values of a list
# Names and beginnings of names of the values that fedexp itself measures in a step.
_MEASURED = ("round", "step", "local_steps")
_MEASURED_IN = ("train/", "bytes/", "test/", "val/")


def checked_metrics(metrics: Mapping[str, object], plugins: Sequence[object]) -> Metrics:
    """Return the metrics of the server as Python's numbers.

    Args:
        metrics: The metrics. A value may be a tensor or a NumPy array with one number.
        plugins: The aggregator and the server optimizer, which made the metrics.

    Raises:
        FedexpError: A value is not a number, or a name is that of a value that fedexp
            measures.
    """
    found: Metrics = {}
    for name, value in metrics.items():
        if name in _MEASURED or str(name).startswith(_MEASURED_IN):
            raise _unfit_metric(
                name, "fedexp measures a value of this name", "another name", name, plugins
            )
        number = (
            value.item()
            if isinstance(value, Tensor | np.generic | np.ndarray) and (math.prod(value.shape) == 1)
            else value
        )
        if not isinstance(number, int | float):
            raise _unfit_metric(name, "its value is not a number", "a number", value, plugins)
        found[name] = number
    return found


def _unfit_metric(
    name: str, what: str, expected: str, got: object, plugins: Sequence[object]
) -> FedexpError:
    kinds = [type(plugin) for plugin in plugins]
    places = [place_of_hook(kind, ("update", "fuse", "step", "factor")) for kind in kinds]
    return FedexpError(
        f"the metric '{name}' of the server cannot be logged: {what}",
        where=", ".join(filter(None, places)) or ", ".join(kind.__name__ for kind in kinds),
        expected=expected,
        got=_described(got),
    )


def check_tree(tree: object, like: Tree, result: str, plugin: object, hooks: Sequence[str]) -> None:
    """Refuse named tensors whose names, shapes or types differ from those of a model.

    Args:
        tree: The returned value.
        like: Tensors of the model.
        result: Name of the returned value for messages.
        plugin: The plug-in that returned the value.
        hooks: Names of the plug-in's methods that may have computed the value, the most
            likely first.

    Raises:
        FedexpError: The tensors do not fit. The message has file and line of the
            method.
    """
    if not isinstance(tree, dict):
        raise _unfit(
            f"{result} is not a tree", f"a dict of {len(like)} tensors", tree, plugin, hooks
        )

    for name in [*like, *(name for name in tree if name not in like)]:
        expected, got = like.get(name), tree.get(name)
        if not isinstance(got, Tensor) or expected is None or _kind(got) != _kind(expected):
            what = f"{result} does not fit the model at '{name}'"
            raise _unfit(what, _described(expected), got, plugin, hooks)


def check_trees(given: object, result: str, plugin: object, hook: str, floating: bool) -> None:
    """Refuse a value that is not a dict of trees.

    Args:
        given: The returned value.
        result: Name of the returned value for messages.
        plugin: The plug-in that returned the value.
        hook: Name of the plug-in's method.
        floating: Whether the tensors must be floating-point tensors.

    Raises:
        FedexpError: The value does not fit. The message has file and line of the
            method.
    """
    expected = "a dict of trees, such as {'counts': {'n': tensor}}"

    def refuse(what: str, expected: str, got: object, do: str) -> NoReturn:
        raise _unfit(f"{result} {what}", expected, got, plugin, (hook,), do)

    if not isinstance(given, Mapping):
        refuse("is not a dict of trees", expected, given, "return {} for no trees")
    for group, tree in given.items():
        if not isinstance(group, str) or "/" in group:
            refuse("has a tree with an unfit name", "text without '/'", repr(group), "rename it")
        if not isinstance(tree, dict):
            refuse(f"is not a dict of trees at '{group}'", expected, tree, "add a level of names")
        for name, value in tree.items():
            where = f"at '{group}', '{name}'"
            if not isinstance(name, str):
                refuse(f"has an unfit name at '{group}'", "text", repr(name), "rename it")
            if not isinstance(value, Tensor):
                refuse(f"has no tensor {where}", "a tensor", value, "convert it to a tensor")
            if floating and not value.is_floating_point():
                refuse(
                    f"has an unfit tensor {where}",
                    "a floating-point tensor, because the server averages it",
                    value,
                    "convert it, for example with value.float()",
                )


def check_loss(loss: object, scalars: Mapping[str, object], plugin: object) -> None:
    """Refuse a loss, or further values, that are not scalar tensors.

    Args:
        loss: The loss that a trainer's `loss` returned.
        scalars: The further values that it measured, by name.
        plugin: The trainer.

    Raises:
        FedexpError: A value is not a scalar tensor. The message has file and line of
            the method.
    """
    values = {"the loss": loss, **{f"'{name}'": value for name, value in scalars.items()}}
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            raise _unfit(
                f"{name} is not a scalar",
                "a tensor of shape (), such as the mean over the batch",
                value,
                plugin,
                ("loss",),
                "return loss.mean(), or Measured(loss, scalars) with further scalars",
            )


def check_totals(totals: object, task: object) -> None:
    """Refuse sums of a task's metrics that are not scalar tensors by name.

    Raises:
        FedexpError: A value does not fit. The message has file and line of the method.
    """
    values = totals.items() if isinstance(totals, Mapping) else [("", totals)]
    for name, value in values:
        if not isinstance(value, Tensor) or value.dim():
            raise _unfit(
                f"the sum of '{name}' over a batch does not fit" if name else "the sums do not fit",
                "a dict of tensors of shape ()",
                value,
                task,
                ("totals",),
                "return value.sum() for every name",
            )


def check_task_metrics(metrics: object, names: Sequence[str], task: object) -> None:
    """Refuse metrics of a data set that lack a name or are not numbers.

    Raises:
        FedexpError: The metrics do not fit. The message has file and line of the
            method.
    """
    for name in names:
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        if not isinstance(value, Real):
            raise _unfit(
                f"the task's metric '{name}' is missing, or is not a number",
                f"numbers for {', '.join(names)} (metric_names)",
                value,
                task,
                ("metrics", "metric_names"),
                "return a number for every name in metric_names",
            )


def check_shares(shares: object, count: int, plugin: object, hooks: Sequence[str]) -> None:
    """Refuse weights of the merged update that are not one number per client.

    Args:
        shares: The returned value.
        count: Number of clients whose updates were merged.
        plugin: The plug-in that returned the value.
        hooks: Names of the plug-in's methods that may have computed the value, the most
            likely first.

    Raises:
        FedexpError: The numbers do not fit, or their sum is not positive. The message
            has file and line of the method.
    """
    # An empty list is refused below, because its sum is not positive.
    numbers = [*shares] if isinstance(shares, Sequence) and len(shares) == count else []
    finite = all(isinstance(each, Real) and math.isfinite(each) for each in numbers)
    if not finite or sum(numbers) <= 0:
        raise _unfit(
            "the weights of the merged update do not fit the clients",
            f"a list of {count} finite numbers with a positive sum",
            shares,
            plugin,
            hooks,
            "return finite weights with a positive sum: one per client from `shares`, "
            "or one from `weight`",
        )


def check_outcome(
    outcome: Outcome,
    delivers: Delivers,
    dtype: torch.dtype,
    plugin: object,
    hooks: Sequence[str],
) -> None:
    """Refuse an outcome of another kind, and models that do not fit their networks.

    Args:
        outcome: The models that the method delivers.
        delivers: The kind of outcome that the plug-in declares.
        dtype: Type of floating-point tensors.
        plugin: The plug-in that computed the models.
        hooks: Names of the plug-in's methods that may have computed the models, the
            most likely first.

    Raises:
        FedexpError: The outcome does not fit. The message has file and line of the
            method.
    """
    if outcome.kind != delivers:
        raise _unfit(
            "the outcome is of another kind than the class declares",
            f"kind '{delivers}', the value of the class attribute `delivers`",
            repr(outcome.kind),
            plugin,
            ("outcome",),
            f'set delivers = "{outcome.kind}" in the class, or return another kind',
        )
    if outcome.clients is not None and len(outcome.clients) != len(outcome.models):
        raise _unfit(
            "the clients of the outcome do not fit its models",
            f"{len(outcome.models)} clients, one per model",
            f"{len(outcome.clients)} clients",
            plugin,
            ("outcome",),
            "return one client per model",
        )
    for number, model in enumerate(outcome.models):
        result = "the server's model" if len(outcome.models) == 1 else f"model {number}"
        if not isinstance(model, Weights):
            raise _unfit(f"{result} is not a model", "Weights", model, plugin, hooks)
        params, buffers = _layout(model.spec, dtype)
        check_tree(model.params, params, result, plugin, hooks)
        check_tree(model.buffers, buffers, f"{result}, in its buffers,", plugin, hooks)


@by_spec
def _layout(spec: ModelSpec, dtype: torch.dtype) -> tuple[Tree, Tree]:
    """Return tensors without memory that have the shapes and types of a network."""
    fresh = Weights.init(spec, 0, _CPU, dtype)
    return (
        {name: value.to("meta") for name, value in fresh.params.items()},
        {name: value.to("meta") for name, value in fresh.buffers.items()},
    )


def is_users(plugin: object) -> bool:
    """Return whether a user, not fedexp, defines the class of a plug-in."""
    return not is_ours(type(plugin).__module__)


def _kind(value: Tensor) -> tuple[torch.Size, torch.dtype]:
    return value.shape, value.dtype


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, Real) for each in value):
        shown = ", ".join(map(str, value[:_FEW]))
        return f"[{shown}]" if len(value) <= _FEW else f"[{shown}, ...] ({len(value)} values)"
    return "no such tensor" if value is None else type(value).__name__


def _unfit(
    what: str,
    expected: str,
    got: object,
    plugin: object,
    hooks: Sequence[str],
    do: str = "return a tensor of this shape and type for every name of the model",
) -> FedexpError:
    kind = type(plugin)
    place = place_of_hook(kind, hooks) or place_of_class(kind)
    return FedexpError(
        what,
        where=f"{place} ({kind.__name__})",
        expected=expected,
        got=_described(got),
        do=do,
    )
