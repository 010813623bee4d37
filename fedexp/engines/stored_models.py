"""Models trained elsewhere in place of the first round's local training (``client_models.path``)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedexp.core.data import POOLED, FederatedData
from fedexp.core.engine import Engine
from fedexp.core.env import Specs
from fedexp.core.errors import ConfigError, nearest
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.probe import Record
from fedexp.core.seeds import seed_of
from fedexp.core.trainer import Trainer
from fedexp.core.trees import Tree
from fedexp.core.weights import ModelSpec, Weights
from fedexp.data.dataset import Dataset
from fedexp.storage.model_folder import CLIENTS, MODELS, Clients, ModelFolder, fingerprint

_CPU = torch.device("cpu")
_STORED = {torch.float32: "F32", torch.float64: "F64"}


class StoredModels:
    """The models of a folder as the clients' of a federation.

    Args:
        folder: holds one model a client, and says which client's; without ``clients.json`` model i is client i's.
    """

    def __init__(self, folder: ModelFolder) -> None:
        count = len(folder.specs)
        self.folder = folder
        self.clients = folder.clients or Clients(count, tuple(range(count)))
        self._number = {client: number for number, client in enumerate(self.clients.clients)}

    @classmethod
    def find(cls, path: str, sha256: str | None) -> StoredModels:
        """Raises `ConfigError` where there is no such folder, or another content than `sha256`."""
        folder = Path(path).expanduser()
        if not (folder / MODELS).is_file():
            raise ConfigError(
                "there are no models here" if folder.is_dir() else "the folder of the clients' models is not there",
                where="client_models.path",
                expected=f"a folder with {MODELS}: a finished run's, or one that fedexp.save_models wrote",
                got=path,
                do=_nearest(folder),
            )
        found = fingerprint(folder)
        if sha256 is not None and found != sha256:
            raise ConfigError(
                "the folder holds other models",
                where="client_models.sha256",
                expected=sha256,
                got=found,
                do="remove it",
            )
        return cls(ModelFolder.open(folder))

    def __contains__(self, client: object) -> bool:
        return client in self._number

    def check(self, clients: int, specs: Specs, dtype: torch.dtype, dataset: Dataset, trainer: Trainer) -> None:
        """Refuse what does not fit the experiment, before any data are loaded; raises `ConfigError`."""
        if self.clients.num_clients != clients:
            raise ConfigError(
                "the folder's models are those of another number of clients",
                where="client_models.path",
                expected=f"{clients} (clients={clients})",
                got=f"{self.clients.num_clients}, {len(self.folder.specs)} of them with a model",
                do=f"set clients={self.clients.num_clients}",
            )
        for hook in ("init_state", "init_shared", "finish"):
            if getattr(type(trainer), hook) is not getattr(Trainer, hook):
                raise ConfigError(
                    "the trainer keeps a state at the clients or sends more than the model, which models from elsewhere lack",
                    where="trainer",
                    got=type(trainer).__name__,
                    do="set trainer=sgd, or client_models.path=null",
                )
        rows = self.clients.class_counts
        if rows and len(rows[0]) != dataset.num_classes:
            raise ConfigError(
                "the folder's class counts are of another data set",
                where="client_models.path",
                expected=f"{dataset.num_classes} classes",
                got=f"{len(rows[0])} classes",
            )
        wanted = [specs.of(client) for client in self.clients.clients]
        for number, (stored, spec) in enumerate(zip(self.folder.specs, wanted, strict=True)):
            if stored.arch != spec.arch or stored.arguments != spec.arguments:  # in this order: a file imports nothing
                raise ConfigError(
                    f"model {number} of the folder, client {self.clients.clients[number]}'s, is another network",
                    where="architectures.clients" if specs.clients else "model",
                    expected=f"that of the folder: {_told(stored, spec)}",
                    got=_told(spec, stored),
                    do="choose the model and the data set that the folder's models were trained with",
                )
        for name in ("mean", "std"):
            known, used = getattr(self.clients, name), getattr(dataset, name)
            if known is not None and known != tuple(used):
                raise ConfigError(
                    "the folder's models were trained on inputs of another normalisation",
                    where=f"dataset.{name}",
                    expected=f"{list(known)}, as {CLIENTS} says",
                    got=list(used),
                    do="set dataset.mean and dataset.std to what the models were trained with",
                )
        self._check_tensors(wanted, dtype)

    def _check_tensors(self, specs: Sequence[ModelSpec], dtype: torch.dtype) -> None:
        """The class may have changed since the models were trained, and a file need not be ours."""
        initial = {spec: Weights.init(spec, seed_of("check"), _CPU, dtype) for spec in dict.fromkeys(specs)}
        for number, (layout, spec) in enumerate(zip(self.folder.layouts(), specs, strict=True)):
            tensors = {**initial[spec].params, **initial[spec].buffers}
            wanted = {name: (_STORED.get(value.dtype), tuple(value.shape)) for name, value in tensors.items()}
            for name in [*wanted, *(name for name in layout if name not in wanted)]:
                kind, shape = wanted.get(name, (None, None))
                stored, stored_shape = layout.get(name, (None, None))
                if shape != stored_shape:
                    raise ConfigError(
                        f"tensor '{name}' of model {number} does not fit the network",
                        where="client_models.path",
                        expected=f"shape {list(shape)}" if shape is not None else "no such tensor",
                        got=f"shape {list(stored_shape)}" if stored_shape is not None else "no such tensor",
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

    def check_clients(self, jobs: Sequence[ClientJob], data: FederatedData) -> str | None:
        """Refuse a first round's jobs that have no model, and models whose client holds no data to be asked about.

        Returns:
            what a user should know, if anything.
        """
        for job in jobs:
            if job.client not in self:
                if job.client == POOLED:
                    raise ConfigError(
                        "training on pooled data has no clients whose models could be given",
                        where="client_models.path",
                        expected="null",
                        got=str(self.folder.path),
                    )
                raise ConfigError(
                    f"the folder has no model of client {job.client}",
                    where="client_models.path",
                    expected="a model of every client that takes part in the first round",
                    got=f"models of {len(self._number)} of {self.clients.num_clients} clients",
                    do="use the partition, the seed and the clients_per_round that they were trained with",
                )
        sizes = data.partition.sizes
        empty = [client for client in self._number if client >= len(sizes) or not sizes[client]]
        if empty:
            raise ConfigError(
                f"client {empty[0]} has a model in the folder and no data in this partition",
                where="partition",
                expected="samples at every client with a model: they weigh it, and methods look at it through them",
                do="use the partition the models were trained on: partition=file partition.path=.../partition.safetensors",
            )
        rows = self.clients.class_counts
        chosen = list(self.clients.clients)
        if rows is None or data.class_counts()[chosen].tolist() == [list(row) for row in rows]:
            return None
        return (
            f"client_models: the clients of {self.folder.path} hold other classes than those of this partition; "
            "counts come from the folder, other looks at clients' data from this partition"
        )

    def result(self, job: ClientJob, data: FederatedData) -> ClientResult:
        """The job's client's model, as if it had been trained now."""
        number = self._number[job.client]
        stored = self.folder.weights(number, data.train.x.device)
        known = self.clients.num_examples
        return ClientResult(
            client=job.client,
            weights=Weights(job.start.spec, stored.params, stored.buffers),
            num_examples=known[number] if known is not None else data.partition.size(job.client),
            num_steps=0,
            payload={},
            state=None,
            metrics={},
        )

    def record(self, client: int) -> Record:
        """What the folder says of the client's data."""
        number, known = self._number[client], self.clients
        sizes, rows = known.num_examples, known.class_counts
        return Record(None if sizes is None else sizes[number], None if rows is None else rows[number])


