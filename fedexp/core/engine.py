"""The engine interface: how client jobs are executed.

An engine works for every method, and a method works with every engine.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from fedexp.core.data import FederatedData
from fedexp.core.device import to_device
from fedexp.core.errors import FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics
from fedexp.core.phases import phase
from fedexp.core.seeds import seed_of
from fedexp.core.weights import Weights


@dataclass(frozen=True, eq=False)
class EngineContext:
    """The information that an engine uses to choose how it executes jobs.

    One choice is the number of clients that train together as one stacked model. The
    choices change at most the last bits of a result.

    Args:
        jobs: Jobs of the first step that has jobs, with client states attached.
        data: Data of the run.
        rounds: Number of remaining rounds, including the current one.
        threads: Number of threads that all processes of the run share.
        numerics: Numerics of the run. Their fields `engine` and `threads` are set after
            the engine has made its choices.
        note: Callback that shows the user what was chosen and why.
        most_stacked: Upper bound on the number of clients per stack. It is set if
            several processes share the jobs of a step. Without it, one stack could
            contain all jobs and leave other processes without work.
    """

    jobs: Sequence[ClientJob]
    data: FederatedData
    rounds: int
    threads: int
    numerics: Numerics
    note: Callable[[str], None] = field(default=lambda text: None)
    most_stacked: int = sys.maxsize

    def per_process(self, processes: int, threads: int) -> EngineContext:
        """Return the context for an engine that runs in one of several processes.

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

    The dataclass fields of an engine are its config. A run calls these methods in this
    order: `choose` (or `restore` if it is resumed), `open`, `map` once per step, and
    `close`.
    """

    # Callback that shows the user how jobs are executed and why. The run sets it.
    note: Callable[[str], None] = staticmethod(lambda text: None)

    def choose(self, context: EngineContext) -> Engine:
        """Make all choices that affect the bits of a result.

        On a GPU the engine may run jobs of the context in several ways, to find the
        fastest.

        Returns:
            An engine with these choices.
        """
        return self

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        """Return the engine with which an interrupted run is resumed.

        Args:
            computing: The engine that executed the jobs before the interruption.
            threads: Number of threads of each process before the interruption.
            num_threads: Number of threads that all processes share after the resume.
        """
        return computing

    @property
    def computing(self) -> Engine:
        """The engine that does the arithmetic.

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
        """Prepare to execute jobs, for example start processes.

        Args:
            numerics: Numerics of the run.
            threads: Number of threads that all processes share.
        """

    @abstractmethod
    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        """Execute the jobs and yield their results in the order of the jobs.

        The runner closes the returned generator. Only one generator is open at a time.
        The probes of a job run in the process that trained the model. If
        `ClientJob.trained` is true, nothing is trained, and the probes run in the
        process that receives the model.

        Raises:
            ClientError: A job failed. The message names the client.
        """

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        """Divide the jobs into parts that different processes may run.

        The results are bit-identical to those of all jobs in one process. The division
        depends only on the jobs, not on the number of processes or their speed.

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
        """Number of local steps so far that clients took as one stacked model."""
        return 0

    @property
    def cached_steps(self) -> int:
        """Number of local steps so far that were not executed.

        The results of these steps were read from the client cache, in which earlier
        runs had stored them.
        """
        return 0

    def close(self) -> None:
        """Free processes and memory."""


def describe(engine: Engine) -> dict[str, Any]:
    """Return a config node from which an equal engine can be built."""
    kind = type(engine)
    values = {f.name: getattr(engine, f.name) for f in fields(engine) if f.init}  # type: ignore[arg-type]
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}


def execute(
    engine: Engine, jobs: Sequence[ClientJob], data: FederatedData
) -> Generator[ClientResult, None, None]:
    """Yield the results of `engine`, and check that they fit the jobs.

    An engine that contains another engine can use this function, too. The error then
    names the engine that is wrong.

    Raises:
        FedexpError: The engine does not yield one result per job in the order of the
            jobs.
    """
    with contextlib.closing(engine.map(jobs, data)) as results:
        for job, result in itertools.zip_longest(jobs, results):
            if job is None or result is None or result.client != job.client:
                expected, got = (
                    "no further result" if one is None else f"the result of client {one.client}"
                    for one in (job, result)
                )
                raise FedexpError(
                    "the results of the engine do not fit the jobs",
                    where=f"{type(engine).__name__}.map",
                    expected=expected,
                    got=got,
                    do="yield one result per job, in the order of the jobs",
                )
            yield result


def probed(job: ClientJob, result: ClientResult, data: FederatedData) -> ClientResult:
    """Run the job's probes on the model of `result`.

    The probes run in this process. If `result` contains NaN or infinity, no probe runs,
    because the runner raises an error for such a result or skips the client.

    Returns:
        `result` with the answers of the probes.
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
