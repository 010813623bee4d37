"""Choice of the engine that is expected to be fastest for a run.

The engine is chosen just before the first clients train. It is then stored in the run's
numerics, so that a resumed run uses the same engine.
"""

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
    """An engine that chooses another engine, by the first of these rules that applies.

    1. `Vectorized`, if stacking is expected to be faster.
    2. `Workers`, if the device is a CPU and local workers are expected to be faster
       (`fedexp.engines.rule`).
    3. `Serial`.
    """

    def choose(self, context: EngineContext) -> Engine:
        here = Vectorized().choose_quietly(context)
        if not isinstance(here, Serial) or context.numerics.device != "cpu" or not context.jobs:
            return here
        return Workers() if Workload.of(context).repays_workers else here

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        """Return the engine that an earlier launch chose.

        `computing` is the engine that trained inside each process of that launch. If
        each process had fewer threads than the run has now, `Workers` divides the jobs
        among as many of these processes as fit. This changes no bit of a result, also
        if the earlier launch had only one process.
        """
        return (
            Workers().restore(computing, threads, num_threads)
            if threads < num_threads
            else computing
        )

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        raise RuntimeError("engine=auto must choose an engine before it trains")
