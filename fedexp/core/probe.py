"""Probes: what an aggregator may ask about a trained local model and its client's data, beyond the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.data import FederatedData, Samples
from fedexp.core.jobs import ClientJob
from fedexp.core.models import Net, Weights
from fedexp.core.seeds import seed_of
from fedexp.core.task import Task
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Probe(ABC):
    """A pure function of a local model, its client's data and a seed; run after training, on the stored model."""

    name: ClassVar[str]  # under which an aggregator finds it in `ClientResult.probes`

    @abstractmethod
    def __call__(self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int) -> Tree:
        """What the client sends up.

        Args:
            net: of ``weights.spec``, in evaluation mode.
            task: says what the net is given of a batch.
            samples: the training pool; index: (n,) int64 positions of the client's samples in it, on the same device.
        """


def run_probes(job: ClientJob, weights: Weights, data: FederatedData) -> dict[str, Tree]:
    """Every probe of `job` on the model it trained, by name."""
    samples = data.train
    first = next(iter(weights.params.values()))
    net = Net(weights.spec, first.device, first.dtype)
    net.train(False)
    index = torch.from_numpy(data.partition.of(job.client)).to(samples.x.device)
    with torch.no_grad():
        return {
            probe.name: probe(net, weights, job.task, samples, index, seed_of(job.seed, "probe", probe.name))
            for probe in job.probes
        }
