"""What turns penultimate features into logits: a linear layer, or scaled cosines."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fedexp.core.build import require


class CosineHead(nn.Linear):
    """Logits ``s cos(h, w_c)`` of features h and the class's row w_c, without bias (LDAM's normalised classifier).

    Cao et al. 2019; the scale s is inside the network, so that whatever reads its logits has calibrated ones.
    """

    def __init__(self, inputs: int, num_classes: int, scale: float) -> None:
        super().__init__(inputs, num_classes, bias=False)
        require(scale > 0, f"cosine_scale must be positive, got {scale}")
        self.scale = scale

    def forward(self, h: Tensor) -> Tensor:
        """(batch, inputs) -> (batch, num_classes), in [-s, s]."""
        return self.scale * functional.linear(
            functional.normalize(h, dim=-1), functional.normalize(self.weight, dim=-1)
        )


def head(inputs: int, num_classes: int, bias: bool, cosine_scale: float | None) -> nn.Linear:
    """A linear head; one of cosines, which has no bias, where a scale is given."""
    if cosine_scale is None:
        return nn.Linear(inputs, num_classes, bias=bias)
    return CosineHead(inputs, num_classes, cosine_scale)
