"""Training of conditional variational autoencoders.

The loss is the negative evidence lower bound of images given their labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.data import Noise
from fedexp.core.device import wide
from fedexp.core.net import Net
from fedexp.core.task import Batch, Task, member_shares
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class CvaeTask(Task):
    """The task that trains a `fedexp.models.cvae.Cvae`. Targets are int64 labels (b,).

    Let x be an image, y its label, and z its latent code, with posterior q(z | x, y).
    The loss of an image is the Bernoulli reconstruction loss, summed over pixels, plus
    KL(q(z | x, y) || N(0, I)). It is averaged over the batch. The metrics are ``loss``
    and its first term ``reconstruction_loss``, in nats per image. For the metrics, z is
    the mean of the posterior instead of a random sample.

    With labels, `predict` returns the reconstruction loss and the KL divergence of each
    image, (b, 2). Without labels, it returns an estimate of log p(x | y) for every
    label y, (b, classes). In both cases, z is the mean of the posterior.

    Args:
        latent: Number of entries of z in the model. None stands for a model without z.
            Such a model is refused.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "reconstruction_loss")

    latent: int | None

    def __post_init__(self) -> None:
        require(self.latent is not None, "task=cvae trains a conditional VAE: set model=cvae")

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        assert self.latent is not None
        draws = standard_normal(noise("cvae/z", (2, len(batch.x), self.latent)).to(batch.x.dtype))
        return net(params, buffers, batch.x, batch.y, draws).sum(1).mean()

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return batch.x, batch.y

    def combine(self, outputs: Sequence[Tensor], rule: str, weights: Tensor | None) -> Tensor:
        """Return the mean of the models' outputs, weighted if weights are given.

        The mean loss is an upper bound of the loss of a mixture of the models, by
        Jensen's inequality. `rule` has no effect.
        """
        stacked = torch.stack(list(outputs))
        return (member_shares(stacked, weights) * stacked).sum(0)

    def totals(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": wide(output.sum()), "reconstruction_loss": wide(output[:, 0].sum())}


def standard_normal(uniform: Tensor) -> Tensor:
    """Transform pairs of uniform numbers in [0, 1) to samples of N(0, 1).

    The transform is that of Box and Muller (1958). It changes the shape from (2, ...)
    to (...).
    """
    return torch.sqrt(-2 * torch.log1p(-uniform[0])) * torch.cos(2 * math.pi * uniform[1])
