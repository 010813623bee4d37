"""Random seeds and generators that are derived from names.

A name is a text or number such as ``"client"`` or a round. No global generator is used,
so a checkpoint does not need to store the state of a generator.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def seed_of(*names: Any) -> int:
    """Return a 63-bit seed that depends only on `names`.

    An example is ``seed_of(run_seed, "client", round, client)``. The same names give
    the same seed in every process and every version of fedexp.

    Args:
        names: Values of type str, int, float, bool or None.
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(*names: Any, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a PyTorch generator whose seed is ``seed_of(*names)``."""
    return torch.Generator(device=device).manual_seed(seed_of(*names))


def numpy_generator(*names: Any) -> np.random.Generator:
    """Return a NumPy generator whose seed is ``seed_of(*names)``."""
    return np.random.Generator(np.random.Philox(seed_of(*names)))
