"""Equal jobs stacked and trained as one; what does not fit runs one after the other, and is counted."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fedexp.core.build import require
from fedexp.core.data import FederatedData
from fedexp.core.engine import Executor, Numerics
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import batch_ranges
from fedexp.engines.kernels.kernel import StackKernel
from fedexp.engines.kernels.linear import Linear
from fedexp.engines.kernels.vmapped import Vmapped
from fedexp.engines.serial import Serial, named, positions
from fedexp.engines.stack import train_stack

KERNELS: dict[str, type[StackKernel]] = {"linear": Linear, "vmap": Vmapped}
DEFAULT_STACK = 4
_WINDOW = 8  # stacks whose clients are ordered by steps together; no more results than these wait for an earlier client


@dataclass
class Vectorized(Executor):
    """Args:
    stack: clients a stack, or ``auto``.
    kernel: ``linear``, ``vmap``, or ``auto``: the first of these that fits a job.
    """

    stack: Literal["auto"] | int = "auto"
    kernel: Literal["auto", "linear", "vmap"] = "auto"
    _serial: Serial = field(init=False, default_factory=Serial)
    _stacked_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        require(self.stack == "auto" or self.stack >= 1, f"engine.stack must be 'auto' or at least 1, got {self.stack}")

    def open(self, numerics: Numerics, threads: int) -> None:
        self._serial.open(numerics, threads)

    @property
    def stacked_steps(self) -> int:
        return self._stacked_steps

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        """The stacks, as positions in `jobs`: a function of the jobs alone. Those that fit no kernel stand alone."""
        size = DEFAULT_STACK if self.stack == "auto" else self.stack
        groups: dict[Hashable, list[int]] = {}
        steps: dict[int, int] = {}
        for i, job in enumerate(jobs):
            kind = self._kernel(job)
            n = data.partition.size(job.client)
            steps[i] = sum(1 for _ in batch_ranges(n, job.budget, 1))
            alike = i if kind is None else (n if kind.same_sizes else None)
            groups.setdefault((kind, _signature(job), alike), []).append(i)
        stacks = []
        for members in groups.values():
            for start in range(0, len(members), _WINDOW * size):
                window = sorted(members[start : start + _WINDOW * size], key=lambda i: -steps[i])
                stacks += [window[at : at + size] for at in range(0, len(window), size)]
        return sorted(stacks, key=min)

    def map(self, jobs: Sequence[ClientJob], data: FederatedData) -> Generator[ClientResult, None, None]:
        done: dict[int, ClientResult] = {}
        following = 0
        for stack in self.split(jobs, data):
            done |= zip(stack, self._train([jobs[i] for i in stack], data), strict=True)
            while following in done:
                yield done.pop(following)
                following += 1

    def _train(self, jobs: list[ClientJob], data: FederatedData) -> list[ClientResult]:
        kind = self._kernel(jobs[0])
        if kind is None or (len(jobs) == 1 and kind is Vmapped):
            return list(self._serial.map(jobs, data))
        net = self._serial.net(jobs[0])
        indices = [positions(data, job.client) for job in jobs]
        try:
            with named(jobs, data):
                results = train_stack(jobs, net, data.train, indices, kind)
        except torch.cuda.OutOfMemoryError:
            if len(jobs) == 1:
                raise
            half = len(jobs) // 2
            return [*self._train(jobs[:half], data), *self._train(jobs[half:], data)]
        finally:
            net.release()
        self._stacked_steps += sum(result.num_steps for result in results) if len(jobs) > 1 else 0
        return results

    def _kernel(self, job: ClientJob) -> type[StackKernel] | None:
        names = KERNELS if self.kernel == "auto" else [self.kernel]
        net = self._serial.net(job)
        return next((KERNELS[name] for name in names if KERNELS[name].fits(job, net)), None)


def _signature(job: ClientJob) -> Hashable:
    """What the jobs of a stack have in common, sizes aside."""
    trees = (*job.shared.items(), *(job.state or {}).items())
    shapes = tuple((name, tuple(tree)) for name, tree in trees)
    return (job.start.spec, type(job.trainer), repr(job.trainer), job.task, job.budget, job.frozen, shapes)
