"""Binary segmentation: a decision, for each pixel, whether it belongs to the object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.core.data import Noise, Targets
from fedexp.core.device import wide
from fedexp.core.net import Net
from fedexp.core.task import Batch, Task, member_shares
from fedexp.core.trees import Tree


@dataclass(frozen=True)
class Segmentation(Task):
    """Binary segmentation with uint8 masks (b, H, W) and logits (b, 1, H, W).

    There is one logit per pixel. The sigmoid of a logit is the predicted probability
    that its pixel belongs to the object. The loss is the binary cross-entropy, averaged
    over pixels and images. This loss is an assumption, because NAFI (Xiao & Cheng 2023)
    measures Dice and does not state its loss. It is the two-class form of U-Net's loss
    (Ronneberger et al. 2015), but without weights of pixels.

    A pixel counts as found if its predicted probability exceeds 0.5. The metrics are:

    - ``dice`` is ``2 |F & M| / (|F| + |M|)`` for the set F of found pixels and the set
      M of pixels in the mask. It is 1 if F and M are empty. The value is in [0, 1] and
      is averaged over images, as in the Carvana challenge.
    - ``pixel_acc`` is the share of pixels that are classified correctly, in [0, 1].
    - ``loss`` is in nats per pixel.
    """

    targets: ClassVar[Targets] = "masks"
    highest: ClassVar[float] = 1.0
    metric_names: ClassVar[tuple[str, ...]] = ("dice", "pixel_acc", "loss")

    def loss(self, net: Net, params: Tree, buffers: Tree, batch: Batch, noise: Noise) -> Tensor:
        return _cross_entropy(net(params, buffers, batch.x), batch.y).mean()

    def combine(self, outputs: Sequence[Tensor], rule: str, weights: Tensor | None) -> Tensor:
        """Combine the logits of an ensemble's models into one output.

        ``rule='logits'`` computes the mean of the logits. ``rule='probs'`` computes the
        logit of the mean probability. Means are weighted if weights are given. Weights
        of shape (models, 1) have the same effect as weights of shape (models,), because
        there is only one class.
        """
        stacked = torch.stack(list(outputs))
        share = member_shares(stacked, weights)

        # The means are computed from log-probabilities. Otherwise a very small
        # probability would be rounded to 0.
        if rule == "probs":
            found = F.logsigmoid(stacked) + share.log()
            missed = F.logsigmoid(-stacked) + share.log()
            return torch.logsumexp(found, 0) - torch.logsumexp(missed, 0)
        return (stacked * share).sum(0)

    def totals(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        found, mask = output[:, 0] > 0, y > 0
        both = wide((found & mask).sum((1, 2)))
        either = wide(found.sum((1, 2)) + mask.sum((1, 2)))
        return {
            "dice": torch.where(either > 0, 2 * both / either, 1.0).sum(),
            "pixel_acc": wide(found == mask).mean((1, 2)).sum(),
            "loss": wide(_cross_entropy(output, y)).mean((1, 2)).sum(),
        }

    def output_shape(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (num_classes, *input_shape[1:])


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy of logits (b, 1, H, W) and masks (b, H, W).

    Returns:
        Values of shape (b, H, W), in nats.
    """
    logits = output[:, 0]
    return F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none")
