"""Folders of models, in the format in which every run stores its models.

Models that were trained outside of fedexp are read in the same format.
``model.safetensors`` has parameters and buffers. If there are several models, keys
begin with the number of the model (``<index>/``). The metadata have the class and the
constructor arguments of each model. If each model belongs to a client, ``clients.json``
has the numbers of the clients and describes their training data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from fedexp.core.build import build, require
from fedexp.core.data import FederatedData
from fedexp.core.errors import ConfigError, StorageError
from fedexp.core.outcome import Delivers, Outcome
from fedexp.core.trees import Tree
from fedexp.core.user_code import is_ours
from fedexp.core.weights import ModelSpec, Weights
from fedexp.storage.client_data import CLIENT_DATA
from fedexp.storage.files import damaged, file_sha256, read_json, write_text
from fedexp.storage.tensors import read_facts, read_tensor, save_tree

MODELS, CLIENTS, SPLIT = "model.safetensors", "clients.json", "partition.safetensors"


@dataclass(frozen=True)
class Clients:
    """The clients that the models of a folder belong to, one entry per model, in order.

    Args:
        num_clients: Number of clients of the federation, including those without a
            model.
        clients: For each model, the number of its client in the federation, from 0.
        num_examples: Number of training samples of each client, or None if unknown.
        class_counts: Number of training samples of each class, of shape (models,
            classes), or None if unknown.
        mean: Mean of each channel for the normalisation of the inputs
            (`fedexp.core.data.InputDomain`). Empty without normalisation, None if
            unknown.
        std: Standard deviation of each channel, empty or None as for `mean`.
    """

    num_clients: int
    clients: tuple[int, ...]
    num_examples: tuple[int, ...] | None = None
    class_counts: tuple[tuple[int, ...], ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        distinct = sorted(set(self.clients))
        require(len(distinct) == len(self.clients), "clients must be distinct: one model each")
        require(
            not distinct or (distinct[0] >= 0 and distinct[-1] < self.num_clients),
            f"clients must be in 0 .. num_clients - 1 = {self.num_clients - 1}, "
            f"got {list(self.clients)}",
        )

        for name, values in (
            ("num_examples", self.num_examples),
            ("class_counts", self.class_counts),
        ):
            require(
                values is None or len(values) == len(self.clients),
                f"{name} needs one entry per model: expected {len(self.clients)}, "
                f"got {len(values or ())}",
            )

        require(all(n > 0 for n in self.num_examples or ()), "num_examples must be positive")
        rows = self.class_counts or ()
        require(
            len({len(row) for row in rows}) <= 1,
            "class_counts must have the same number of classes for every model",
        )
        require(all(n >= 0 for row in rows for n in row), "class_counts must not be negative")

    @classmethod
    def of(
        cls,
        outcome: Outcome,
        num_clients: int,
        data: FederatedData,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> Clients | None:
        """Return the clients of the models, or None if the models have no clients."""
        if outcome.clients is None:
            return None
        chosen = list(outcome.clients)
        sizes, counts = data.partition.sizes[chosen].tolist(), data.class_counts()[chosen].tolist()
        return cls(num_clients, outcome.clients, tuple(sizes), tuple(map(tuple, counts)), mean, std)


# Names in the file format for what a method delivers.
_KIND_IN_FILE: dict[Delivers, str] = {
    "global": "model",
    "ensemble": "ensemble",
    "local": "per_client",
}


def save_outcome(outcome: Outcome, clients: Clients | None, folder: Path) -> None:
    """Write the models of an outcome and the clients that they belong to, if any.

    The weights with which an ensemble combines its models are stored as tensor
    ``weights``.
    """
    tensors: Tree = {}
    buffers: list[str] = []

    for number, model in enumerate(outcome.models):
        prefix = _prefix(_KIND_IN_FILE[outcome.kind], number)
        tensors |= {
            prefix + name: value for name, value in {**model.params, **model.buffers}.items()
        }
        buffers += [prefix + name for name in model.buffers]

    if outcome.weights is not None:
        tensors["weights"] = outcome.weights
    facts = {
        "kind": _KIND_IN_FILE[outcome.kind],
        "combine": outcome.combine,
        "specs": [{"arch": m.spec.arch, "kwargs": dict(m.spec.kwargs)} for m in outcome.models],
        "buffers": buffers,
    }
    if clients is not None:
        write_text(folder / CLIENTS, json.dumps(asdict(clients)) + "\n")
    save_tree(folder / MODELS, tensors, facts)


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A folder that `save_outcome` wrote. Tensors are read on demand.

    Args:
        path: Path of the folder.
        kind: Kind of the outcome as the file names it: ``model``, ``ensemble`` or
            ``per_client``.
        specs: Spec of each model.
        buffers: Keys in the file whose tensors are buffers. All other tensors are
            parameters.
        keys: For each model, a mapping from each tensor's name to its key in the file.
            The tensors are in the order of the network.
        clients: Clients that the models belong to, if the folder has them.
    """

    path: Path
    kind: str
    specs: tuple[ModelSpec, ...]
    buffers: frozenset[str]
    keys: tuple[dict[str, str], ...]
    clients: Clients | None

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Read the description of the models in a folder.

        If the folder belongs to a finished run, its models must be those that the run
        delivered.

        Raises:
            StorageError: Files are absent, damaged or of another format.
            ConfigError: The contents of ``clients.json`` are not valid.
        """
        verify(path)
        with _reading(path) as file:
            facts = read_facts(file)
            specs = tuple(ModelSpec.from_stored(s["arch"], s["kwargs"]) for s in facts["specs"])
            kind, buffers = facts["kind"], frozenset(facts["buffers"])
            keys = _by_model(facts["order"], kind, len(specs))

        clients = _read_clients(path / CLIENTS)
        if clients is not None and len(clients.clients) != len(specs):
            raise StorageError(
                f"{CLIENTS} and {MODELS} do not belong together",
                where=str(path),
                expected=f"{len(specs)} models in both",
                got=f"{len(clients.clients)} in {CLIENTS}",
            )

        return cls(path, kind, specs, buffers, keys, clients)

    def weights(self, number: int, device: torch.device | str = "cpu") -> Weights:
        """Return model `number`, counted from 0, as it was stored.

        Raises:
            StorageError: The file is gone or damaged.
        """
        params: Tree = {}
        buffers: Tree = {}
        with _reading(self.path, device) as file:
            for name, key in self.keys[number].items():
                tree = buffers if key in self.buffers else params
                tree[name] = read_tensor(file, key)
        return Weights(self.specs[number], params, buffers)

    def layouts(self) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
        """Return type and shape of every tensor, for each model.

        The type is named as in safetensors (F32, F64 and so on). No tensor is read.
        """
        layouts = []
        with _reading(self.path) as file:
            for keys in self.keys:
                parts = {name: file.get_slice(key) for name, key in keys.items()}
                layouts.append(
                    {
                        name: (part.get_dtype(), tuple(part.get_shape()))
                        for name, part in parts.items()
                    }
                )
        return layouts


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each of the folder's files that exist.

    The files are ``model.safetensors`` and ``clients.json``.
    """
    return {
        name: file_sha256(folder / name) for name in (MODELS, CLIENTS) if (folder / name).is_file()
    }


