"""Dropout whose random numbers are a function of names, so that runs resume and engines agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Dropout(nn.Module):
    """Zero each element with probability `p` in training and scale the rest by 1 / (1 - p); identity in evaluation.

    Args:
        p: probability in [0, 1).

    Attributes:
        noise: gives uniform [0, 1) numbers for a stream's name and a shape, on the input's device; set by
            ``Net.set_noise``.
        stream: this layer's name within the model; set by ``Net``. Two layers never share one module, or they would
            drop the same units.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {p}")
        self.p = p
        self.noise: Callable[[str, tuple[int, ...]], Tensor] | None = None
        self.stream = ""

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape; raises RuntimeError in training without a `noise`."""
        if not self.training or self.p == 0:
            return x
        if self.noise is None:
            raise RuntimeError(
                f"dropout layer '{self.stream}' has no random numbers: train the model through fedexp.core.net.Net "
                "and give it a source with Net.set_noise, or call eval()"
            )
        keep = self.noise(self.stream, tuple(x.shape)) >= self.p
        return x * keep.to(x.dtype).div(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
