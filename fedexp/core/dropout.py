"""Dropout whose random numbers depend only on the job's seed, the step and the layer.

All engines therefore use the same dropout masks, and a resumed run uses the masks of an
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Dropout(nn.Module):
    """A dropout layer: it zeros each element with probability `p` in training.

    The remaining elements are multiplied by 1 / (1 - p). In evaluation the layer is the
    identity.

    Args:
        p: Probability in [0, 1).

    Attributes:
        noise: Function that returns uniform numbers in [0, 1), given the layer's name
            `stream` and a shape. The numbers are on the input's device.
            ``Net.set_noise`` sets the function.
        stream: The layer's name within the model, set by ``Net``. A model must not use
            one dropout module twice, because both uses would drop the same units.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {p}")
        self.p = p
        self.noise: Callable[[str, tuple[int, ...]], Tensor] | None = None
        self.stream = ""

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to `x` of any shape.

        Raises:
            RuntimeError: The layer is in training mode and has no `noise`.
        """
        if not self.training or self.p == 0:
            return x
        if self.noise is None:
            raise RuntimeError(
                f"dropout layer '{self.stream}' has no random numbers: train the model "
                "through fedexp.core.net.Net "
                "and give it a source with Net.set_noise, or call eval()"
            )
        keep = self.noise(self.stream, tuple(x.shape)) >= self.p
        return x * keep.to(x.dtype).div(1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
