"""The engine that is fastest here: chosen when the first clients train, then part of the run's numerics."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, Trial
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.engines.rule import Load
from fedexp.engines.serial import Serial
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers


@dataclass
class Auto(Engine):
    """Vectorized where stacking pays; elsewhere, on a CPU, local workers where they do (`fedexp.engines.rule`); else serial."""

    def settle(self, trial: Trial) -> Engine:
        here = Vectorized().settled(trial)
        if not isinstance(here, Serial) or trial.numerics.device != "cpu" or not trial.jobs:
            return here
        return Workers() if Load.of(trial).repays_workers else here

    def adopt(self, computing: Engine, threads: int, budget: int) -> Engine:
        """Workers were chosen where a process was given fewer threads than there are."""
        return Workers().adopt(computing, threads, budget) if threads < budget else computing

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        raise RuntimeError("engine=auto makes its choice before it trains")
