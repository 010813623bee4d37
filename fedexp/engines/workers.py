"""Local worker processes that execute client jobs in parallel.

The results are bit-identical to those of the engine that each worker runs.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fedexp.core.build import build, require
from fedexp.core.data import FederatedData
from fedexp.core.device import num_devices
from fedexp.core.engine import Engine, EngineContext, describe
from fedexp.core.errors import ClientError, ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.engines import worker_process as wire
from fedexp.engines.shared_memory import Segment, pack, unpack
from fedexp.engines.worker_process import Done, Message, Setup, Training

# Number of chunks that a worker may hold: one that it trains, and one that waits or
# whose results are being sent.
_SLOTS = 2
# In seconds. If the chunks of a worker take less time, it gets the next chunk in
# advance. For longer chunks, the wait for the next chunk is negligible.
_SHORT = 0.05
_MOST_DEATHS = 3
_FORK_SERVER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "import importlib; importlib.import_module(sys.argv[3]); "
    "from fedexp.engines.worker_process import serve_forks; serve_forks(int(sys.argv[1]))"
)


@dataclass
class Workers(Engine):
    """An engine that hands jobs to worker processes, which live for the whole run.

    Weights and data are passed through shared memory. If a worker dies, its work is
    repeated. If three workers die while working on the same jobs, a `ClientError` is
    raised.

    Args:
        workers: Number of workers. ``auto`` means one per GPU on CUDA, and as many as
            the run's threads allow on a CPU. If ``auto`` gives one worker, the run's
            process does the work itself.
        threads: Number of threads of each process, including the run's process.
        inner: Config node of the engine that each worker runs. Workers receive the
            parts into which this engine splits the jobs (`Engine.split`).
    """

    workers: Literal["auto"] | int = "auto"
    threads: int = 1
    inner: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "fedexp.engines.serial.Serial"}
    )

    def __post_init__(self) -> None:
        require(
            self.workers == "auto" or self.workers >= 1,
            f"workers must be 'auto' or at least 1, got {self.workers}",
        )
        require(self.threads >= 1, f"threads must be at least 1, got {self.threads}")
        self._inner = build(Engine, self.inner, "engine.inner")  # type: ignore[type-abstract]
        require(not isinstance(self._inner, Workers), "engine.inner must not be a workers engine")
        self._pool: _WorkerPool | None = None
        self._opened: tuple[Numerics, int] | None = None

    def choose(self, context: EngineContext) -> Workers:
        each = self.threads_each(context.threads)
        chosen = self._inner.choose(
            context.per_process(self._count(context.threads, each, context.numerics.device), each)
        )
        return Workers(self.workers, self.threads, describe(chosen.computing))

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Workers:
        return Workers(self.workers, threads, describe(computing))

    @property
    def computing(self) -> Engine:
        return self._inner

    def threads_each(self, num_threads: int) -> int:
        return min(self.threads, num_threads)

    def open(self, numerics: Numerics, threads: int) -> None:
        wanted = replace(numerics, engine={}), threads
        if self._pool is not None and self._opened == wanted:
            return
        self.close()
        each = numerics.threads
        gpus, count = num_devices(numerics.device), self._count(threads, each, numerics.device)

        if self.workers != "auto" and each > 1 and not gpus and count * each > threads:
            raise ConfigError(
                f"{count} workers of {each} threads do not fit into the run's threads",
                where="engine.workers",
                expected=f"at most {threads // each}",
                got=count,
                do=f"set engine.workers=auto, or threads={count * each} if there are so many cores",
            )
        self._opened = wanted
        if self.workers == "auto" and count == 1:
            self._inner.open(numerics, each)
            return

        node = describe(self._inner)
        kind = numerics.device
        devices = [f"{kind}:{n % gpus}" if gpus > 1 else kind for n in range(count)]
        path = list(sys.path)
        self._pool = _WorkerPool(
            [Setup(node, replace(numerics, device=device), each, path) for device in devices],
            torch.device(numerics.device),
        )

    def _count(self, num_threads: int, each: int, device: str) -> int:
        return (
            (num_devices(device) or max(1, num_threads // each))
            if self.workers == "auto"
            else self.workers
        )

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if self._opened is None:
            raise RuntimeError("the workers engine is not open")

        self._inner.note = self.note
        if self._pool is None:
            yield from self._inner.map(jobs, data)
        elif jobs:
            self._pool.note = self.note
            size = self._pool.size
            with contextlib.closing(
                self._pool.run(jobs, self._inner.split(jobs, data), data)
            ) as results:
                for result in results:
                    yield replace(result, probe_seconds=result.probe_seconds / size)

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        return self._inner.split(jobs, data)

    @property
    def jobs_at_once(self) -> int:
        return self._inner.jobs_at_once * (self._pool.size if self._pool else 1)

    @property
    def stacked_steps(self) -> int:
        return self._inner.stacked_steps + (self._pool.stacked_steps if self._pool else 0)

    def close(self) -> None:
        self._opened = None
        self._inner.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _WorkerPool:
    """The workers of one engine and the memory that they share."""

    def __init__(self, setups: Sequence[Setup], device: torch.device) -> None:
        self.device = device
        self.size = len(setups)
        self.board = Segment()
        self.stacked_steps = 0
        self.note: Callable[[str], None] = lambda text: None
        self._round = 0
        self._data: tuple[FederatedData, Segment, Message] | None = None
        self._poll = select.poll()
        self._links = [_Link(setup, self.board) for setup in setups]
        self._by_fd: dict[int, _Link] = {}
        for link in self._links:
            self._start(link)

    def run(
        self, jobs: Sequence[ClientJob], chunks: list[list[int]], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        """Yield the results in job order.

        Chunks are handed out in order. Only a bounded number of them runs ahead of the
        results.
        """
        self._share(data)
        self._round += 1
        work = _Work(self._round, jobs, chunks, len(self._links))
        wire.write_header(
            self.board, self._round, pack(work.constants, self.board, wire.BOARD_START)
        )

        try:
            while work.position < len(jobs):
                self._collect(work, wait=False)
                self._hand_out(work)
                while work.position not in work.ready:
                    self._collect(work, wait=True)
                    self._hand_out(work)
                yield work.take()
        finally:
            # The traceback of an error may keep a stream alive after its engine was
            # closed.
            if not self.board.closed:
                # Workers then skip the chunks of this round, because no process waits
                # for their results.
                wire.write_header(self.board, 0)

    def close(self) -> None:
        for link in self._links:
            link.end()
        for segment in (
            self.board,
            *(segment for link in self._links for segment in link.segments),
        ):
            segment.close()
        if self._data is not None:
            self._data[1].close()

    def _start(self, link: _Link) -> None:
        link.start()
        self._by_fd[link.socket.fileno()] = link
        self._poll.register(link.socket, select.POLLIN)
        if self._data is not None:
            link.send(self._data[2], (self._data[1].fd,))

    def _share(self, data: FederatedData) -> None:
        """Move the training data into shared memory, once."""
        if self._data is not None:
            if self._data[0] is data:
                return
            self._data[1].close()

        segment = Segment()
        train, partition = data.train, data.partition
        offset, length = pack(
            Training(
                train,
                torch.from_numpy(partition.indices.copy()),
                torch.from_numpy(partition.offsets.copy()),
                data.num_classes,
                data.fingerprint,
            ),
            segment,
            move_tensors=True,
        )
        self._data = data, segment, Message(wire.DATA, offset=offset, length=length)
        for link in self._links:
            link.send(self._data[2], (segment.fd,))

    def _hand_out(self, work: _Work) -> None:
        """Hand out chunks to workers that have none.

        Then hand out second chunks to workers whose chunks are short.
        """
        for held in range(_SLOTS):
            for link in self._links:
                if link.ready and len(link.held) == held and (held == 0 or link.seconds < _SHORT):
                    chunk = work.next()
                    if chunk is None:
                        return
                    link.give(chunk, work)

    def _collect(self, work: _Work, wait: bool) -> None:
        """Process the messages of workers.

        With `wait`, wait for at least one message.
        """
        for fd, _ in self._poll.poll(None if wait else 0):
            link = self._by_fd[fd]
            try:
                message, _ = wire.receive(link.socket)
            except (EOFError, ConnectionError):
                self._replace(link, work)
                continue

            if message.kind == wire.READY:
                link.ready, link.pid, link.failed_starts = True, message.fact, 0
                continue

            outbox = link.outboxes[message.slot]
            extent = (message.offset, message.length)
            if message.kind == wire.FAILED:
                raise unpack(outbox, extent, self.device)

            _, round, chunk = link.held.popleft()
            link.seconds = message.seconds
            self.stacked_steps += message.fact
            if round == work.round:
                # A worker without a chunk gets its next chunk before the results of
                # its last chunk are read. It works while they are read.
                if not link.held and (following := work.next()) is not None:
                    link.give(following, work, avoid=message.slot)
                done = unpack(outbox, extent, self.device, work.constants, copy=True)
                for text in done.notes:
                    self.note(text)
                work.finish(chunk, done)

    def _replace(self, link: _Link, work: _Work) -> None:
        """Replace a worker process that died, and hand out its chunks again."""
        self._poll.unregister(link.socket)
        del self._by_fd[link.socket.fileno()]
        exit_reason = _describe_exit(link.end(ask=True))

        lost = [chunk for _, round, chunk in link.held if round == work.round]
        suspect = link.held[0][2] if link.held and link.held[0][1] == work.round else None

        failed = 0 if link.ready else link.failed_starts + 1
        link.failed_starts = failed % _MOST_DEATHS
        self._start(link)
        work.give_back(lost)

        if failed == _MOST_DEATHS:
            raise FedexpError(
                f"worker processes do not start: {_MOST_DEATHS} died before they were ready",
                where="engine=workers",
                got=exit_reason,
                do="look at what they printed above, or use engine=serial",
            )

        if suspect is not None:
            work.deaths[suspect] += 1
            if work.deaths[suspect] == _MOST_DEATHS:
                names = ", ".join(
                    str(work.jobs[position].client) for position in work.chunks[suspect]
                )
                raise ClientError(
                    f"the worker process died {_MOST_DEATHS} times while it trained client {names}",
                    where="engine=workers",
                    got=exit_reason,
                    do="if memory ran out, use fewer workers (engine.workers=1), "
                    "smaller batches or engine=serial",
                )

            warnings.warn(
                f"a worker process died ({exit_reason}), its work is repeated",
                stacklevel=2,
            )


class _Work:
    """One call of `map`: the chunks that wait and the results that have arrived."""

    def __init__(
        self, round: int, jobs: Sequence[ClientJob], chunks: list[list[int]], workers: int
    ) -> None:
        self.round, self.jobs = round, jobs
        self.chunks = sorted(chunks)
        self.position = 0  # position of the job whose result comes next
        self.ready: dict[int, ClientResult | FedexpError] = {}
        self.deaths: Counter[int] = Counter()
        self.constants = list(_constants(jobs))
        self.numbers = {id(value): number for number, value in enumerate(self.constants)}
        self._waiting = list(range(len(chunks)))  # a heap
        self._chunk_of = {
            position: number for number, chunk in enumerate(self.chunks) for position in chunk
        }
        self._handed = 0  # number of jobs handed out
        # Maximum number of jobs after `position` that are handed out. It bounds the
        # memory for waiting results.
        self._ahead = 3 * workers * max(map(len, chunks))

    def next(self) -> int | None:
        """Return the chunk to hand out now, or None."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if self._handed - self.position >= self._ahead and self._chunk_of[self.position] != first:
            return None
        self._handed += len(self.chunks[first])
        return heapq.heappop(self._waiting)

    def give_back(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._handed -= len(self.chunks[chunk])
            heapq.heappush(self._waiting, chunk)

    def finish(self, chunk: int, done: Done) -> None:
        positions = self.chunks[chunk]
        self.ready.update(zip(positions, done.results, strict=False))
        if done.error is not None:
            self.ready[positions[len(done.results)]] = done.error

    def take(self) -> ClientResult:
        result = self.ready.pop(self.position)
        if isinstance(result, FedexpError):
            raise result
        self.position += 1
        return result


def _constants(jobs: Sequence[ClientJob]) -> Iterator[Any]:
    """Return the objects that several jobs refer to. They are sent once per round."""
    held = [
        (j.start, j.start.spec, j.trainer, j.task, j.local_training, j.shared, j.frozen, j.probes)
        for j in jobs
    ]
    objects = {id(value): value for values in held for value in values}
    counts = Counter(id(value) for values in held for value in values)
    return (value for key, value in objects.items() if counts[key] > 1)


class _Link:
    """The connection from the run's process to one worker."""

    def __init__(self, setup: Setup, board: Segment) -> None:
        self.setup, self.board = setup, board
        self.segments = [Segment() for _ in range(2 * _SLOTS)]
        self.inboxes, self.outboxes = self.segments[::2], self.segments[1::2]
        self.failed_starts = 0

    def start(self) -> None:
        self.number = next(_numbers)
        self.ready, self.pid, self.seconds = False, 0, _SHORT
        self.held: deque[tuple[int, int, int]] = deque()  # slot, round, chunk
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.fork_server = _fork_server(self.setup.inner)
            self.fork_server.fork(self.number, theirs)

        # The worker reads its setup before anything else is sent.
        message = Message(wire.SETUP, 0, 0, *pack(self.setup, self.inboxes[0]))
        self.send(message, [segment.fd for segment in (self.board, *self.segments)])

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        # A dead worker is noticed and replaced when its messages are read.
        with contextlib.suppress(ConnectionError):
            wire.send(self.socket, message, fds)

    def give(self, chunk: int, work: _Work, avoid: int | None = None) -> None:
        """Send a chunk to the worker.

        Args:
            chunk: Number of the chunk.
            work: Call of `map` that the chunk belongs to.
            avoid: Slot whose results have not been taken yet, or None.
        """
        used = {slot for slot, _, _ in self.held} | {avoid}
        slot = next(slot for slot in range(_SLOTS) if slot not in used)
        jobs = [work.jobs[position] for position in work.chunks[chunk]]

        try:
            extent = pack(jobs, self.inboxes[slot], constants=work.numbers)
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"a job cannot be sent to a worker process: {error}",
                where="engine=workers",
                do="use only plain values and tensors in plug-ins, or use engine=serial",
            ) from error

        self.held.append((slot, work.round, chunk))
        self.send(Message(wire.CHUNK, work.round, slot, *extent))

    def end(self, ask: bool = False) -> int | None:
        """Close the connection. The worker ends at once.

        Args:
            ask: Whether to wait until the worker has ended.

        Returns:
            The worker's exit status, or None if it is unknown or `ask` is False.
        """
        self.socket.close()
        return self.fork_server.end(self.number, ask)


