"""Decision rule for the engine that trains a run's clients on a CPU.

The rule uses the model, the work and the number of threads.

- Clients whose networks are chains of linear layers are trained in stacks in this
  process, with any number of threads. A stack trains several clients as one batched
  computation.
- Clients with other networks are not stacked, unless the user asks for it
  (``engine.kernel=vmap``). They train in worker processes of one thread each if the
  workers are expected to save more time than their start takes. Otherwise they train
  one after the other in this process.

Nothing is timed. Equal runs therefore use the same engine, also on a busy machine. The
constants were measured on two cores and are first estimates.
``scripts/bench_engines.py`` compares the choice with the fastest engine on a machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.core.engine import EngineContext
from fedexp.core.kernel import largest_batch, num_steps
from fedexp.core.trees import num_bytes

# Largest stack, in clients and in bytes of their parameters. Stacking saves the
# overhead of many PyTorch calls and of autograd. For example, 20 small MLPs train three
# times as fast in a stack as one after the other. Every step reads and writes all
# weights of the stack. If they do not fit into the processor's cache, stacking gains
# nothing: stacks above 20 MiB were not faster.
_STACK, _STACK_BYTES = 32, 20 << 20
# Most parameters of a network that is trained in workers. A network with 1.7 million
# parameters trained faster in workers. A network with 11 million (ResNet-18) did not.
# The exact limit has not been measured.
_WORKERS_PARAMETERS = 4_000_000
# Amount of work, in parameters times samples, that takes one process a few seconds. For
# less work, starting workers is assumed to cost more time than the workers save.
_LONG = 1e10
# Overhead of a step besides its arithmetic, in the unit of `_LONG`.
_STEP = 2_500_000


@dataclass(frozen=True)
class Workload:
    """The quantities that the rule uses.

    Args:
        jobs: Number of jobs in the first step that has jobs.
        most_stacked: Upper bound on the clients of a stack (see `EngineContext`).
        parameters: Number of parameters of the largest client model.
        bytes: Bytes of the parameters of the largest client model.
        steps: Number of local steps of all clients in this round and all later rounds.
            It is assumed that every round has the same jobs.
        batch_size: Number of samples in the largest batch (see `largest_batch`).
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
        return cls(
            jobs=len(context.jobs),
            most_stacked=context.most_stacked,
            parameters=max(sum(value.numel() for value in params.values()) for params in models),
            bytes=max(map(num_bytes, models)),
            steps=sum(num_steps(job, context.data) for job in context.jobs) * context.rounds,
            batch_size=largest_batch(context.jobs, context.data),
            threads=context.threads,
        )

    @property
    def stack_size(self) -> int:
        """Maximum number of clients of a stack.

        The number depends on the model, and on `most_stacked` if several processes
        share the jobs. A step with fewer jobs has smaller stacks (`Vectorized.split`).
        """
        return max(1, min(_STACK, self.most_stacked, _STACK_BYTES // self.bytes))

    @property
    def is_long(self) -> bool:
        """Whether training is expected to take at least a few seconds.

        The work is counted in parameters times samples, plus a fixed overhead per step.
        No time is measured, so the answer is the same on every machine.
        """
        return self.steps * (_STEP + self.parameters * self.batch_size) >= _LONG

    @property
    def repays_workers(self) -> bool:
        """Whether unstacked clients are expected to train faster in workers.

        Workers are compared with one process that uses all threads.
        """
        return (
            self.threads > 1
            and self.jobs > 1
            and self.parameters <= _WORKERS_PARAMETERS
            and self.is_long
        )
