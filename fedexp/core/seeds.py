"""Randomness as a function of names: no global generator, no generator state to save."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def seed_of(*names: Any) -> int:
    """A 63-bit seed from names, e.g. ``seed_of(run_seed, "client", round, client)``.

    Names are str, int, float, bool or None; the same names give the same seed in every process and version.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(*names: Any, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for the stream that `names` name."""
    generator = torch.Generator(device=device)
    generator.manual_seed(seed_of(*names))
    return generator


def numpy_generator(*names: Any) -> np.random.Generator:
    """As `torch_generator`, for NumPy."""
    return np.random.Generator(np.random.Philox(seed_of(*names)))
