"""Stored models, used as the results of the first round (``client_models.path``)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.errors import ConfigError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.probe import ClientRecord, Probe
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.storage.client_data import CLIENT_DATA, ClientData, probe_name
from fedexp.storage.model_folder import CLIENTS, Clients, ModelFolder

# Facts about the clients that a method may need. `_STORED_BY` has, for each fact, the
# file that contains it and the argument of `fedexp.save_models` that stores it.
Fact = Literal["numbers of samples", "class counts", "samples"]
_STORED_BY: dict[Fact, tuple[str, str]] = {
    "numbers of samples": (CLIENTS, "num_examples"),
    "class counts": (CLIENTS, "class_counts"),
    "samples": (CLIENT_DATA, "data"),
}

# Key of `Partition.info` that is set in runs with stored models. `FROM_FOLDER` means
# that the clients' samples come from the folder of the models. `UNKNOWN` means that
# they are not known. Without the key, they are those of the configured split.
SAMPLES = "samples_of_clients"
FROM_FOLDER, UNKNOWN = "client_models.path", "unknown"


class StoredModels:
    """The models of a folder, as the client models of a federation.

    Args:
        folder: Folder with one model per client. Its ``clients.json`` assigns the
            models to clients. Without this file, model i belongs to client i.
        data: The samples that the models were trained on, or facts about them. None if
            the folder has neither.
    """

    def __init__(self, folder: ModelFolder, data: ClientData | None = None) -> None:
        count = len(folder.specs)
        self.folder = folder
        self.data = data or ClientData()
        clients = folder.clients or Clients(count, tuple(range(count)))
        if clients.num_examples is None and clients.class_counts is not None:
            clients = replace(clients, num_examples=tuple(map(sum, clients.class_counts)))
        self.clients = clients
        self.number = {client: number for number, client in enumerate(self.clients.clients)}

    def __contains__(self, client: object) -> bool:
        return client in self.number

    def result(self, job: ClientJob, data: FederatedData) -> ClientResult:
        """Return the stored model of the job's client as the result of the job."""
        number = self.number[job.client]
        stored = self.folder.weights(number, data.train.x.device)
        known = self.clients.num_examples
        return ClientResult(
            client=job.client,
            weights=Weights(job.start.spec, stored.params, stored.buffers),
            num_examples=known[number]
            if known is not None
            else (data.partition.size(job.client) if knows_samples(data) else 0),
            num_steps=0,
            payload={},
            state=None,
            metrics={},
        )

    def record(self, client: int) -> ClientRecord:
        """Return the client's numbers of samples, in total and per class.

        A number that the folder does not contain is None.
        """
        number, known = self.number[client], self.clients
        sizes, rows = known.num_examples, known.class_counts
        return ClientRecord(
            None if sizes is None else sizes[number], None if rows is None else rows[number]
        )

    def described(self, clients: Clients, data: FederatedData) -> Clients:
        """Return `clients` with the folder's counts if the samples are not known."""
        if knows_samples(data):
            return clients
        records = [self.record(client) for client in clients.clients]
        sizes = [record.num_examples for record in records]
        rows = [record.class_counts for record in records]
        return replace(
            clients,
            num_examples=tuple(size for size in sizes if size is not None) or None,
            class_counts=tuple(row for row in rows if row is not None) or None,
        )

    def answer(self, client: int, probe: Probe) -> Tree | None:
        """Return the answer to a probe from the folder's counts or stored answers.

        The result is None if the folder does not contain the answer.
        """
        answer = probe.from_record(self.record(client))
        if answer is None and self.data.answers:
            answer = self.data.answers[self.number[client]].get(probe_name(probe))
        return answer

    def missing(
        self, fact: Fact, why: str, do: str | None = None, unfit: str | None = None
    ) -> ConfigError:
        """Return the error for a fact about the clients that the folder lacks.

        Args:
            fact: The missing fact.
            why: The reason why the fact is needed. It is a clause without a period that
                calls the fact "them", for example "rounds=2 trains the models on them".
            do: Next step for the message. By default it is to save the models with the
                fact.
            unfit: The reason why the folder's split cannot be used, if it has one.
        """
        file, argument = _STORED_BY[fact]
        save = f"save the models with fedexp.save_models(..., {argument}=...)"
        return ConfigError(
            f"the folder does not contain the clients' {fact}, but {why}"
            if unfit is None
            else f"the folder's split, which has the clients' {fact}, does not fit, but {why}",
            where="client_models.path",
            expected=f"{argument} in {file}" if file == CLIENTS else f"a run's split, or {file}",
            got=f"{self.folder.path}: {unfit}" if unfit else str(self.folder.path),
            do=f"{do or save}, or set client_models.data=partition if the models were trained on "
            "the configured partition",
        )


def knows_samples(data: FederatedData) -> bool:
    """Return whether the partition has the samples that clients trained on."""
    return data.partition.info.get(SAMPLES) != UNKNOWN


class FromStoredModels(Engine):
    """A wrapper of an engine that takes the models of the first round from a folder.

    The wrapped engine trains later rounds. It also runs the probes whose answers the
    folder does not contain. If the clients' samples are not known, later steps are
    refused.
    """

    def __init__(self, inner: Engine, models: StoredModels) -> None:
        self.inner, self.models = inner, models

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if not all(job.first for job in jobs):
            if jobs and not knows_samples(data):
                raise self.models.missing("samples", "a later step trains the clients' models")
            yield from self.inner.map(jobs, data)
            return

        recorded = [self._recorded(job, data.train.x.device) for job in jobs]
        models: dict[int, ClientResult] = {}
        # Jobs that run the probes without a stored answer. Each keeps its model in
        # memory.
        asked = []

        for i, job in enumerate(jobs):
            if missing := tuple(probe for probe in job.probes if probe.name not in recorded[i]):
                models[i] = self.models.result(job, data)
                asked.append(job.asking(models[i].weights, missing))

        with contextlib.closing(self.inner.map(asked, data)) as answers:
            for i, job in enumerate(jobs):
                result = (
                    models[i].with_answers(next(answers))
                    if i in models
                    else self.models.result(job, data)
                )
                yield replace(result, probes={**recorded[i], **result.probes})

    def _recorded(self, job: ClientJob, device: torch.device) -> dict[str, Tree]:
        """Return the answers that the folder contains, by probe name."""
        answers = {probe.name: self.models.answer(job.client, probe) for probe in job.probes}
        return {
            name: {key: value.to(device) for key, value in tree.items()}
            for name, tree in answers.items()
            if tree is not None
        }
