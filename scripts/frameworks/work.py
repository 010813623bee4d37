"""The work that every framework has to do, and the record of what a framework did.

`prepare.py` writes the work to a folder. A framework's script reads this folder,
trains, and writes its record to another file. This module needs only NumPy, because it
is imported in the environments of all frameworks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Work:
    """The federated averaging that every framework executes.

    Args:
        workload: Name of the workload in `bare_loop.WORKLOADS`.
        lr: Step size of local SGD.
        batch_size: Samples per local step.
        clients: Number of clients.
        threads: Number of threads of the whole framework.
        names: fedexp's names of the layers' parameters.
        x: Normalised images, (samples, 1, 28, 28), float32.
        y: Labels, (samples,), int64.
        cohorts: Participants of every round, (rounds, participants).
        orders: Positions of each participant's samples in `x`, in the order in which it
            uses them, (rounds, participants, samples per client).
        weights: Initial weights, in the order of the model's layers and in PyTorch's
            layout.
    """

    workload: str
    lr: float
    batch_size: int
    clients: int
    threads: int
    names: list[str]
    x: np.ndarray
    y: np.ndarray
    cohorts: np.ndarray
    orders: np.ndarray
    weights: list[np.ndarray]

    def write(self, folder: Path) -> None:
        """Write the work to the files of `folder`."""
        settings = {
            "workload": self.workload,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "clients": self.clients,
            "threads": self.threads,
            "names": self.names,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        for name in ("x", "y", "cohorts", "orders"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.savez(folder / "weights.npz", *self.weights)

    @classmethod
    def read(cls, folder: Path) -> Work:
        """Read the work that `write` wrote."""
        arrays = {name: np.load(folder / f"{name}.npy") for name in ("x", "y", "cohorts", "orders")}
        settings = json.loads((folder / "settings.json").read_text())
        return cls(**settings, **arrays, weights=read_weights(folder / "weights.npz"))


def read_weights(path: Path) -> list[np.ndarray]:
    """Read arrays in the order in which they were written."""
    with np.load(path) as stored:
        return [stored[f"arr_{i}"] for i in range(len(stored.files))]


def write_record(
    path: Path,
    seconds: Sequence[float],
    steps: Sequence[int],
    samples: Sequence[int],
    weights: Sequence[np.ndarray],
) -> None:
    """Write a framework's times, steps, samples and final weights.

    Args:
        path: File of the record, without suffix.
        seconds: Wall time of every round.
        steps: Local steps of every round, counted by the training code itself.
        samples: Number of samples in the batches of these steps, for every round.
        weights: Final global weights, in the order and layout of `Work.weights`.
    """
    record = {"seconds": list(seconds), "steps": list(steps), "samples": list(samples)}
    path.with_suffix(".json").write_text(json.dumps(record))
    np.savez(path.with_suffix(".npz"), *weights)


def arguments() -> tuple[Work, Path, list[str]]:
    """Return the work, the path of the record and the other arguments of a script."""
    return Work.read(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:]
