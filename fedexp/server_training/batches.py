"""Batches of server data, whose random order depends only on a seed and names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedexp.core.build import require
from fedexp.core.seeds import torch_generator


def batches(
    n: int,
    batch_size: int,
    *names: Any,
    epochs: int | None = 1,
    start: int = 0,
    drop_last: bool = False,
) -> Iterator[Tensor]:
    """Yield batches of sample indices for one or more shuffled passes over `n` samples.

    Each pass has a new random order.

    Args:
        n: Number of samples.
        batch_size: Number of samples per batch.
        *names: Names that identify the random stream, beginning with the run's seed.
            Example: ``batches(len(bank), 128, env.seed, "student", epoch)``.
        epochs: Number of passes. None: endless.
        start: Number of batches to skip at the start. A resumed run uses it to continue
            where it stopped. No random order is drawn for passes that are skipped
            completely.
        drop_last: Whether to leave out the last batch of a pass if it is smaller than
            `batch_size`.

    Yields:
        Index tensors of shape (batch,), int64, on the CPU.

    Raises:
        ValueError: A pass has no batch.
    """
    per_epoch = n // batch_size if drop_last else -(-n // batch_size)
    require(per_epoch > 0, f"{n} samples do not fill a batch of {batch_size}")
    for epoch in (
        itertools.count(start // per_epoch) if epochs is None else range(start // per_epoch, epochs)
    ):
        order = torch.randperm(n, generator=torch_generator(*names, "order", epoch))
        first = start % per_epoch if epoch == start // per_epoch else 0
        yield from itertools.islice(torch.split(order, batch_size), first, per_epoch)


def on_device(order: Iterable[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """Copy all batches of `order` to `device` in one operation.

    Training steps then do not wait for a copy from the host.
    """
    parts = list(order)
    return torch.split(torch.cat(parts).to(device), [len(part) for part in parts]) if parts else ()
