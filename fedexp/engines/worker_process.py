"""The processes of the workers engine.

An executor starts them and passes them chunks of jobs. The values of the jobs and of
their results are in shared memory. A process ends when the run's process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection, parent_process
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedexp.core.build import build
from fedexp.core.data import FederatedData, Partition, Samples
from fedexp.core.engine import Engine
from fedexp.core.errors import ClientError, ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.engines.serial import client_error
from fedexp.engines.shared_memory import Segment, pack, unpack
from fedexp.runtime.allocator import keep_freed_memory
from fedexp.runtime.numerics import use_numerics

# The board is a segment that all workers read. It begins with the current round and the
# extent of the round's constants. A byte follows that tells whether a worker has
# started. The constants begin at `BOARD_START`. Offsets are in bytes.
_HEADER = struct.Struct("<3q")
_STARTED = _HEADER.size
BOARD_START = 64


@dataclass(frozen=True)
class Setup:
    """The settings of the workers.

    Args:
        inner: Config node of the workers' engine.
        numerics: Numerics of the run.
        threads: Number of threads of each worker.
    """

    inner: Mapping[str, Any]
    numerics: Numerics
    threads: int


@dataclass(frozen=True, eq=False)
class Training:
    """The part of `FederatedData` that client jobs need."""

    train: Samples
    indices: Tensor
    offsets: Tensor
    num_classes: int
    fingerprint: str

    def federated(self) -> FederatedData:
        """Return data without a test set, validation share or proxy."""
        train = self.train
        nothing = Samples(train.x[:0], train.y[:0], train.mean, train.std, None, train.dtype)
        return FederatedData(
            train,
            Partition(self.indices.numpy(), self.offsets.numpy()),
            nothing,
            self.num_classes,
            self.fingerprint,
            labels=torch.empty(0, dtype=torch.int64).numpy(),
        )


@dataclass(frozen=True, eq=False)
class Done:
    """The result of a chunk.

    Args:
        results: Results of the chunk's jobs, up to the first job that failed.
        error: Error of the job that failed, or None.
        notes: Notes for the user.
    """

    results: list[ClientResult]
    error: FedexpError | None = None
    notes: list[str] = field(default_factory=list)


class Reply(NamedTuple):
    """The answer to a chunk.

    Args:
        extent: Place of the `Done` in the chunk's segment, for `unpack`.
        stacked_steps: Number of stacked steps of the chunk.
    """

    extent: tuple[int, int]
    stacked_steps: int


def write_header(board: Segment, round: int, extent: tuple[int, int] = (0, 0)) -> None:
    """Write the current round and the extent of its constants."""
    board.write(0, _HEADER.pack(round, *extent))


def read_header(board: Segment) -> tuple[int, int, int]:
    """Return the current round and the offset and length of its constants in bytes.

    Workers skip chunks of other rounds.
    """
    round, offset, length = _HEADER.unpack(board.read(0, _HEADER.size))
    return round, offset, length


def write_started(board: Segment, started: bool) -> None:
    """Write whether one of the processes has started."""
    board.write(_STARTED, bytes([started]))


def read_started(board: Segment) -> bool:
    """Return whether one of the processes has started."""
    return board.read(_STARTED, 1) != b"\0"


def begin(
    setup: Setup,
    devices: SimpleQueue[str],
    board: Segment,
    slots: list[Segment],
    data: Segment,
    extent: tuple[int, int],
) -> None:
    """Prepare this process for chunks. The executor calls this function first.

    Args:
        setup: Settings of the workers.
        devices: One device for each worker.
        board: The memory that all workers read.
        slots: Segments for jobs and results.
        data: The segment with the training data.
        extent: Place of the training data in their segment.
    """
    global _worker  # noqa: PLW0603 - the executor can call functions only
    # The run's process handles Ctrl-C and the end of the terminal. Workers end when it
    # is gone.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    numerics = replace(setup.numerics, device=devices.get())
    _worker = _Worker(replace(setup, numerics=numerics), board, slots, (data, extent))
    write_started(board, True)


def run_chunk(round: int, slot: int, extent: tuple[int, int]) -> Reply:
    """Run the jobs of a chunk. The executor calls this function in a worker.

    Args:
        round: Round of the chunk.
        slot: Number of the segment with the jobs. The results are written behind them.
        extent: Place of the jobs in the segment.
    """
    assert _worker is not None
    return _worker.run_chunk(round, slot, extent)


def _follow() -> None:
    """End this process when the run's process is gone, even in the middle of a job."""
    run = parent_process()
    assert run is not None
    connection.wait([run.sentinel])
    os._exit(0)


