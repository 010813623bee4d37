"""torch's process-wide switches of exactness, set for the time of a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from fedexp.core.numerics import Numerics

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS repeats its bits only with a fixed workspace


@contextlib.contextmanager
def use_numerics(numerics: Numerics) -> Iterator[None]:
    """Set TF32 and determinism as `numerics` say, in this process; put everything back afterwards.

    Every process that trains or aggregates enters this. bf16 needs no switch: `fedexp.core.net.Net` has it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_tf32(numerics.precision == "tf32"))
        if numerics.deterministic:
            stack.enter_context(_deterministic())
        yield


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """TF32 in float32 matrix products and convolutions; exact float32 where off (torch's default allows convolutions)."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Operations that repeat their bits, or an error where torch has none."""
    mode, benchmark = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    workspace = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