class FromStoredModels(Engine):
    """Wraps an engine: the first round's models come from a folder, later rounds and what no record answers from the engine."""

    def __init__(self, inner: Engine, models: StoredModels) -> None:
        self.inner, self.models = inner, models

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        if not all(job.first for job in jobs):
            yield from self.inner.map(jobs, data)
            return
        recorded = [self._recorded(job, data.train.x.device) for job in jobs]
        models: dict[int, ClientResult] = {}
        asked = []  # they hold their models in memory
        for i, job in enumerate(jobs):
            if missing := tuple(probe for probe in job.probes if probe.name not in recorded[i]):
                models[i] = self.models.result(job, data)
                asked.append(job.asking(models[i].weights, missing))
        with contextlib.closing(self.inner.map(asked, data)) as answers:
            for i, job in enumerate(jobs):
                result = models[i].with_answers(next(answers)) if i in models else self.models.result(job, data)
                yield replace(result, probes={**recorded[i], **result.probes})

    def _recorded(self, job: ClientJob, device: torch.device) -> dict[str, Tree]:
        """Answers by probe, where the folder knows them."""
        record = self.models.record(job.client)
        answers = {probe.name: probe.from_record(record) for probe in job.probes}
        return {
            name: {key: value.to(device) for key, value in tree.items()}
            for name, tree in answers.items()
            if tree is not None
        }


def _told(spec: ModelSpec, other: ModelSpec) -> str:
    """What of `spec` differs from `other`."""
    if spec.arch != other.arch:
        return spec.arch
    mine, theirs = spec.arguments, other.arguments
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return f"{spec.arch} with {', '.join(f'{name}={mine.get(name)}' for name in differing)}"


def _nearest(folder: Path) -> str:
    """What may have been meant: a folder in this one that holds models, or one of a similar name."""
    if folder.is_dir():
        inside = [child for child in sorted(folder.iterdir()) if (child / MODELS).is_file()]
        return f"did you mean '{inside[0]}'?" if inside else "run it to its end first, or give another folder"
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    names = [child.name for child in missing.parent.iterdir() if child.is_dir()]
    near = nearest(missing.name, names)
    return f"did you mean '{missing.parent / near}'?" if near else "relative paths start at the working directory"
