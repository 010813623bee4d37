"""Stored models, used as the results of the first round (``client_models.path``)."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.probe import ClientRecord
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights
from fedexp.storage.model_folder import Clients, ModelFolder


class StoredModels:
    """The models of a folder, as the client models of a federation.

    Args:
        folder: Folder with one model per client. Its ``clients.json`` assigns the
            models to clients. Without this file, model i belongs to client i.
    """

    def __init__(self, folder: ModelFolder) -> None:
        count = len(folder.specs)
        self.folder = folder
        self.clients = folder.clients or Clients(count, tuple(range(count)))
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
            num_examples=known[number] if known is not None else data.partition.size(job.client),
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


class FromStoredModels(Engine):
    """A wrapper of an engine that takes the models of the first round from a folder.

    The wrapped engine trains later rounds. It also answers the probes that cannot be
    answered from the folder's records.
    """

    def __init__(self, inner: Engine, models: StoredModels) -> None:
        self.inner, self.models = inner, models

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if not all(job.first for job in jobs):
            yield from self.inner.map(jobs, data)
            return

        recorded = [self._recorded(job, data.train.x.device) for job in jobs]
        models: dict[int, ClientResult] = {}
        asked = []  # jobs that run the missing probes. Each holds its model in memory.

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
        """Return the answers that follow from the folder's records, by probe name."""
        record = self.models.record(job.client)
        answers = {probe.name: probe.from_record(record) for probe in job.probes}
        return {
            name: {key: value.to(device) for key, value in tree.items()}
            for name, tree in answers.items()
            if tree is not None
        }
