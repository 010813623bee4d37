"""Layer inputs of a few of a client's samples: what each linear or convolutional layer is given. Up: one tensor a layer.

For methods that compare units by what they do (Singh & Jaggi 2020) rather than by their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Samples
from fedexp.core.net import Net
from fedexp.core.probe import Probe
from fedexp.core.seeds import torch_generator
from fedexp.core.task import Batch, Task
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights


@dataclass(frozen=True)
class Activations(Probe):
    """Inputs (n, ...) of every layer in evaluation mode, by the name of its weight, n = min(`samples`, the client's).

    Args:
        samples: drawn without replacement from the client's.
    """

    samples: int = 200

    name: ClassVar[str] = "activations"

    def __post_init__(self) -> None:
        require(self.samples >= 1, f"samples must be at least 1, got {self.samples}")

    def __call__(self, net: Net, weights: Weights, task: Task, samples: Samples, index: Tensor, seed: int) -> Tree:
        order = torch.randperm(len(index), generator=torch_generator(seed, "order"))
        part = index[order[: self.samples].to(index.device)]
        batch = Batch(samples.inputs(part), samples.y.index_select(0, part))
        return net.observe(weights.params, weights.buffers, *task.inputs(batch), layers="all").layers
