"""Heads that map penultimate features to logits: a linear layer, or scaled cosines."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require


class CosineHead(nn.Linear):
    """A head with logits ``s cos(h, w_c)`` of features h, without bias.

    w_c is the weight row of class c. The head is LDAM's normalised classifier (Cao et
    al. 2019). The scale s is applied inside the network. Every loss and metric
    therefore gets scaled logits.
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

    A `CosineHead` has no bias.
    """
    return (
        nn.Linear(inputs, num_classes, bias=bias)
        if cosine_scale is None
        else CosineHead(inputs, num_classes, cosine_scale)
    )
