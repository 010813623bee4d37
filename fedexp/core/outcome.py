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
        combine: Rule for an ensemble's outputs. ``logits`` means the mean of the
            logits, ``probs`` the mean of the probabilities.
        weights: Weights of an ensemble's members, (models,), or None for equal weights.
            With ``logits`` they may have shape (models, classes). Then class c's logit
            is ``sum_i w_ic z_ic / sum_i w_ic``, or 0 if every w_ic is 0.
        clients: The client of each model, or None if the models are not clients'
            models.
    """

    models: tuple[Weights, ...]
    kind: Delivers
    combine: Literal["logits", "probs"] = "logits"
    weights: Tensor | None = None
    clients: tuple[int, ...] | None = None
