"""Decision rule for the engine that trains a run's clients on a CPU.

The rule uses the model, the work and the number of threads.

- Chains of linear layers are stacked in this process, with any number of threads.
- Everything else trains one client after the other. It trains in local workers of one
  thread each if that is worth their start, or else in this process. It is stacked
  (``engine.kernel=vmap``) only if asked for.

Nothing is timed. Equal runs have the same engine and are bit-identical, whatever else
the machine does. The constants were measured on two cores and are first values.
``scripts/bench_engines.py`` measures what they are worth on a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.engine import EngineContext
from fedexp.core.kernel import batch_ranges
from fedexp.core.trees import num_bytes

# A stack saves calls and autograd: 20 small MLPs train three times as fast stacked as
# one by one. The gain ends when the weights, which every step reads and writes, do not
# fit into the cache. Stacks above 20 MiB gain nothing.
_STACK, _STACK_BYTES = 32, 20 << 20
# A network of 1.7 million parameters gained by workers. One of 11 million (ResNet-18)
# did not. The limit in between is not known.
_WORKERS_PARAMETERS = 4_000_000
# This much work takes one process a few seconds. Below it, starting workers is assumed
# to cost more than they gain.
_LONG = 1e10
_STEP = 2_500_000  # work of a step besides its arithmetic


@dataclass(frozen=True)
class Workload:
    """The quantities that the rule uses.

    Args:
        jobs: Number of jobs of the first step that trains.
        most_stacked: Upper bound on the clients of a stack (see `EngineContext`).
        parameters: Number of parameters of the largest client model.
        bytes: Bytes of the largest client model.
        steps: Number of local steps of the whole run, if every round is like the first.
        batch_size: Batch size of each step.
        threads: Number of threads that all processes of the run share.
    """

    jobs: int
    most_stacked: int
    parameters: int
    bytes: int
    steps: int
    batch_size: int
    threads: int

    @classmethod
    def of(cls, context: EngineContext) -> Workload:
        """Return the workload of a context that has jobs."""
        models = {id(job.start): job.start.params for job in context.jobs}.values()
        sizes = [context.data.partition.size(job.client) for job in context.jobs]
        steps_per_round = sum(
            sum(1 for _ in batch_ranges(n, job.local_training, 1))
            for n, job in zip(sizes, context.jobs, strict=True)
        )
        return cls(
            jobs=len(context.jobs),
            most_stacked=context.most_stacked,
            parameters=max(sum(value.numel() for value in params.values()) for params in models),
            bytes=max(map(num_bytes, models)),
            steps=steps_per_round * context.rounds,
            batch_size=context.jobs[0].local_training.batch_size,
            threads=context.threads,
        )

    @property
    def stack_size(self) -> int:
        """Maximum number of clients of a stack.

        It depends only on the model, because a step with fewer jobs makes smaller
        stacks (`Vectorized.split`).
        """
        return max(1, min(_STACK, self.most_stacked, _STACK_BYTES // self.bytes))

    @property
    def is_long(self) -> bool:
        """Whether the run trains for seconds.

        The measure is the number of parameters times samples, plus what steps cost
        besides. It is the same on every machine.
        """
        return self.steps * (_STEP + self.parameters * self.batch_size) >= _LONG

    @property
    def repays_workers(self) -> bool:
        """Whether clients that are not stacked train faster in workers.

        The comparison is with all threads in one process.
        """
        return (
            self.threads > 1
            and self.jobs > 1
            and self.parameters <= _WORKERS_PARAMETERS
            and self.is_long
        )
