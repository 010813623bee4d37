"""The engine interface: who executes client jobs. Engines know no method, methods know no engine."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fedexp.core.data import FederatedData
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.phases import phase
from fedexp.core.seeds import seed_of
from fedexp.core.weights import Weights


@dataclass(frozen=True, eq=False)
class EngineContext:
    """What an engine may look at before it makes its choices, which change a result's last bits at most.

    Args:
        jobs: those of the first step that has some, client states attached.
        rounds: how many follow, this one included.
        threads: the budget that all of a run's processes share.
        numerics: what is fixed already; its engine is still open.
        note: tells the user what was chosen and why.
        most_stacked: bound of a stack, where several processes share a step's jobs and each shall have some.
    """

    jobs: Sequence[ClientJob]
    data: FederatedData
    rounds: int
    threads: int
    numerics: Numerics
    note: Callable[[str], None] = field(default=lambda text: None)
    most_stacked: int = sys.maxsize

    def per_process(self, processes: int, threads: int) -> EngineContext:
        """What the engine in each of `processes` looks at, which divide a step's jobs and have `threads` each."""
        bound = max(1, -(-len(self.jobs) // processes)) if processes > 1 else self.most_stacked
        return replace(
            self,
            threads=threads,
            numerics=replace(self.numerics, threads=threads),
            most_stacked=bound,
        )


class Engine(ABC):
    """Runs jobs on the clients' data. Its dataclass fields are its config.

    Its life: `choose` or `restore`, `open`, `map`s, `close`.
    """

    # Tells the user why jobs run as they do; set by the run.
    note: Callable[[str], None] = staticmethod(lambda text: None)

    def choose(self, context: EngineContext) -> Engine:
        """This engine with every choice made that bits depend on; on CUDA it may time candidates on the trial's jobs."""
        return self

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        """The engine for a run that was begun with `computing` at `threads` a process, under today's `num_threads`."""
        return computing

    @property
    def computing(self) -> Engine:
        """The engine whose arithmetic this one uses: itself, unless it hands jobs to others."""
        return self

    def threads_each(self, num_threads: int) -> int:
        """Threads of each process, this one included, under a budget for all."""
        return num_threads

    def open(self, numerics: Numerics, threads: int) -> None:
        """Get ready to train under `numerics`, with a budget of `threads` for all processes."""

    @abstractmethod
    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        """Results as a stream, always in job order; the runner closes it. One stream at a time.

        Probes are answered in the process that trained the model, or that was sent it where it is `trained` already.

        Raises:
            ClientError: a job failed; names the client.
        """

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        """The jobs in parts that may be mapped apart, by other processes, without changing a bit: ascending positions.

        A function of the jobs alone, so that neither the number of processes nor their speed decides.
        """
        return [[position] for position in range(len(jobs))]

    @property
    def jobs_at_once(self) -> int:
        """Clients that train at the same time on this machine."""
        return 1

    @property
    def stacked_steps(self) -> int:
        """Local steps so far that ran stacked with other clients' steps."""
        return 0

    @property
    def cached_steps(self) -> int:
        """Local steps so far that were recalled from earlier runs and not executed."""
        return 0

    def close(self) -> None:
        """Free processes and memory."""


def describe(engine: Engine) -> dict[str, Any]:
    """An engine as the config node that builds it again."""
    kind = type(engine)
    values = {f.name: getattr(engine, f.name) for f in fields(engine) if f.init}  # type: ignore[arg-type]
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}


def probed(job: ClientJob, result: ClientResult, data: FederatedData) -> ClientResult:
    """`result` with the answers to the job's probes on its model, from this process; the runner refuses a non-finite one."""
    if not job.probes or result.nonfinite() is not None:
        return result
    began = time.perf_counter()
    samples, weights = data.train, result.weights
    first = next(iter(weights.params.values()))
    net = Net(weights.spec, first.device, first.dtype)
    net.train(False)
    index = data.positions(job.client)
    with phase("probe"), torch.no_grad():
        answers = {
            probe.name: probe(
                net, weights, job.task, samples, index, seed_of(job.seed, "probe", probe.name)
            )
            for probe in job.probes
        }
    return replace(result, probes=answers, probe_seconds=time.perf_counter() - began)


def answered(job: ClientJob, data: FederatedData) -> ClientResult:
    """What comes of a `trained` job: the answers to its probes alone."""
    model = ClientResult(job.client, job.start, data.partition.size(job.client), 0, {}, None, {})
    return replace(probed(job, model, data), weights=Weights(job.start.spec, {}, {}))
