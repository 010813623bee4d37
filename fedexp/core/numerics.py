"""What a run's bits depend on besides its config and its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class Numerics:
    """What a run's bits depend on besides its config and code. Fixed at first launch, reused on resume.

    Args:
        engine: config node of the engine that computes, every choice made (see `describe`).
        threads: of each process that trains or aggregates.
        precision: of matrix products and convolutions in local training.
        deterministic: whether torch refuses operations that do not repeat their bits.
    """

    engine: Mapping[str, Any]
    threads: int
    device: str
    dtype: str
    precision: Precision = "float32"
    deterministic: bool = False
