"""Settings that affect the bits of a run's results, in addition to config and code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["float32", "tf32", "bf16"]


@dataclass(frozen=True)
class Numerics:
    """Settings that affect the bits of a run's results, besides config and code.

    They are fixed when the run starts for the first time. A resumed run uses the stored
    settings.

    Args:
        engine: Config node of the engine that trains (see
            `fedexp.core.engine.describe`). It includes the engine's own choices.
        threads: Number of threads of each process that trains or aggregates.
        device: Device that the run computes on.
        dtype: Name of the floating-point type.
        precision: Precision of matrix products and convolutions. ``bf16`` applies only
            to local training, ``tf32`` to the whole run.
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