def fingerprint(folder: Path) -> str:
    """Return the sha256 of the folder's models and of the files about their clients.

    A run's split is not included, because ``clients.json`` and the models depend on it.
    """
    found = digests(folder)
    if (folder / CLIENT_DATA).is_file():
        found[CLIENT_DATA] = file_sha256(folder / CLIENT_DATA)
    return hashlib.sha256(
        "".join(f"{name} {sha256}\n" for name, sha256 in found.items()).encode()
    ).hexdigest()


def verify(folder: Path) -> None:
    """Check that the model files of a finished run are those that the run delivered.

    The files are compared with the digests in ``result.json``. Missing files are
    accepted.

    Raises:
        StorageError: A file differs from its digest.
    """
    found = digests(folder)
    for name, sha256 in (
        (read_json(folder / "result.json") or {}).get("models_sha256") or {}
    ).items():
        if found.get(name, sha256) != sha256:
            raise damaged(
                folder / name,
                "not what result.json says (delete result.json from a copy changed on purpose)",
            )


def refuse_other_classes(
    classes: Iterable[str], allowed: Iterable[str], path: Path, do: str
) -> None:
    """Refuse a file that names a network class that may not be imported.

    Classes of fedexp are accepted.

    Args:
        classes: Dotted paths of the classes that the file names.
        allowed: Dotted paths of further classes, or of modules and packages whose
            classes are all accepted.
        path: The file, for the message.
        do: Next step for the message. ``{name}`` is replaced by the refused class.

    Raises:
        StorageError: A class is not accepted. Nothing was imported.
    """
    accepted = tuple(allowed)
    for name in classes:
        if not is_ours(name) and not any(
            name == one or name.startswith(f"{one}.") for one in accepted
        ):
            raise StorageError(
                "the file names a network whose code has not been allowed to run",
                where=str(path),
                expected=", ".join(["a class of fedexp", *sorted(accepted)]),
                got=name,
                do=do.format(name=name),
            )


@contextlib.contextmanager
def _reading(folder: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    path = folder / MODELS
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except (
        OSError,
        safetensors.SafetensorError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise StorageError(
            f"no models can be read here: {_reason(error)}",
            where=str(path),
            expected=f"{MODELS} of a finished run, or of fedexp.save_models",
            do="store models from elsewhere in this format with fedexp.save_models",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    # These errors occur if metadata that only fedexp writes is missing or damaged.
    if isinstance(error, AttributeError | KeyError | TypeError | ValueError | RecursionError):
        return "the file does not name the networks of the models"
    return str(error)


def _read_clients(path: Path) -> Clients | None:
    stored = read_json(path)
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise StorageError(
            f"{CLIENTS} is not an object", where=str(path), got=type(stored).__name__
        )
    # `build` would import the class that this key names. This is unsafe, because the
    # file may come from another person.
    if "_target_" in stored:
        raise ConfigError("unknown key '_target_'", where=f"{path}._target_", do="remove it")
    return build(Clients, stored, str(path))


def _prefix(kind: str, number: int) -> str:
    return "" if kind == "model" else f"{number}/"


def _by_model(keys: list[str], kind: str, count: int) -> tuple[dict[str, str], ...]:
    """Return one mapping per model from a tensor's name to its key in the file."""
    if kind == "model":
        return ({key: key for key in keys},)
    groups: dict[str, dict[str, str]] = {str(number): {} for number in range(count)}
    for key in keys:
        number, slash, name = key.partition("/")
        if slash:  # a key without a slash belongs to the whole ensemble
            groups[number][name] = key
    return tuple(groups.values())
