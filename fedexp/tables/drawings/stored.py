"""Functions that read models from a run's folder for drawings.

They read the final models of a run, and the models that it stored during the iterations
of a method that iterates on the server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from fedexp.core.errors import StorageError
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.storage.identity import targets
from fedexp.storage.model_folder import MODELS, ModelFolder, refuse_other_classes
from fedexp.storage.run_folder import trace_rows
from fedexp.tables.drawing import DrawnRun


def by_row(runs: Sequence[DrawnRun]) -> list[tuple[str, dict[str, DrawnRun]]]:
    """Group runs by row and seed. In each group, the key of a run is its column.

    Each group has a text that names its row and seed. If there is only one group, its
    text is empty.
    """
    groups: dict[str, dict[str, DrawnRun]] = {}
    for run in runs:
        named = [f"{key} {value}" for key, value in run.conditions.items()] + [f"seed {run.seed}"]
        groups.setdefault(", ".join(named), {})[run.method] = run
    return list(groups.items()) if len(groups) > 1 else [("", group) for group in groups.values()]


def delivered(run: DrawnRun) -> tuple[Weights, ...]:
    """Read the final models of a run, which are in ``model.safetensors``.

    Raises:
        StorageError: The file is absent or damaged. Also if it names a class that is
            in neither fedexp nor the run's config.
    """
    path = _there(run, run.folder / MODELS)
    stored = ModelFolder.open(run.folder)
    refuse_other_classes(
        [spec.arch for spec in stored.specs],
        targets(run.config.values),
        path,
        "start the run again with reuse=false",
    )
    return tuple(stored.weights(number) for number in range(len(stored.specs)))


def passed(
    run: DrawnRun, series: str, parameters: Sequence[str] | None = None
) -> dict[int, list[Tree]]:
    """Read the stored models of a series by iteration, in ascending order.

    The key ``trace.weights`` lists the iterations after which a run stores its models.
    The models of the last round with such a trace are read.

    Args:
        run: The run.
        series: Models of MA-Echo that are read: the fused model ``W``, the clients'
            models ``V``, or their mean ``mean_v``.
        parameters: Names of the wanted parameters. None: all parameters.
    """
    folder = run.folder / "trace"
    rounds = [int(path.stem) for path in folder.glob("*.safetensors")]
    path = _there(run, folder / f"{max(rounds, default=0)}.safetensors")
    found: dict[int, dict[int, Tree]] = {}
    with safetensors.safe_open(path, framework="pt") as file:
        keys = json.loads(file.metadata()["fedexp"])["order"]
        for key in keys:
            step, kind, number, name = key.split("/", 3)
            if kind == series and (parameters is None or name in parameters):
                found.setdefault(int(step), {}).setdefault(int(number), {})[name] = file.get_tensor(
                    key
                )

    if not found:
        raise StorageError(
            f"nothing is stored of series '{series}'"
            + (f" and {', '.join(parameters)}" if parameters else ""),
            where=str(path),
            expected=", ".join(sorted({" of ".join(key.split("/", 3)[:0:-2]) for key in keys})),
        )

    return {step: [found[step][number] for number in sorted(found[step])] for step in sorted(found)}


def evaluated(run: DrawnRun, step: int) -> dict[str, Any]:
    """Read the metrics after `step` iterations of the last round with a trace.

    The keys are ``<series>/<metric>``. The result is empty if nothing was measured.
    """
    rounds = sorted((run.folder / "trace").glob("*.json"), key=lambda path: int(path.stem))
    rows = trace_rows(rounds[-1]) if rounds else []
    return next((row for row in rows if row["iteration"] == step), {})


def vector_of(params: Tree) -> Tensor:
    """Return all n parameters of a model as one vector of shape (n,), float64."""
    return torch.cat([value.flatten().double() for value in params.values()])


def split_vector(vector: Tensor, like: Tree) -> Tree:
    """Split a vector into tensors with the names, shapes and dtypes of `like`."""
    found, start = {}, 0
    for name, value in like.items():
        found[name] = vector[start : start + value.numel()].reshape(value.shape).to(value.dtype)
        start += value.numel()
    return found


def _there(run: DrawnRun, path: Path) -> Path:
    if not path.exists():
        raise StorageError(
            f"run '{run.label}' has no {path.parent.name}/{path.name}", where=str(run.folder)
        )
    return path
