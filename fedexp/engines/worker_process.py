"""Processes of the workers engine: the fork server and the workers.

The fork server has imported everything, and forks the workers. A socket connects each
of these processes to the run's process. They end when the run's process closes its end
of the socket. Every message is a `Message`. Values that do not fit into a message are
in shared memory. No thread is started before the fork.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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

# Messages to the fork server: fork a worker that gets this socket, end a worker, or end
# a worker and report its exit status.
FORK, END, ASK = range(3)
# Messages to a worker: the setup with the worker's segments, the training data with
# their segment, or a chunk of jobs.
SETUP, DATA, CHUNK = range(3, 6)
# Messages from a worker: the worker is ready, a chunk is done, or the worker cannot
# continue. The last one is from the fork server: the exit status of a worker.
READY, DONE, FAILED, ENDED = range(6, 10)

# The board is a segment that all workers read. It begins with a `_HEADER`. The
# constants of a round start at this offset in bytes.
BOARD_START = 64
_HEADER = struct.Struct("<3q")
_MESSAGE = struct.Struct("<6qd")


class Message(NamedTuple):
    """A message of fixed size.

    Args:
        kind: Kind of the message.
        number: Number of the worker (to and from the fork server) or of the round.
        slot: Number of the inbox or outbox segment that holds the value.
        offset: Offset of the value in its segment, in bytes.
        length: Length of the value in bytes.
        fact: Process ID (`READY`), exit status (`ENDED`) or number of stacked steps
            (`DONE`).
        seconds: Seconds that the work on a chunk took (`DONE`).
    """

    kind: int
    number: int = 0
    slot: int = 0
    offset: int = 0
    length: int = 0
    fact: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Setup:
    """The settings that a worker receives once.

    Args:
        inner: Config node of the worker's engine.
        numerics: Numerics of the run.
        threads: Number of threads of the worker.
        path: Import path of the run's process.
    """

    inner: Mapping[str, Any]
    numerics: Numerics
    threads: int
    path: Sequence[str]


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


def send(to: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message, with file descriptors if there are any."""
    content = _MESSAGE.pack(*message)
    if fds:
        socket.send_fds(to, [content], fds)
    else:
        to.sendall(content)


def receive(source: socket.socket) -> tuple[Message, list[int]]:
    """Return the next message and the file descriptors that came with it.

    Raises:
        EOFError: The other end is closed.
    """
    content, fds, _, _ = socket.recv_fds(source, _MESSAGE.size, 16, socket.MSG_WAITALL)
    if len(content) < _MESSAGE.size:
        raise EOFError
    return Message._make(_MESSAGE.unpack(content)), list(fds)


def write_header(board: Segment, round: int, extent: tuple[int, int] = (0, 0)) -> None:
    """Write the current round and the extent of its constants."""
    board.write(0, _HEADER.pack(round, *extent))


def read_header(board: Segment) -> tuple[int, int, int]:
    """Return the current round and the offset and length of its constants in bytes.

    Workers skip chunks of other rounds.
    """
    round, offset, length = _HEADER.unpack(board.read(0, _HEADER.size))
    return round, offset, length


def serve_forks(fd: int) -> None:
    """Fork workers on request until the run's process is gone.

    The process has one thread, so that a fork is safe.
    """
    # The run's process handles Ctrl-C and the end of the terminal. The fork server ends
    # when the run's process is gone.
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    requests = socket.socket(fileno=fd)
    children: dict[int, int] = {}

    while True:
        try:
            message, fds = receive(requests)
        except (EOFError, ConnectionError):
            return

        if message.kind == FORK:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _be_worker(socket.socket(fileno=fds[0]))
            os.close(fds[0])
            children[message.number] = pid
        else:
            pid = children.pop(message.number, 0)
            status = _end(pid) if pid else 0  # an interrupted run may end a worker twice
            if message.kind == ASK:
                send(requests, Message(ENDED, message.number, fact=status))


