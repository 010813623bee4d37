"""Multi-layer perceptrons of any widths, with or without biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedexp.core.build import require
from fedexp.core.dropout import Dropout


class MLP(nn.Module):
    """A multi-layer perceptron on flattened inputs.

    Every linear layer except the last is followed by ReLU and, if `dropout` is
    positive, by dropout.

    Args:
        input_shape: Shape of one sample, with any number of axes. For images it is
            (channels, height, width).
        num_classes: Number of logits.
        hidden: Widths of the hidden layers. An empty tuple gives a linear classifier.
        bias: Whether the layers have biases.
        init: Initialisation. ``default`` is torch's: weights and biases are drawn from
            U(-1/sqrt(fan_in), 1/sqrt(fan_in)). ``normal`` draws every weight from
            N(0, 0.1^2) and sets every bias to 0.1, also in the output layer. PFNM and
            NAFI use ``normal``.
        dropout: Probability of dropout after the ReLU of each hidden layer.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        hidden: tuple[int, ...] = (64,),
        bias: bool = True,
        init: Literal["default", "normal"] = "default",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = (math.prod(input_shape), *hidden)
        require(
            min(*widths, num_classes) >= 1,
            f"every width must be at least 1, got {(*widths, num_classes)}",
        )

        self.hidden = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(widths))
        self.output = nn.Linear(widths[-1], num_classes, bias=bias)
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in hidden if dropout)

        if init == "normal":
            for name, parameter in self.named_parameters():
                if name.endswith("weight"):
                    nn.init.normal_(parameter, 0.0, 0.1)
                else:
                    nn.init.constant_(parameter, 0.1)

    @staticmethod
    def with_widths(kwargs: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
        """Return constructor arguments for a network with other widths.

        Args:
            kwargs: Constructor arguments of the present network.
            widths: New widths of the hidden layers, by the names of their weights.
        """
        return {"hidden": tuple(widths[f"hidden.{i}.weight"] for i in range(len(kwargs["hidden"])))}

    @property
    def linear_chain(self) -> tuple[tuple[str, str | None], ...]:
        """Return a pair (name of the weight, name of the bias) for each layer.

        The result is empty if the network has dropout, because a chain has only ReLU
        between its layers.
        """
        if self.dropouts:
            return ()
        names = [*(f"hidden.{i}" for i in range(len(self.hidden))), "output"]
        return tuple(
            (f"{name}.weight", f"{name}.bias" if self.output.bias is not None else None)
            for name in names
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, *input_shape) to logits (batch, num_classes)."""
        x = x.flatten(1)
        for index, layer in enumerate(self.hidden):
            x = torch.relu(layer(x))
            if self.dropouts:
                x = self.dropouts[index](x)
        logits: Tensor = self.output(x)
        return logits
