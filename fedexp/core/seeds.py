"""Random numbers as a function of names.

There is no global generator and no generator state to store.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def seed_of(*names: Any) -> int:
    """Return a 63-bit seed from names.

    An example is ``seed_of(run_seed, "client", round, client)``. The same names give
    the same seed in every process and version.

    Args:
        names: str, int, float, bool or None.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(*names: Any, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for the stream that `names` identify."""
    return torch.Generator(device=device).manual_seed(seed_of(*names))


def numpy_generator(*names: Any) -> np.random.Generator:
    """Return a NumPy generator for the stream that `names` identify."""
    return np.random.Generator(np.random.Philox(seed_of(*names)))
