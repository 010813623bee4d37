"""The outcome of a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedexp.core.weights import Weights

Delivers = Literal["global", "ensemble", "local"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """The models that a method delivers.

    Args:
        models: One global model, the members of an ensemble, or one model per client in
            client order.
        kind: ``global``, ``ensemble`` or ``local``.
        combine: Rule that combines the outputs of an ensemble. ``logits`` is the mean
            of the logits, ``probs`` the mean of the probabilities.
        weights: Weights of an ensemble's members, (models,), or None for equal weights.
            With ``combine=logits`` the shape may also be (models, classes). Then the
            logit of class c is ``sum_i w_ic z_ic / sum_i w_ic``, where w_ic and z_ic
            are the weight and the logit of model i for class c. It is 0 if every w_ic
            is 0.
        clients: The client of each model, or None if the models are not clients'
            models.
    """

    models: tuple[Weights, ...]
    kind: Delivers
    combine: Literal["logits", "probs"] = "logits"
    weights: Tensor | None = None
    clients: tuple[int, ...] | None = None