class _Worker:
    def __init__(
        self,
        setup: Setup,
        board: Segment,
        slots: list[Segment],
        data: tuple[Segment, tuple[int, int]],
    ) -> None:
        self.setup, self.board, self.slots, self.sent_data = setup, board, slots, data
        torch.set_num_threads(setup.threads)
        keep_freed_memory()
        self.device = torch.device(setup.numerics.device)
        self.numerics = contextlib.ExitStack()
        self.inner: Engine | None = None
        self.data: FederatedData | None = None
        self.round = 0
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.notes: list[str] = []

    def run_chunk(self, round: int, slot: int, extent: tuple[int, int]) -> Reply:
        segment, stacked = self.slots[slot], self._stacked_steps
        done = Done([])
        if read_header(self.board)[0] == round:  # otherwise no process waits for the chunk
            done = replace(self._train(round, segment, extent), notes=self.notes[:])
            self.notes.clear()

        try:
            place = pack(done, segment, at=sum(extent), constants=self.numbers)
        except Exception as error:  # noqa: BLE001 - a plug-in's result that cannot be pickled
            failed = ClientError(
                "a client's result cannot be sent from its process: "
                f"{type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            place = pack(Done([], failed), segment, at=sum(extent))

        return Reply(place, self._stacked_steps - stacked)

    @property
    def _stacked_steps(self) -> int:
        return 0 if self.inner is None else self.inner.stacked_steps

    def _train(self, round: int, segment: Segment, extent: tuple[int, int]) -> Done:
        results: list[ClientResult] = []
        try:
            inner, data = self._started()
            if round != self.round:
                _, offset, length = read_header(self.board)
                self.constants = self._sent(self.board, (offset, length))
                self.numbers = {id(value): number for number, value in enumerate(self.constants)}
                self.round = round

            jobs: list[ClientJob] = self._sent(segment, extent, self.constants)
        except FedexpError as error:
            return Done([], error)

        try:
            with contextlib.closing(inner.map(jobs, data)) as stream:
                results.extend(stream)

            if len(results) != len(jobs):
                raise RuntimeError(
                    f"{type(inner).__name__} yielded {len(results)} results for {len(jobs)} jobs"
                )
        except FedexpError as error:
            return Done(results, error)
        except Exception as error:  # noqa: BLE001 - reported with the client's name, as in serial
            return Done(
                results, client_error([jobs[min(len(results), len(jobs) - 1)]], data, error)
            )

        return Done(results)

    def _started(self) -> tuple[Engine, FederatedData]:
        """Return the open engine and the data. Both are made for the first chunk."""
        if self.inner is None or self.data is None:
            self.numerics.enter_context(use_numerics(self.setup.numerics))
            self.data = self._sent(*self.sent_data).federated()
            inner = build(Engine, self.setup.inner, "engine.inner")  # type: ignore[type-abstract]
            inner.open(self.setup.numerics, self.setup.threads)
            inner.note = self.notes.append
            self.inner = inner
        return self.inner, self.data

    def _sent(
        self, segment: Segment, extent: tuple[int, int], constants: Sequence[Any] = ()
    ) -> Any:
        try:
            return unpack(segment, extent, self.device, constants)
        except Exception as error:
            raise ConfigError(
                "a worker process cannot rebuild what it was sent: "
                f"{type(error).__name__}: {error}",
                where="engine=workers",
                do="define plug-ins in a module on the Python path, "
                "not in the script or notebook that runs them",
            ) from error


_worker: _Worker | None = None  # in a worker process
