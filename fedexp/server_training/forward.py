"""Passes over the server's data without a gradient.

The functions compute logits, and recompute BatchNorm's running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedexp.core import trees
from fedexp.core.data import Samples
from fedexp.core.net import Net
from fedexp.core.trees import Tree
from fedexp.core.weights import Weights

# Samples per forward pass of a teacher. The number is fixed, so that the last bits of
# the logits do not depend on the student's batch size.
_BATCH = 256


@torch.no_grad()
def logits_of(net: Net, weights: Weights, samples: Samples) -> Tensor:
    """Return the logits (n, classes) of all `samples` in their order.

    `net` must be in evaluation mode.
    """
    return torch.cat(
        [
            net(weights.params, weights.buffers, samples.inputs(part))
            for part in _slices(len(samples))
        ]
    )


@torch.no_grad()
def recomputed_statistics(net: Net, weights: Weights, samples: Samples, batch_size: int) -> Weights:
    """Replace BatchNorm's running statistics by means over batches of `samples`.

    For each batch, the mean and the variance (with Bessel's correction) of each
    BatchNorm's input are computed. The new statistics are their means over the batches,
    weighted by batch size. Batches are in the samples' order. A batch of one sample is
    left out. The network runs in training mode, so the layers before a BatchNorm
    normalise with batch statistics. Reference: Izmailov et al. 2018 (SWA), Section 3.2.
    """
    if not net.has_batch_norm:
        return weights

    net.train()
    sums: Tree = {}
    for part in _slices(len(samples), batch_size):
        inputs = samples.inputs(part)
        if len(inputs) < 2:
            continue
        seen = net.observe(weights.params, trees.clone(weights.buffers), inputs, norms=True)

        for name, x in seen.norms.items():
            over = [dim for dim in range(x.dim()) if dim != 1]
            for buffer, value in (
                (f"{name}.running_mean", x.mean(over)),
                (f"{name}.running_var", x.var(over)),
            ):
                sums[buffer] = sums.get(buffer, torch.zeros_like(value)) + len(x) * value
        sums["count"] = sums.get("count", torch.zeros((), device=inputs.device)) + len(inputs)

    count = sums.pop("count")
    trained = sums.keys() - weights.frozen
    buffers = {
        name: sums[name] / count if name in trained else v for name, v in weights.buffers.items()
    }

    return Weights(weights.spec, weights.params, buffers)


def _slices(n: int, size: int = _BATCH) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))
