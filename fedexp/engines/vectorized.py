"""Engine that trains jobs of the same kind together, in stacks.

A stack is one batched computation for several clients, whose gradients a kernel
computes. Jobs that no kernel can compute run one after the other. The engine counts the
steps that were taken in stacks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import Literal

from fedexp.core.build import require
from fedexp.core.data import FederatedData
from fedexp.core.device import OutOfMemoryError, on_cpu
from fedexp.core.engine import Engine, EngineContext, probed
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import num_steps
from fedexp.core.numerics import Numerics
from fedexp.engines.kernels.kernel import NotStackableError, StackKernel, UnlikeJobsError
from fedexp.engines.kernels.linear import Linear
from fedexp.engines.kernels.vmapped import Vmapped
from fedexp.engines.rule import Workload
from fedexp.engines.serial import Serial, named_client_errors
from fedexp.engines.stack import train_stack
from fedexp.engines.timing import seconds_per_step

KERNELS: dict[str, type[StackKernel]] = {"linear": Linear, "vmap": Vmapped}
Kernel = Literal["auto", "linear", "vmap"]

_STACKS = (2, 4, 8, 16, 32)  # limits of the stack sizes that are timed on CUDA
_STACK_BEFORE_CHOICE = 8  # clients per stack until `choose` has set the number
# Number of stacks per block. A block consists of consecutive jobs, and only jobs of the
# same block are stacked together. Results are returned in job order, so a finished
# result waits in memory for earlier jobs. Because of the blocks, it waits only for jobs
# of the same block.
_WINDOW = 8
# Seconds. If a step of one client takes longer, the client already uses the whole
# device.
_SLOW_STEP = 0.25


@dataclass
class Vectorized(Engine):
    """An engine that trains jobs of the same kind together, in stacks.

    Args:
        stack: Maximum number of clients per stack, or ``auto``.
        kernel: ``linear`` or ``vmap``. With ``auto``, ``linear`` is used if it can
            compute a job, and otherwise ``vmap``.
    """

    stack: Literal["auto"] | int = "auto"
    kernel: Kernel = "auto"
    _serial: Serial = field(init=False, default_factory=Serial)
    _stacked_steps: int = field(init=False, default=0)
    # Whether a loss could not be stacked. This ends the timing of stack sizes.
    _failed: bool = field(init=False, default=False)
    # Maximum number of clients per stack after a larger stack ran out of memory.
    _limit: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        require(
            self.stack == "auto" or self.stack >= 1,
            f"engine.stack must be 'auto' or at least 1, got {self.stack}",
        )

    def choose(self, context: EngineContext) -> Engine:
        """Return an engine with a fixed stack and kernel, or `Serial`.

        If the user set `stack`, this engine is returned unchanged. Otherwise `Serial`
        is returned if no kernel can compute the jobs, or if stacking is not expected to
        be faster. On a CPU, a rule decides this (`fedexp.engines.rule`). On a GPU, a
        short timing decides it for long runs, which repay the timing. Shorter runs use
        the first kernel that can compute the jobs.
        """
        engine = self.choose_quietly(context)
        if (
            context.jobs
            and isinstance(engine, Serial)
            and context.numerics.device == "cpu"
            and self._kind(context.jobs[0])
        ):
            context.note(
                _one_by_one(
                    context.jobs[0],
                    "on a CPU stacking gains only for chains of linear layers "
                    "(to stack: engine.kernel=vmap)",
                )
            )

        return engine

    def choose_quietly(self, context: EngineContext) -> Engine:
        """Choose as `choose` does, but with fewer notes.

        This method is for callers that did not ask for stacks. On a CPU, it writes no
        note if the jobs could be stacked but stacking is not expected to be faster.
        """
        jobs = context.jobs
        self.open(context.numerics, context.threads)
        if jobs and not any(self._kind(job) for job in jobs):
            context.note(self._why_serial(jobs[0]))
        if self.stack != "auto":
            return self

        names: list[Kernel] = [
            name for name in self._names if jobs and all(self._fits(name, job) for job in jobs)
        ]
        cpu = context.numerics.device == "cpu"
        if not names or (cpu and self.kernel == "auto" and names[0] != "linear"):
            return Serial()
        workload = Workload.of(context)
        return (
            Vectorized(workload.stack_size, names[0])
            if cpu or not workload.is_long
            else self._timed(names, context)
        )

    def _timed(self, names: list[Kernel], context: EngineContext) -> Engine:
        """Return the fastest engine on the jobs of the context.

        Stacking is chosen only if it gains at least 5 % over serial training.
        """
        jobs = context.jobs
        serial = seconds_per_step(self._serial, jobs[:2], context.data)
        if serial > _SLOW_STEP:
            context.note(
                f"engine: serial, because a step of one client already takes {serial:.2g} s"
            )
            return Serial()

        # `split` makes as few stacks as the limit allows, all about equally large. The
        # sizes that it really forms are timed.
        limits = (min(size, context.most_stacked) for size in _STACKS)
        numbers = {-(-len(jobs) // limit) for limit in limits}
        stacks = sorted({-(-len(jobs) // number) for number in numbers} - {1})
        times: dict[tuple[Kernel, int], float] = {}
        for name in names:
            for stack in stacks:
                candidate = Vectorized(stack, name)
                candidate.note = context.note
                candidate.open(context.numerics, context.threads)
                seconds = seconds_per_step(candidate, jobs[:stack], context.data)
                if candidate._failed:
                    break  # the loss cannot be stacked, so this timed serial training
                if not candidate.stacked_steps:
                    continue  # the first jobs cannot be stacked with each other
                times[name, stack] = seconds
                if times[name, stack] > 1.5 * min(serial, *times.values()):
                    break  # larger stacks would exceed the cache even more

        choice, best = min(times.items(), key=lambda item: item[1], default=(None, math.inf))
        timed = [f"serial {1e3 * serial:.3g}"]
        timed += [f"{name} {stack}: {1e3 * s:.3g}" for (name, stack), s in times.items()]
        context.note(f"engine: timed milliseconds per local step: {', '.join(timed)}")
        return (
            Serial() if choice is None or best > 0.95 * serial else Vectorized(choice[1], choice[0])
        )

    def open(self, numerics: Numerics, threads: int) -> None:
        self._serial.open(numerics, threads)

    @property
    def jobs_at_once(self) -> int:
        return _STACK_BEFORE_CHOICE if self.stack == "auto" else self.stack

    @property
    def stacked_steps(self) -> int:
        return self._stacked_steps

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        """Return the positions of the jobs of each stack.

        A job that no kernel can compute is the only job of its stack.
        """
        size = self.jobs_at_once
        groups: dict[tuple[int, type[StackKernel] | None, Hashable, int | None], list[int]] = {}
        steps = [num_steps(job, data) for job in jobs]
        number_of_samples = [data.partition.size(job.client) for job in jobs]

        for i, job in enumerate(jobs):
            block = i // (_WINDOW * size)
            kind = self._kind(job)
            if kind is None and not job.trained:
                self.note(self._why_serial(job))
            alone = i if kind is None else None
            groups.setdefault((block, kind, _signature(job), alone), []).append(i)

        stacks = []
        for (_, kind, *_), members in groups.items():
            # Without padding, clients with equal numbers of samples can take the most
            # steps together.
            sizes = [0 if kind is None or kind.pads else n for n in number_of_samples]
            ordered = sorted(members, key=lambda i: (-steps[i], -sizes[i]))
            number = -(-len(ordered) // size)  # number of stacks, all of about the same size
            bounds = [len(ordered) * i // number for i in range(number + 1)]
            stacks += [sorted(ordered[a:b]) for a, b in pairwise(bounds)]

        return sorted(stacks)

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        source: dict[int, Iterator[ClientResult]] = {}
        for stack in self.split(jobs, data):
            source |= dict.fromkeys(stack, self._train([jobs[i] for i in stack], data))
        for i in range(len(jobs)):
            yield next(source.pop(i))

    def _train(self, jobs: list[ClientJob], data: FederatedData) -> Iterator[ClientResult]:
        """Yield the results of one stack.

        The stack is trained when its first result is requested. Jobs that turn out not
        to be stackable are trained one after the other. The next stack is tried again,
        even if it has the same code. The bits of a result therefore do not depend on
        stacks that this process trained before, and a resumed run has the same bits.
        There is one exception. If a stack needs too much memory, this process halves
        it, and does not train larger stacks later. This changes the last bits of
        results, and the user sees a note.
        """
        kind = self._kind(jobs[0])
        if kind is None or (len(jobs) == 1 and kind is Vmapped):
            yield from self._serial.map(jobs, data)
            return

        half = len(jobs) // 2
        if len(jobs) > self._limit:
            yield from self._train(jobs[:half], data)
            yield from self._train(jobs[half:], data)
            return

        net = self._serial.net(jobs[0])
        indices = [data.positions(job.client) for job in jobs]
        results: Iterator[ClientResult] | None = None
        stacked_steps: list[int] = []
        parts: list[list[int]] = []
        one_by_one = False
        try:
            with named_client_errors(jobs, data):
                stacked_steps, results = train_stack(
                    jobs, net, data.train, indices, data.num_classes, kind
                )
                # On a GPU, all results are computed inside this `try` block. If the
                # GPU's memory is too small for them, smaller stacks are tried.
                if not on_cpu(data.train.x.device):
                    results = iter(list(results))
        except UnlikeJobsError as error:
            # The jobs differ in a value that must be equal within a stack. Clients with
            # the same number of samples often have the same value, so the stack is
            # divided by numbers of samples. Other stacks are not changed, because they
            # may be trained in other processes.
            parts = _by_size(jobs, data)
            if len(parts) in (1, len(jobs)):
                self.note(_one_by_one(jobs[0], str(error)))
            one_by_one = len(parts) == 1
        except NotStackableError as error:
            # The jobs then run serially. If the loss itself has an error, it is raised
            # there.
            one_by_one = self._failed = True
            self.note(_one_by_one(jobs[0], str(error)))
        except OutOfMemoryError:
            if not half:
                raise
            results, self._limit = None, half
            self.note(
                f"engine: the device's memory is too small to stack {len(jobs)} clients, so at "
                f"most {half} are stacked. The last bits of results depend on this number"
            )
        finally:
            net.release()
        # The retry starts after the `except` blocks. The exception of the failed
        # attempt, which keeps tensors in memory, is deleted by then.
        if one_by_one:
            yield from self._serial.map(jobs, data)
            return
        if parts:
            trained = chain(*(self._train([jobs[i] for i in part], data) for part in parts))
            positions = chain(*parts)
            numbered = sorted(zip(positions, trained, strict=True), key=itemgetter(0))
            yield from map(itemgetter(1), numbered)
            return
        if results is None:
            yield from self._train(jobs, data)
            return

        for job, steps in zip(jobs, stacked_steps, strict=True):
            with named_client_errors([job], data):
                result = probed(job, next(results), data)
            net.release()
            self._stacked_steps += steps
            yield result

    @property
    def _names(self) -> list[Kernel]:
        return ["linear", "vmap"] if self.kernel == "auto" else [self.kernel]

    def _fits(self, name: Kernel, job: ClientJob) -> bool:
        return KERNELS[name].misfit(job, self._serial.net(job)) is None

    def _kind(self, job: ClientJob) -> type[StackKernel] | None:
        return next(
            (KERNELS[name] for name in self._names if not job.trained and self._fits(name, job)),
            None,
        )

    def _why_serial(self, job: ClientJob) -> str:
        """Return the note that explains why no kernel can compute `job`.

        The note contains only the reason for the most general kernel.
        """
        return _one_by_one(job, str(KERNELS[self._names[-1]].misfit(job, self._serial.net(job))))


def _by_size(jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
    """Return the positions of the jobs, grouped by the client's number of samples."""
    groups: dict[int, list[int]] = {}
    for i, job in enumerate(jobs):
        groups.setdefault(data.partition.size(job.client), []).append(i)
    return list(groups.values())


def _one_by_one(job: ClientJob, reason: str) -> str:
    return (
        f"engine: clients train one after the other "
        f"(trainer {type(job.trainer).__name__}): {reason}"
    )


def _signature(job: ClientJob) -> Hashable:
    """Return a key that must be equal for all jobs of a stack.

    The key contains neither the number of samples nor the number of epochs.
    """
    trees = (*job.shared.items(), *(job.state or {}).items())
    names = tuple((name, tuple(tree)) for name, tree in trees)
    code = type(job.trainer), repr(job.trainer), type(job.task), repr(job.task)
    return (job.start.spec, code, replace(job.local_training, epochs=1), job.frozen, names)
