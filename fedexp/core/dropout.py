"""Dropout whose random numbers depend only on the job's seed, the step and the layer.

Every engine therefore uses the same dropout masks, and so does a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Dropout(nn.Module):
    """A dropout layer: zeros each element with probability `p` in training.

    The other elements are multiplied by 1 / (1 - p). In evaluation it is the identity.

    Args:
        p: Probability in [0, 1).

    Attributes:
        noise: Function that returns uniform numbers in [0, 1) for a stream's name and a
            shape, on the input's device. ``Net.set_noise`` sets it.
        stream: This layer's name within the model. ``Net`` sets it. A model must not
            use one dropout module twice, because both uses would drop the same units.
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
