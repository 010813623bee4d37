"""A limit on attempts and time for schemes that sample until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedexp.core.build import require
from fedexp.core.errors import DataError
from fedexp.data.partition import Partitioner


@dataclass(frozen=True, kw_only=True)
class BoundedPartitioner(Partitioner):
    """A scheme that samples again until its condition holds, or a bound is reached.

    Args:
        max_draws: Largest number of attempts.
        max_seconds: Largest CPU time of all attempts together, in seconds. The time of
            other processes does not count.
    """

    # What the two limits apply to, for messages.
    limited: ClassVar[str] = "split"

    max_draws: int = 100_000
    max_seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_draws >= 1, f"max_draws must be at least 1, got {self.max_draws}")
        require(self.max_seconds > 0, f"max_seconds must be positive, got {self.max_seconds}")

    def refuse_small_pool(self, samples: int, clients: int) -> None:
        """Refuse a pool that is too small to give every client `min_size` samples.

        The policies ``allow`` and ``drop`` accept such a pool.

        Raises:
            DataError: The pool is too small.
        """
        if samples < self.min_size * clients and self.on_small in ("error", "repair"):
            raise DataError(
                f"{samples} samples cannot give {clients} clients min_size={self.min_size} each",
                where=f"partition {self.name}",
                expected=f"at least {clients * self.min_size} samples",
                got=samples,
                do="lower partition.min_size or use fewer clients",
            )

    def attempts(self) -> Iterator[int]:
        """Count the attempts, 1, 2, 3 ..., until a bound is reached.

        At least one attempt is always yielded.
        """
        start = time.thread_time()
        for attempt in range(1, self.max_draws + 1):
            yield attempt
            if time.thread_time() - start > self.max_seconds:
                return
