"""The engine that is fastest here: chosen before round 1, then part of the run's numerics."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, Trial, describe
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.engines.timing import WORTH_TIMING, num_steps, seconds_a_step, threads, trainable, work
from fedexp.engines.vectorized import Vectorized
from fedexp.engines.workers import Workers

_WORTH_WORKERS = 10.0  # seconds of training in one process; below, starting workers costs more than they gain
_ROUNDS = 2  # of stacks that each worker is given in the timing


@dataclass
class Auto(Engine):
    """Serial or vectorized, in this process or in local workers.

    Short runs are decided by rule (see `Vectorized.settle`), so that they repeat to the bit; longer ones by short timings.
    """

    def settle(self, trial: Trial) -> Engine:
        here = Vectorized().settle(trial)
        jobs = trainable(trial)
        if trial.threads == 1 or trial.numerics.device != "cpu" or len(jobs) <= 1 or work(trial) < WORTH_TIMING:
            return here
        whole = seconds_a_step(here, jobs[:8], trial.data) * num_steps(trial) * trial.rounds
        if whole < _WORTH_WORKERS:
            return here
        with threads(1):
            inner = Vectorized().settle(replace(trial, threads=1, note=lambda text: None))
            spread = Workers(inner=describe(inner))
            size = inner.stack if isinstance(inner, Vectorized) and inner.stack != "auto" else 1
            sample = jobs[: _ROUNDS * trial.threads * size]
            try:
                spread.open(replace(trial.numerics, threads=1), trial.threads)
                beside = seconds_a_step(spread, sample, trial.data)
            except BaseException:
                spread.close()
                raise
        alone = seconds_a_step(here, sample, trial.data)
        trial.note(
            f"engine: milliseconds a local step, timed: {1e3 * alone:.3g} in one process with {trial.threads} threads, "
            f"{1e3 * beside:.3g} in {trial.threads} workers"
        )
        if beside < 0.95 * alone:
            return spread
        spread.close()
        return here

    def adopt(self, computing: Engine, threads: int, budget: int) -> Engine:
        """Workers were chosen where a process was given fewer threads than there are."""
        return Workers().adopt(computing, threads, budget) if threads < budget else computing

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        raise RuntimeError("engine=auto makes its choice before it trains")
