"""Settings, besides config and code, that affect the bits of a run's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class Numerics:
    """The settings, besides config and code, that affect the bits of a run's results.

    They are fixed at the first launch and reused on resume.

    Args:
        engine: Config node of the engine that trains, with every choice made (see
            `fedexp.core.engine.describe`).
        threads: Number of threads of each process that trains or aggregates.
        device: Device that the run computes on.
        dtype: Name of the floating-point type.
        precision: Precision of matrix products and convolutions in local training.
        deterministic: Whether torch refuses operations that are not bit-reproducible.
        cudnn_benchmark: Whether cuDNN chooses the algorithms of convolutions by timing.
    """

    engine: Mapping[str, Any]
    threads: int
    device: str
    dtype: str
    precision: Precision = "float32"
    deterministic: bool = False
    cudnn_benchmark: bool = False
