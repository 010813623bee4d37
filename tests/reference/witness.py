"""A probe that returns the ID of the process in which it ran.

All its other answers depend only on model, data and seed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.data import Samples
from fedexp.core.jobs import ClientResult
from fedexp.core.net import Net
from fedexp.core.probe import ClientRecord, Probe
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Batch, Task
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class Witness(Probe):
    """A probe whose answer contains a process ID, outputs, labels and noise.

    Args:
        note: Number that distinguishes several probes of this class.
        fails_on: Number of samples of the client on whose data the probe raises.
        records: Whether the recorded number of samples, if there is one, suffices as
            the answer.
    """

    note: int = 0
    fails_on: int = -1
    records: bool = False

    name: ClassVar[str] = "witness"

    def __call__(
        self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int
    ) -> Tree:
        if len(index) == self.fails_on:
            raise ArithmeticError("no answer")
        batch = Batch(samples.inputs(index), samples.y.index_select(0, index))
        output = net(weights.params, weights.buffers, *task.inputs(batch))
        noise = torch.randn(3, generator=torch_generator(seed, "noise"), dtype=torch.float64)
        return {
            "pid": torch.tensor(os.getpid()),
            "output": output,
            "labels": batch.y,
            "noise": noise + self.note,
        }

    def from_record(self, record: ClientRecord) -> Tree | None:
        if not self.records or record.num_examples is None:
            return None
        return {"recorded": torch.tensor(record.num_examples)}


def told(result: ClientResult) -> Tree:
    """Return the answer without the process ID."""
    return {name: value for name, value in result.probes[Witness.name].items() if name != "pid"}
