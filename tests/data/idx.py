"""Helpers that write tiny files in the format of MNIST."""

import struct
from pathlib import Path

import numpy as np


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">I", 0x0800 + array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.tobytes())


def write_mnist(root: Path, name: str = "MNIST") -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3": pixels(30, 28, 28),
        "train-labels-idx1": np.arange(30, dtype=np.uint8) % 10,
        "t10k-images-idx3": pixels(20, 28, 28, seed=1),
        "t10k-labels-idx1": np.arange(20, dtype=np.uint8) % 10,
    }
    for part, array in arrays.items():
        write_idx(root / name / "raw" / f"{part}-ubyte", array)
    return arrays
