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
from fedexp.core.trees import Tree, Trees
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
        number = _number(value)
        if number is None:
            what, got = "its value is not a number", _described(value)
            raise _unfit_metric(name, what, "a number", got, plugins)
        found[name] = number
    return found


def _number(value: object) -> int | float | None:
    """Return a metric's value as Python's number, or None if it is not a number."""
    if isinstance(value, Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    return value if isinstance(value, int | float) else None


def _unfit_metric(
    name: str, what: str, expected: str, got: str, plugins: Sequence[object]
) -> FedexpError:
    kinds = [type(plugin) for plugin in plugins]
    places = [place_of_hook(kind, ("update", "fuse", "step", "factor")) for kind in kinds]
    return FedexpError(
        f"the metric '{name}' of the server cannot be logged: {what}",
        where=", ".join(filter(None, places)) or ", ".join(kind.__name__ for kind in kinds),
        expected=expected,
        got=got,
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
        expected = f"a dict of {len(like)} tensors"
        raise _unfit(f"{result} is not a tree", expected, _described(tree), plugin, hooks)

    for name in [*like, *(name for name in tree if name not in like)]:
        expected, got = (
            _described(one[name]) if name in one else "no such tensor" for one in (like, tree)
        )
        fits = name in like and isinstance(tree.get(name), Tensor)
        if not fits or _kind(tree[name]) != _kind(like[name]):
            what = f"{result} does not fit the model at '{name}'"
            raise _unfit(what, expected, got, plugin, hooks)


def check_pair(given: object, plugin: object, hook: str, do: str) -> None:
    """Refuse a value that is not a tuple of two values.

    Args:
        given: The returned value.
        plugin: The plug-in that returned the value.
        hook: Name of the plug-in's method.
        do: Next step for the message.

    Raises:
        FedexpError: The value does not fit. The message has file and line of the
            method.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        got = f"{len(given)} values" if isinstance(given, tuple) else _described(given)
        raise _unfit(f"{hook} does not return a pair", "two values", got, plugin, (hook,), do)


def check_trees(given: object, result: str, plugin: object, hook: str) -> None:
    """Refuse a value that is not a dict of trees.

    Args:
        given: The returned value.
        result: Name of the returned value for messages.
        plugin: The plug-in that returned the value.
        hook: Name of the plug-in's method.

    Raises:
        FedexpError: The value does not fit. The message has file and line of the
            method.
    """

    def refuse(what: str, expected: str, got: str, do: str) -> NoReturn:
        raise _unfit(f"{result} {what}", expected, got, plugin, (hook,), do)

    if not isinstance(given, Mapping):
        expected = "a dict of trees, such as {'counts': {'n': tensor}}"
        refuse("is not a dict of trees", expected, _described(given), "return {} for no trees")
    for group, tree in given.items():
        if not isinstance(group, str) or "/" in group:
            refuse("has a tree with an unfit name", "text without '/'", repr(group), "rename it")
        if not isinstance(tree, dict):
            what = f"is not a dict of trees at '{group}'"
            refuse(what, "a dict of tensors", _described(tree), "add a level of names")
        for name, value in tree.items():
            if not isinstance(name, str):
                refuse(f"has an unfit name at '{group}'", "text", repr(name), "rename it")
            if not isinstance(value, Tensor):
                what = f"has no tensor at '{group}', '{name}'"
                refuse(what, "a tensor", _described(value), "convert it to a tensor")


def check_payload(payload: Trees, sums: Trees, client: int, trainer: object) -> None:
    """Refuse a client's payload that cannot enter the mean over clients.

    Args:
        payload: The payload, which `check_trees` accepts.
        sums: The sums of earlier clients' payloads, or the payload itself.
        client: The client.
        trainer: The trainer, which made the payload.

    Raises:
        FedexpError: A tensor is not a floating-point tensor, or its name or shape is
            not that of earlier clients.
    """
    given, earlier = (
        {
            f"'{group}', '{name}'": value
            for group, tree in one.items()
            for name, value in tree.items()
        }
        for one in (payload, sums)
    )
    for name in [*earlier, *(name for name in given if name not in earlier)]:
        expected, got = (
            _described(one[name]) if name in one else "no such tensor" for one in (earlier, given)
        )
        if expected != got:
            raise _unfit(
                f"the payload of client {client} differs from that of an earlier client at {name}",
                expected,
                got,
                trainer,
                ("finish",),
                "send tensors of the same names and shapes from all clients. A client that has "
                "nothing to send can send zeros",
            )
        if not given[name].is_floating_point():
            raise _unfit(
                f"the payload cannot be averaged at {name}",
                "a floating-point tensor",
                got,
                trainer,
                ("finish",),
                "convert it, for example with value.float()",
            )


def check_loss(loss: object, scalars: object, plugin: object) -> None:
    """Refuse a loss, or further values, that are not scalar tensors.

    Args:
        loss: The loss.
        scalars: The further values that were measured, by name.
        plugin: The trainer or the task whose method `loss` returned the values.

    Raises:
        FedexpError: A value is not a scalar tensor. The message has file and line of
            the method.
    """
    do = "return loss.mean(), or Measured(loss, scalars) with further scalars by name"
    if not isinstance(scalars, Mapping):
        what = "the scalars are not a dict"
        raise _unfit(what, "scalar tensors by name", _described(scalars), plugin, ("loss",), do)
    for name, value in {
        "the loss": loss,
        **{f"'{key}'": one for key, one in scalars.items()},
    }.items():
        if not isinstance(value, Tensor) or value.dim():
            expected = "a tensor of shape (), such as the mean over the batch"
            got = _described(value)
            raise _unfit(f"{name} is not a scalar", expected, got, plugin, ("loss",), do)


def check_totals(totals: object, task: object) -> None:
    """Refuse sums of a task's metrics that are not scalar tensors by name.

    Raises:
        FedexpError: A value does not fit. The message has file and line of the method.
    """
    hooks, expected = ("totals",), "a dict of tensors of shape ()"
    if not isinstance(totals, Mapping):
        what, do = "the sums are not a dict", "return one sum per name"
        raise _unfit(what, expected, _described(totals), task, hooks, do)
    for name, value in totals.items():
        if not isinstance(value, Tensor) or value.dim():
            what, do = f"the sum of '{name}' over a batch does not fit", "return value.sum()"
            raise _unfit(what, expected, _described(value), task, hooks, do)


def checked_task_metrics(metrics: object, names: Sequence[str], task: object) -> Metrics:
    """Return the metrics of a data set as Python's numbers.

    Args:
        metrics: The metrics. A value may be a tensor or a NumPy array with one number.
        names: Names of the metrics that are needed.
        task: The task, which made the metrics.

    Raises:
        FedexpError: A name is missing, or its value is not a number. The message has
            file and line of the method.
    """
    hooks, expected = ("metrics", "metric_names"), f"numbers for {', '.join(names)} (metric_names)"
    do = "return a number for every name in metric_names"
    if not isinstance(metrics, Mapping):
        what = "the task's metrics are not a dict"
        raise _unfit(what, expected, _described(metrics), task, hooks, do)
    found: Metrics = {}
    for name in names:
        number = _number(metrics.get(name))
        if number is None:
            what = f"the task's metric '{name}' is missing, or is not a number"
            got = _described(metrics[name]) if name in metrics else "no such metric"
            raise _unfit(what, expected, got, task, hooks, do)
        found[name] = number
    return found


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
            _described(shares),
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
    if not isinstance(outcome, Outcome):
        what, do = "the outcome is not an Outcome", "return Outcome((model,), 'global')"
        raise _unfit(what, "Outcome", _described(outcome), plugin, ("outcome",), do)
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
    if delivers == "global" and len(outcome.models) != 1:
        what, got = "the number of models does not fit", f"{len(outcome.models)} models"
        do = "return one model, or set delivers to 'ensemble' or 'local'"
        raise _unfit(what, "one global model", got, plugin, ("outcome",), do)
    for number, model in enumerate(outcome.models):
        result = "the server's model" if len(outcome.models) == 1 else f"model {number}"
        if not isinstance(model, Weights):
            what = f"{result} is not a model"
            raise _unfit(what, "Weights", _described(model), plugin, hooks)
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
    if isinstance(value, list | tuple) and all(isinstance(each, Real) for each in value):
        shown = ", ".join(map(str, value[:_FEW]))
        return f"[{shown}]" if len(value) <= _FEW else f"[{shown}, ...] ({len(value)} values)"
    return "None" if value is None else type(value).__name__


def _unfit(
    what: str,
    expected: str,
    got: str,
    plugin: object,
    hooks: Sequence[str],
    do: str = "return a tensor of this shape and type for every name of the model",
) -> FedexpError:
    kind = type(plugin)
    place = place_of_hook(kind, hooks) or place_of_class(kind)
    where = f"{place} ({kind.__name__})"
    return FedexpError(what, where=where, expected=expected, got=got, do=do)
