"""The engine interface: who executes client jobs. Engines know no method, methods know no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from fedexp.core.data import FederatedData
from fedexp.core.jobs import ClientJob, ClientResult


@dataclass(frozen=True)
class Numerics:
    """What a run's bits depend on besides its config and code. Fixed at first launch, reused on resume."""

    engine: str
    threads: int
    device: str
    dtype: str


class Executor(ABC):
    """Runs jobs on the clients' data."""

    @abstractmethod
    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        """Results as a stream, always in job order; the runner closes it.

        Raises:
            ClientError: a job failed; names the client.
        """
