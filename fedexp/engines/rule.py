"""Which engine trains a run's clients on a CPU: a rule of the model, the work and the threads.

- Chains of linear layers are stacked in this process, with however many threads.
- All else trains one client after the other: in local workers of one thread each where that is worth their start, or in this
  process. It is never stacked (``engine.kernel=vmap``) unless asked for.

Nothing is timed: runs alike have the same engine and the same bits, whatever else the machine does. The constants are first
figures of two cores; ``scripts/bench_engines.py`` measures what they are worth on a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.engine import EngineContext
from fedexp.core.kernel import batch_ranges
from fedexp.core.trees import num_bytes

# A stack saves calls and autograd (20 small MLPs at once train three times as fast as one by one) until its weights, which every
# step reads and writes, leave the cache: stacks above 20 MiB gain nothing.
_STACK, _STACK_BYTES = 32, 20 << 20
# A network of 1.7 million parameters gained by workers, one of 11 million (ResNet-18) did not; where between is not known.
_WORKERS_PARAMETERS = 4_000_000
# So much work takes one process a few seconds; below, starting workers is taken to cost more than they gain.
_LONG = 1e10
_STEP = 2_500_000  # of work: what a step costs besides its arithmetic


@dataclass(frozen=True)
class Workload:
    """What the rule looks at.

    Args:
        jobs: of the first step that trains; most_stacked: see `EngineContext`.
        parameters, bytes: of the largest client's model.
        steps: local steps of the whole run, if every round is like the first; batch_size: of each.
        threads: the run's budget.
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
        """That of a trial, which has jobs."""
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
        """Clients a stack at most: of the model alone, as a step with fewer jobs makes smaller stacks (`Vectorized.split`)."""
        return max(1, min(_STACK, self.most_stacked, _STACK_BYTES // self.bytes))

    @property
    def is_long(self) -> bool:
        """Whether the run trains for seconds, in parameters times samples and what steps cost besides; the same anywhere."""
        return self.steps * (_STEP + self.parameters * self.batch_size) >= _LONG

    @property
    def repays_workers(self) -> bool:
        """Whether clients that are not stacked train faster in workers than with all threads in one process."""
        return (
            self.threads > 1
            and self.jobs > 1
            and self.parameters <= _WORKERS_PARAMETERS
            and self.is_long
        )
