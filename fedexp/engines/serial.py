"""Reference engine, which trains one client after the other in this process.

All jobs with the same model spec reuse one network object. The data are already on the
run's device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from fedexp.core.data import FederatedData
from fedexp.core.device import OutOfMemoryError
from fedexp.core.engine import Engine, answered, probed
from fedexp.core.errors import ClientError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.kernel import train_client
from fedexp.core.net import Net
from fedexp.core.numerics import Numerics, Precision
from fedexp.core.user_code import place_of_error
from fedexp.core.weights import by_spec
from fedexp.engines.kernels.kernel import NotStackableError
from fedexp.runtime.random_numbers import GlobalRandomGuard, WatchedPlugins, class_path


@dataclass
class Serial(Engine):
    """An engine that executes jobs in this process, in order."""

    _nets: Callable[..., Net] = field(
        init=False, repr=False, compare=False, default_factory=lambda: by_spec(Net)
    )
    _precision: Precision = field(init=False, default="float32")

    def open(self, numerics: Numerics, threads: int) -> None:
        self._precision = numerics.precision

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        for job in jobs:
            with named_client_errors([job], data):
                result = (
                    answered(job, data)
                    if job.trained
                    else probed(job, self._train(job, data), data)
                )
            yield result

    def _train(self, job: ClientJob, data: FederatedData) -> ClientResult:
        net = self.net(job)
        try:
            return train_client(job, net, data.train, data.positions(job.client), data.num_classes)
        finally:
            net.release()

    def net(self, job: ClientJob) -> Net:
        """Return the network that trains `job` and all other jobs of its model spec."""
        first = next(iter(job.start.params.values()))
        return self._nets(job.start.spec, first.device, first.dtype, self._precision)


@contextlib.contextmanager
def named_client_errors(jobs: Sequence[ClientJob], data: FederatedData) -> Iterator[None]:
    """Convert unexpected exceptions in the `with` block to `ClientError`.

    The error names the clients of `jobs`. If the block draws from a global random
    generator, a `ClientError` is raised, too.
    """
    job = jobs[0]
    guard = GlobalRandomGuard(
        _watched(
            class_path(job.trainer),
            class_path(job.task),
            job.start.spec.arch,
            tuple((probe.name, class_path(probe)) for probe in job.probes),
        )
    )

    try:
        yield
        if guard.changed_generators():
            raise guard.make_error(
                f"{_clients_text(jobs)}, round {job.round + 1}",
                "draw from ctx.noise(name, shape) "
                "(a task and an augmentation from `noise`, a probe from its seed)",
                ClientError,
            )
    except (FedexpError, NotStackableError, OutOfMemoryError):
        raise
    except Exception as error:
        raise client_error(jobs, data, error) from error


@cache
def _watched(
    trainer: str, task: str, model: str, probes: tuple[tuple[str, str], ...]
) -> WatchedPlugins:
    probe_paths = {f"probe {name}": path for name, path in probes}
    return WatchedPlugins.of({"trainer": trainer, "task": task, "model": model, **probe_paths})


def client_error(jobs: Sequence[ClientJob], data: FederatedData, error: Exception) -> ClientError:
    """Return the `ClientError` for an unexpected `error` in the training of `jobs`.

    Its ``__cause__`` is `error`.
    """
    who, place = _clients_text(jobs), place_of_error(error)
    sizes = ", ".join(str(data.partition.size(job.client)) for job in jobs)

    failed = ClientError(
        f"{who} failed: {type(error).__name__}: {error}",
        where=f"{who}, {sizes} training samples, lr {jobs[0].local_training.lr:g}"
        + (f", {place}" if place else ""),
    )
    failed.__cause__ = error
    return failed


def _clients_text(jobs: Sequence[ClientJob]) -> str:
    return ("client " if len(jobs) == 1 else "clients ") + ", ".join(
        str(job.client) for job in jobs
    )
