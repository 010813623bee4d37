"""The engine that is fastest here: chosen when the first clients train, then part of the run's numerics."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, EngineContext
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.engines.rule import Workload
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers


@dataclass
class Auto(Engine):
    """Vectorized where stacking pays; elsewhere, on a CPU, local workers where they do (`fedexp.engines.rule`); else serial."""

    def choose(self, context: EngineContext) -> Engine:
        here = Vectorized().choose_quietly(context)
        if not isinstance(here, Serial) or context.numerics.device != "cpu" or not context.jobs:
            return here
        return Workers() if Workload.of(context).repays_workers else here

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        """Workers were chosen where a process was given fewer threads than there are."""
        return (
            Workers().restore(computing, threads, num_threads)
            if threads < num_threads
            else computing
        )

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        raise RuntimeError("engine=auto makes its choice before it trains")
