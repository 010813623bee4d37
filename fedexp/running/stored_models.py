"""Checks of a folder of stored models (``client_models.path``).

Most checks run before any data are loaded. `check_clients` runs before the first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedexp.core.data import POOLED, FederatedData
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.jobs import ClientJob
from fedexp.core.seeds import seed_of
from fedexp.core.trainer import Trainer
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data.dataset import Dataset
from fedexp.engines.stored_models import StoredModels
from fedexp.storage.model_folder import CLIENTS, MODELS, ModelFolder, fingerprint

_CPU = torch.device("cpu")
_STORED = {torch.float32: "F32", torch.float64: "F64"}


def find_stored_models(path: str, sha256: str | None) -> StoredModels:
    """Open a folder of stored models.

    Args:
        path: Folder of the models.
        sha256: Expected hash of the folder's content, or None for any content.

    Raises:
        ConfigError: The folder is absent or has another content.
    """
    folder = Path(path).expanduser()
    if not (folder / MODELS).is_file():
        raise ConfigError(
            "there are no models here"
            if folder.is_dir()
            else "the folder of the clients' models does not exist",
            where="client_models.path",
            expected=f"a folder with {MODELS}: "
            "a finished run's, or one that fedexp.save_models wrote",
            got=path,
            do=_nearest_folder_hint(folder),
        )

    found = fingerprint(folder)
    if sha256 is not None and found != sha256:
        raise ConfigError(
            "the folder contains other models",
            where="client_models.sha256",
            expected=sha256,
            got=found,
            do="remove it",
        )

    return StoredModels(ModelFolder.open(folder))


def check_stored_models(
    models: StoredModels,
    clients: int,
    specs: Specs,
    dtype: torch.dtype,
    dataset: Dataset,
    trainer: Trainer,
) -> None:
    """Refuse stored models that do not fit the experiment, before any data are loaded.

    Raises:
        ConfigError: The models do not fit.
    """
    if models.clients.num_clients != clients:
        raise ConfigError(
            "the folder's models are those of another number of clients",
            where="client_models.path",
            expected=f"{clients} (clients={clients})",
            got=f"{models.clients.num_clients}, {len(models.folder.specs)} of them with a model",
            do=f"set clients={models.clients.num_clients}",
        )

    for hook in ("init_state", "init_shared", "finish"):
        if getattr(type(trainer), hook) is not getattr(Trainer, hook):
            raise ConfigError(
                "the trainer stores a state at the clients or sends more than the model, "
                "which stored models lack",
                where="trainer",
                got=type(trainer).__name__,
                do="set trainer=sgd, or client_models.path=null",
            )

    rows = models.clients.class_counts
    if rows and len(rows[0]) != dataset.num_classes:
        raise ConfigError(
            "the folder's class counts are of another data set",
            where="client_models.path",
            expected=f"{dataset.num_classes} classes",
            got=f"{len(rows[0])} classes",
        )

    wanted = [specs.of(client) for client in models.clients.clients]
    for number, (stored, spec) in enumerate(zip(models.folder.specs, wanted, strict=True)):
        # Architectures are compared first, so that no class of the folder is imported.
        if stored.arch != spec.arch or stored.arguments != spec.arguments:
            raise ConfigError(
                f"model {number} of the folder, client {models.clients.clients[number]}'s, "
                "is another network",
                where="architectures.clients" if specs.clients else "model",
                expected=f"that of the folder: {_describe_difference(stored, spec)}",
                got=_describe_difference(spec, stored),
                do="choose the model and the data set that the folder's models were trained with",
            )

    for name in ("mean", "std"):
        known, used = getattr(models.clients, name), getattr(dataset, name)
        if known is not None and known != tuple(used):
            raise ConfigError(
                "the folder's models were trained on inputs of another normalisation",
                where=f"dataset.{name}",
                expected=f"{list(known)}, as in {CLIENTS}",
                got=list(used),
                do="set dataset.mean and dataset.std to what the models were trained with",
            )

    _check_tensors(models, wanted, dtype)


def _check_tensors(models: StoredModels, specs: Sequence[ModelSpec], dtype: torch.dtype) -> None:
    """Refuse tensors that do not fit the networks.

    They do not fit if the network's code has changed since the models were trained, or
    if other code wrote the file.
    """
    initial = {
        spec: Weights.init(spec, seed_of("check"), _CPU, dtype) for spec in dict.fromkeys(specs)
    }

    for number, (layout, spec) in enumerate(zip(models.folder.layouts(), specs, strict=True)):
        tensors = {**initial[spec].params, **initial[spec].buffers}
        wanted = {
            name: (_STORED.get(value.dtype), tuple(value.shape)) for name, value in tensors.items()
        }

        for name in [*wanted, *(name for name in layout if name not in wanted)]:
            kind, shape = wanted.get(name, (None, None))
            stored, stored_shape = layout.get(name, (None, None))
            if shape != stored_shape:
                raise ConfigError(
                    f"tensor '{name}' of model {number} does not fit the network",
                    where="client_models.path",
                    expected=f"shape {list(shape)}" if shape is not None else "no such tensor",
                    got=f"shape {list(stored_shape)}"
                    if stored_shape is not None
                    else "no such tensor",
                    do="the network's code is not the one these models were trained with",
                )

            if kind is not None and stored != kind:
                raise ConfigError(
                    "the folder's models have another type of numbers",
                    where="dtype",
                    expected=f"{stored}, as tensor '{name}' of model {number}",
                    got=f"{kind} (dtype={str(dtype).removeprefix('torch.')})",
                    do="set dtype=float32 or dtype=float64, or save the models in that type",
                )


def check_clients(
    models: StoredModels, jobs: Sequence[ClientJob], data: FederatedData
) -> str | None:
    """Refuse a job without a stored model, and a stored model of a client without data.

    The jobs are those of the first round.

    Returns:
        A note for the user, or None.

    Raises:
        ConfigError: A job has no model, or the client of a model has no data.
    """
    for job in jobs:
        if job.client not in models:
            if job.client == POOLED:
                raise ConfigError(
                    "training on pooled data has no clients whose models could be given",
                    where="client_models.path",
                    expected="null",
                    got=str(models.folder.path),
                )

            raise ConfigError(
                f"the folder has no model of client {job.client}",
                where="client_models.path",
                expected="a model of every client that takes part in the first round",
                got=f"models of {len(models.number)} of {models.clients.num_clients} clients",
                do="use the partition, the seed and the clients_per_round "
                "that they were trained with",
            )

    sizes = data.partition.sizes
    empty = [client for client in models.number if client >= len(sizes) or not sizes[client]]
    if empty:
        raise ConfigError(
            f"client {empty[0]} has a model in the folder and no data in this partition",
            where="partition",
            expected="samples at every client with a model, "
            "because methods weigh and evaluate the model by them",
            do="use the partition the models were trained on: "
            "partition=file partition.path=.../partition.safetensors",
        )

    rows = models.clients.class_counts
    chosen = list(models.clients.clients)
    if rows is None or data.class_counts()[chosen].tolist() == [list(row) for row in rows]:
        return None

    return (
        f"client_models: the clients of {models.folder.path} have other classes than those of "
        "this partition. Counts come from the folder, and everything else about clients' data "
        "from this partition"
    )


def _describe_difference(spec: ModelSpec, other: ModelSpec) -> str:
    """Describe `spec` by the arguments in which it differs from `other`."""
    if spec.arch != other.arch:
        return spec.arch
    own, others = spec.arguments, other.arguments
    differing = [name for name in {**own, **others} if own.get(name) != others.get(name)]
    return f"{spec.arch} with {', '.join(f'{name}={own.get(name)}' for name in differing)}"


def _nearest_folder_hint(folder: Path) -> str:
    """Suggest a folder with models inside `folder`, or a folder of a similar name."""
    if (folder / "result.json").is_file():
        return "restart that run with reuse=false, or name another folder"
    if folder.is_dir():
        inside = [child for child in sorted(folder.iterdir()) if (child / MODELS).is_file()]
        return (
            f"did you mean '{inside[0]}'?"
            if inside
            else "finish that run first, or name another folder"
        )

    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    names = [child.name for child in missing.parent.iterdir() if child.is_dir()]
    near = nearest(missing.name, names)

    return (
        f"did you mean '{missing.parent / near}'?"
        if near
        else "relative paths start at the working directory"
    )
