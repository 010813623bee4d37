"""Heads, the last layers of classifiers, which map features to logits.

A head is a linear layer or computes scaled cosines.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require


class CosineHead(nn.Linear):
    """A head whose logit of class c is ``s cos(h, w_c)``, without bias.

    Here h are the features, w_c is the row of the weight for class c, and s is the
    scale. The head is LDAM's normalised classifier (Cao et al. 2019). The scale is
    applied inside the network, so every loss and metric gets scaled logits.
    """

    def __init__(self, inputs: int, num_classes: int, scale: float) -> None:
        super().__init__(inputs, num_classes, bias=False)
        require(scale > 0, f"cosine_scale must be positive, got {scale}")
        self.scale = scale

    def forward(self, h: Tensor) -> Tensor:
        """Map features (batch, inputs) to logits (batch, num_classes) in [-s, s]."""
        return self.scale * functional.linear(
            functional.normalize(h, dim=-1), functional.normalize(self.weight, dim=-1)
        )


def head(inputs: int, num_classes: int, bias: bool, cosine_scale: float | None) -> nn.Linear:
    """Return a linear head, or a `CosineHead` if a scale is given.

    `bias` has no effect on a `CosineHead`, which never has a bias.
    """
    return (
        nn.Linear(inputs, num_classes, bias=bias)
        if cosine_scale is None
        else CosineHead(inputs, num_classes, cosine_scale)
    )
