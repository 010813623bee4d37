"""Process-wide settings of torch for exact and reproducible arithmetic.

The settings apply only while a run is executed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from fedexp.core.device import current
from fedexp.core.numerics import Numerics

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is bit-reproducible only with a fixed workspace


@contextlib.contextmanager
def use_numerics(numerics: Numerics) -> Iterator[None]:
    """Set torch's device, TF32, cuDNN benchmark and determinism in a ``with`` block.

    The former settings are restored afterwards. Every process that trains or aggregates
    enters this context. bf16 is not set here, because `fedexp.core.net.Net` applies it.
    """
    deterministic = _deterministic() if numerics.deterministic else contextlib.nullcontext()
    device = torch.device(numerics.device)
    benchmark = _benchmark(numerics.cudnn_benchmark)
    tf32 = _tf32(numerics.precision == "tf32")
    with torch_defaults(), current(device), tf32, benchmark, deterministic:
        yield


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Use torch's initial default type, without inference mode, in a ``with`` block.

    A script, a notebook or a plug-in may have changed the type of new tensors, which
    changes initial weights. In torch's inference mode, no model can be trained.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _benchmark(on: bool) -> Iterator[None]:
    """Set whether cuDNN times several algorithms and chooses the fastest."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """Allow or forbid TF32 in float32 matrix products and convolutions.

    If `on` is false, matrix products and convolutions use full float32. Torch's default
    differs: it allows TF32 in convolutions.
    """
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
    """Allow only bit-reproducible operations.

    Torch raises an error for any other operation.
    """
    mode = torch.get_deterministic_debug_mode()
    # By default, torch then also fills new tensors with NaN, which reveals code that
    # reads them too early. On a GPU, each fill is a kernel launch.
    deterministic: Any = torch.utils.deterministic  # torch's stubs lack this module
    fill_memory = deterministic.fill_uninitialized_memory
    workspace = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = fill_memory
        torch.set_deterministic_debug_mode(mode)
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
