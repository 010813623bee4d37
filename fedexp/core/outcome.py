"""What a method delivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedexp.core.weights import Weights

Delivers = Literal["global", "ensemble", "local"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method delivers.

    Args:
        models: one global model, an ensemble's members, or one model a client (in client order).
        combine: how an ensemble's outputs are combined.
        weights: (models,) weights of an ensemble's members, or None for equal ones; with ``logits`` also (models, classes):
            class c's logit is ``sum_i w_ic z_ic / sum_i w_ic``, 0 where every w_ic is.
        clients: whose each model is, where it is one client's; None elsewhere.
    """

    models: tuple[Weights, ...]
    kind: Delivers
    combine: Literal["logits", "probs"] = "logits"
    weights: Tensor | None = None
    clients: tuple[int, ...] | None = None