_numbers = itertools.count(1)
_fork_servers: list[_ForkServer] = []


def _fork_server(inner: Any) -> _ForkServer:
    """Return the fork server of this process.

    It lives longer than an engine. The next run of a sweep can therefore fork workers
    at once.
    """
    if not _fork_servers or not _fork_servers[0].alive:
        _fork_servers[:] = [_ForkServer(inner["_target_"].rpartition(".")[0])]
    return _fork_servers[0]


class _ForkServer:
    """The process that forks workers.

    It has imported torch and fedexp, has one thread, and shares no state with this
    process.
    """

    def __init__(self, preload: str) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            # With one thread there is no thread pool, which would make a fork unsafe.
            # Workers set their own number of threads.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _FORK_SERVER, str(fd), json.dumps(sys.path), preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                },
            )
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self._owner == os.getpid():
            self._socket.close()
            self._process.kill()
            self._process.wait()

    @property
    def alive(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, number: int, theirs: socket.socket) -> None:
        # If the fork server is gone, the worker is gone too. This is noticed when a
        # message of the worker is awaited.
        with contextlib.suppress(ConnectionError):
            wire.send(self._socket, Message(wire.FORK, number), [theirs.fileno()])

    def end(self, number: int, ask: bool) -> int | None:
        try:
            wire.send(self._socket, Message(wire.ASK if ask else wire.END, number))
            return wire.receive(self._socket)[0].fact if ask else None
        except (EOFError, ConnectionError):
            return None


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "for an unknown reason"
    if status < 0:
        name = signal.Signals(-status).name
        return f"{name}, as the system does when memory runs out" if name == "SIGKILL" else name
    return f"exit code {status}"
