"""Engine interface: how client jobs are executed.

No engine depends on a particular method, and no method on a particular engine.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fedexp.core.data import FederatedData
from fedexp.core.device import to_device
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.phases import phase
from fedexp.core.seeds import seed_of
from fedexp.core.weights import Weights


@dataclass(frozen=True, eq=False)
class EngineContext:
    """The information from which an engine makes its choices.

    The choices change at most the last bits of a result.

    Args:
        jobs: Jobs of the first step that has any, with client states attached.
        data: Data of the run.
        rounds: Number of remaining rounds, including the current one.
        threads: Number of threads that all processes of the run share.
        numerics: Numerics of the run. Their `engine` and `threads` are set after the
            engine has made its choices.
        note: Callback that shows the user what was chosen and why.
        most_stacked: Upper bound on the number of clients per stack. It is set if
            several processes share the jobs of a step. Every process then gets jobs.
    """

    jobs: Sequence[ClientJob]
    data: FederatedData
    rounds: int
    threads: int
    numerics: Numerics
    note: Callable[[str], None] = field(default=lambda text: None)
    most_stacked: int = sys.maxsize

    def per_process(self, processes: int, threads: int) -> EngineContext:
        """Return the context of the engine in each of several processes.

        Args:
            processes: Number of processes that divide the jobs of a step.
            threads: Number of threads of each process.
        """
        bound = max(1, -(-len(self.jobs) // processes)) if processes > 1 else self.most_stacked
        return replace(
            self,
            threads=threads,
            numerics=replace(self.numerics, threads=threads),
            most_stacked=bound,
        )


class Engine(ABC):
    """An executor of client jobs on the clients' data.

    The dataclass fields of an engine are its config. The run calls `choose` or
    `restore`, then `open`, then `map` once per step, and at the end `close`.
    """

    # Callback, set by the run, that shows the user why jobs run as they do.
    note: Callable[[str], None] = staticmethod(lambda text: None)

    def choose(self, context: EngineContext) -> Engine:
        """Return this engine with all choices made that affect the bits of a result.

        On a GPU it may time candidates on the jobs of the context.
        """
        return self

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        """Return the engine that resumes a run of an earlier launch.

        Args:
            computing: Engine that computed in the earlier launch.
            threads: Number of threads of each process in the earlier launch.
            num_threads: Number of threads that all processes of this launch share.
        """
        return computing

    @property
    def computing(self) -> Engine:
        """The engine whose arithmetic this one uses.

        It is this engine itself, unless this engine passes its jobs to another engine.
        """
        return self

    def threads_each(self, num_threads: int) -> int:
        """Return the number of threads of each process, including the calling process.

        Args:
            num_threads: Number of threads that all processes share.
        """
        return num_threads

    def open(self, numerics: Numerics, threads: int) -> None:
        """Prepare to train.

        Args:
            numerics: Numerics of the run.
            threads: Number of threads that all processes share.
        """

    @abstractmethod
    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        """Yield the results in the order of the jobs.

        The runner closes the stream. Only one stream is open at a time. The probes of a
        job run in the process that trained the model. If `ClientJob.trained` is true,
        they run in the process that receives the model.

        Raises:
            ClientError: A job failed. The message names the client.
        """

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        """Divide the jobs into parts that can run separately without a change of bits.

        Different processes may run the parts. The division is a function of the jobs
        only. It does not depend on the number of processes or their speed.

        Returns:
            The ascending positions of the jobs of each part.
        """
        return [[position] for position in range(len(jobs))]

    @property
    def jobs_at_once(self) -> int:
        """Number of clients that train at the same time on this machine."""
        return 1

    @property
    def stacked_steps(self) -> int:
        """Number of local steps so far that ran stacked with steps of other clients."""
        return 0

    @property
    def cached_steps(self) -> int:
        """Number of local steps so far that were not executed.

        Their results were read from the client cache, which earlier runs filled.
        """
        return 0

    def close(self) -> None:
        """Free processes and memory."""


def describe(engine: Engine) -> dict[str, Any]:
    """Return the config node that builds an engine again."""
    kind = type(engine)
    values = {f.name: getattr(engine, f.name) for f in fields(engine) if f.init}  # type: ignore[arg-type]
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}


def probed(job: ClientJob, result: ClientResult, data: FederatedData) -> ClientResult:
    """Run the job's probes on the model of `result`, and return it with the answers.

    The probes run in this process. If `result` contains NaN or infinity, no probe runs.
    The runner raises an error for such a result or skips the client.
    """
    if not job.probes or result.nonfinite() is not None:
        return result

    began = time.perf_counter()

    samples, weights = data.train, result.weights
    net = Net.for_evaluation(weights)
    index = to_device(data.positions(job.client), samples.x.device)

    with phase("probe"), torch.no_grad():
        answers = {
            probe.name: probe(
                net, weights, job.task, samples, index, seed_of(job.seed, "probe", probe.name)
            )
            for probe in job.probes
        }

    return replace(result, probes=answers, probe_seconds=time.perf_counter() - began)


def answered(job: ClientJob, data: FederatedData) -> ClientResult:
    """Return the result of a job that only runs probes (`ClientJob.trained`)."""
    model = ClientResult(job.client, job.start, data.partition.size(job.client), 0, {}, None, {})
    return replace(probed(job, model, data), weights=Weights(job.start.spec, {}, {}))