def _end(pid: int) -> int:
    """End a child process and return its exit status.

    A child that still runs is killed. The status is the exit code, or minus the number
    of the signal that ended the child.
    """
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _be_worker(run: socket.socket) -> None:
    """Run a worker in the forked process. The function does not return."""
    code = 1
    try:
        threading.Thread(target=_follow, args=(run,), daemon=True).start()
        worker = _Worker(run)
        with use_numerics(worker.setup.numerics):
            worker.serve()
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, so the error must be reported now
        traceback.print_exc()
    finally:
        os._exit(code)


def _follow(run: socket.socket) -> None:
    """End this process when the run's process is gone or has closed its engine.

    The process ends at once, even in the middle of a job.
    """
    poll = select.poll()
    poll.register(run, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(0)


class _Worker:
    def __init__(self, run: socket.socket) -> None:
        self.run = run
        message, fds = receive(run)
        self.board, *slots = [Segment(fd) for fd in fds]
        self.inboxes, self.outboxes = slots[::2], slots[1::2]
        extent = (message.offset, message.length)
        self.setup: Setup = unpack(self.inboxes[0], extent, torch.device("cpu"))
        sys.path[:] = self.setup.path
        torch.set_num_threads(self.setup.threads)
        keep_freed_memory()
        self.device = torch.device(self.setup.numerics.device)
        self.round = 0
        self.constants: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.notes: list[str] = []
        self.data: FederatedData | None = None
        self.data_segment: Segment | None = None

    def serve(self) -> None:
        """Run chunks of jobs until the run's process is gone.

        A `FedexpError` outside the jobs is sent to the run's process and ends the loop.
        """
        try:
            inner = build(Engine, self.setup.inner, "engine.inner")  # type: ignore[type-abstract]
            inner.open(self.setup.numerics, self.setup.threads)
            inner.note = self.notes.append
            send(self.run, Message(READY, fact=os.getpid()))

            while True:
                message, fds = receive(self.run)
                if message.kind == DATA:
                    self._take_data(message, fds[0])
                else:
                    self._work(inner, message)
        except FedexpError as error:
            offset, length = pack(error, self.outboxes[0])
            send(self.run, Message(FAILED, 0, 0, offset, length))

    def _take_data(self, message: Message, fd: int) -> None:
        if self.data_segment is not None:
            self.data_segment.close()
        self.data = None
        self.data_segment = Segment(fd)
        self.data = self._sent(self.data_segment, (message.offset, message.length)).federated()

    def _work(self, inner: Engine, message: Message) -> None:
        began, stacked = time.perf_counter(), inner.stacked_steps
        done = Done([])
        if read_header(self.board)[0] == message.number:  # otherwise no process waits for the chunk
            done = replace(self._train(inner, message), notes=self.notes[:])
            self.notes.clear()

        outbox = self.outboxes[message.slot]
        try:
            extent = pack(done, outbox, constants=self.numbers)
        except Exception as error:  # noqa: BLE001 - a plug-in's result that cannot be pickled
            failed = ClientError(
                "a client's result cannot be sent from its process: "
                f"{type(error).__name__}: {error}"
            )
            failed.__cause__ = error
            extent = pack(Done([], failed), outbox)

        steps, seconds = inner.stacked_steps - stacked, time.perf_counter() - began
        send(self.run, Message(DONE, message.number, message.slot, *extent, steps, seconds))

    def _train(self, inner: Engine, message: Message) -> Done:
        results: list[ClientResult] = []
        jobs: list[ClientJob] = []
        assert self.data is not None

        try:
            if message.number != self.round:
                _, *extent = read_header(self.board)
                self.constants = self._sent(self.board, (extent[0], extent[1]))
                self.numbers = {id(value): number for number, value in enumerate(self.constants)}
                self.round = message.number

            jobs = self._sent(
                self.inboxes[message.slot], (message.offset, message.length), self.constants
            )
            with contextlib.closing(inner.map(jobs, self.data)) as stream:
                results.extend(stream)

            if len(results) != len(jobs):
                raise RuntimeError(
                    f"{type(inner).__name__} yielded {len(results)} results for {len(jobs)} jobs"
                )
        except FedexpError as error:
            return Done(results, error)
        except Exception as error:  # noqa: BLE001 - reported with the client's name, as in serial
            return Done(
                results, client_error([jobs[min(len(results), len(jobs) - 1)]], self.data, error)
            )

        return Done(results)

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
