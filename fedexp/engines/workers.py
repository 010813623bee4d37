"""Local worker processes that execute client jobs in parallel.

The results are bit-identical to those of the engine that each worker runs.

The processes belong to a `ProcessPoolExecutor`. They are forked from multiprocessing's
fork server, which has imported torch and fedexp. Jobs and results are written into
shared memory, so that the executor's pipes carry only a few numbers.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from multiprocessing import context, forkserver, resource_tracker
from typing import Any, Literal, NamedTuple

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
from fedexp.engines.worker_process import Done, Reply, Setup, Training

# Number of chunks per worker that are handed out at once. Each has a segment of shared
# memory. A process can be started with about 250 file descriptors.
_SLOTS = 2
_MOST_SLOTS = 240
_MOST_DEATHS = 3
_IGNORED = "ignore::UserWarning:multiprocessing.resource_tracker"


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
        self._pool = _WorkerPool(Setup(node, numerics, each), devices)

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


class _Sent(NamedTuple):
    """A chunk that was handed out.

    Args:
        slot: Number of the segment that holds the jobs and gets the results.
        round: Round of the chunk.
        chunk: Number of the chunk in its round.
    """

    slot: int
    round: int
    chunk: int


class _WorkerPool:
    """The worker processes of one engine and the memory that they share.

    If a process dies, the executor ends all processes. They are then started again, and
    the chunks that they had are handed out again.
    """

    def __init__(self, setup: Setup, devices: Sequence[str]) -> None:
        self.device = torch.device(setup.numerics.device)
        self.size = len(devices)
        self.stacked_steps = 0
        self.note: Callable[[str], None] = lambda text: None
        self._setup, self._devices = setup, devices
        self._board = Segment()
        self._slots = [Segment() for _ in range(min(_SLOTS * self.size, _MOST_SLOTS))]
        self._free = list(range(len(self._slots)))
        self._data: tuple[FederatedData, Segment, tuple[int, int]] | None = None
        self._round = 0
        self._in_flight: dict[futures.Future[Reply], _Sent] = {}
        self._executor: futures.ProcessPoolExecutor | None = None
        self._context = _Context()
        self._failed_starts = 0
        self._broken: BaseException | None = None
        # The fork server imports torch while this process prepares the run.
        _start_fork_server(setup.inner)

    def run(
        self, jobs: Sequence[ClientJob], chunks: list[list[int]], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        """Yield the results in job order.

        Chunks are handed out in order. Only a bounded number of them runs ahead of the
        results.
        """
        self._share(data)
        self._round += 1
        work = _Work(self._round, jobs, chunks, self.size)
        wire.write_header(
            self._board, self._round, pack(work.constants, self._board, wire.BOARD_START)
        )

        try:
            while work.position < len(jobs):
                self._collect(work, wait=False)
                self._hand_out(work)
                while work.position not in work.ready:
                    if self._broken:
                        self._repair(work)
                    else:
                        self._collect(work, wait=True)
                    self._hand_out(work)
                yield work.take()
        except KeyboardInterrupt:
            # Otherwise the interpreter would wait for these chunks when it exits.
            self._end_processes(kill=True)
            raise
        finally:
            # The traceback of an error may keep a stream alive after its engine was
            # closed.
            if not self._board.closed:
                # Workers then skip the chunks of this round, because no process waits
                # for their results.
                wire.write_header(self._board, 0)

    def close(self) -> None:
        self._end_processes(kill=True)
        for segment in (self._board, *self._slots):
            segment.close()
        if self._data is not None:
            self._data[1].close()

    def _share(self, data: FederatedData) -> None:
        """Move the training data into shared memory, once.

        Processes inherit the memory when they are started. They are started again for
        other data.
        """
        if self._data is not None:
            if self._data[0] is data:
                return
            self._end_processes(kill=True)
            self._data[1].close()

        segment = Segment()
        train, partition = data.train, data.partition
        extent = pack(
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
        self._data = data, segment, extent

    def _hand_out(self, work: _Work) -> None:
        """Hand out chunks as long as there are free slots."""
        while (
            not self._broken
            and self._free
            and (chunk := work.next(are_idle=not self._in_flight)) is not None
        ):
            slot = self._free[-1]
            jobs = [work.jobs[position] for position in work.chunks[chunk]]
            try:
                extent = pack(jobs, self._slots[slot], constants=work.numbers)
            except (TypeError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"a job cannot be sent to a worker process: {error}",
                    where="engine=workers",
                    do="use only plain values and tensors in plug-ins, or use engine=serial",
                ) from error

            try:
                future = self._submit(work.round, slot, extent)
            except (futures.BrokenExecutor, EOFError, OSError) as error:
                self._broken = error
                work.give_back([chunk])
            else:
                self._in_flight[future] = _Sent(self._free.pop(), work.round, chunk)

    def _submit(self, round: int, slot: int, extent: tuple[int, int]) -> futures.Future[Reply]:
        """Give a chunk to the executor, which starts a process if it needs one.

        Raises:
            BrokenExecutor: A process has died.
            EOFError: The fork server has ended.
            OSError: The system refuses a process.
        """
        assert self._data is not None
        if self._executor is None:
            _start_fork_server(self._setup.inner)
            devices = self._context.SimpleQueue()
            for device in self._devices:
                devices.put(device)
            wire.write_started(self._board, False)
            self._executor = futures.ProcessPoolExecutor(
                self.size,
                mp_context=self._context,
                initializer=wire.begin,
                initargs=(self._setup, devices, self._board, self._slots, *self._data[1:]),
            )

        with _separated(), _uninterrupted():
            return self._executor.submit(wire.run_chunk, round, slot, extent)

    def _collect(self, work: _Work, wait: bool) -> None:
        """Take the results of finished chunks.

        With `wait`, wait for at least one chunk.
        """
        done = [future for future in self._in_flight if future.done()]
        if wait and not done:
            done = [*futures.wait(self._in_flight, return_when=futures.FIRST_COMPLETED).done]

        for future in done:
            error = future.exception()
            if isinstance(error, futures.BrokenExecutor):
                self._broken = error
                continue

            slot, round, chunk = self._in_flight.pop(future)
            if error is not None:
                self._free.append(slot)
                raise error

            # The workers get their next chunks before the results are read.
            self._hand_out(work)
            extent, steps = future.result()
            self.stacked_steps += steps
            if round == work.round:
                finished: Done = unpack(
                    self._slots[slot], extent, self.device, work.constants, copy=True
                )
                for text in finished.notes:
                    self.note(text)
                work.finish(chunk, finished)
            self._free.append(slot)

    def _repair(self, work: _Work) -> None:
        """End all processes after one has died, and take back their chunks.

        Raises:
            FedexpError: The processes do not start.
            ClientError: The only chunk that was handed out has had too many deaths.
        """
        self._collect(work, wait=False)  # results that came before the death
        lost = [sent.chunk for sent in self._in_flight.values() if sent.round == work.round]
        cause, started = self._broken, wire.read_started(self._board)
        exit_codes = self._end_processes(kill=not isinstance(cause, futures.BrokenExecutor))
        # The executor ends the other processes with SIGTERM.
        deaths = [code for code in exit_codes if code != -signal.SIGTERM]
        exit_reason = (
            _describe_exit(deaths[0] if deaths else None)
            if isinstance(cause, futures.BrokenExecutor)
            else str(cause)
        )
        work.give_back(lost)

        self._failed_starts = 0 if started else self._failed_starts + 1
        if self._failed_starts == _MOST_DEATHS:
            self._failed_starts = 0
            raise FedexpError(
                f"worker processes do not start: {_MOST_DEATHS} died before they were ready",
                where="engine=workers",
                got=exit_reason,
                do="look at what they printed above, or use engine=serial",
            )

        if not started or not lost:
            return
        work.deaths.update(lost)
        if len(lost) == 1 and work.deaths[lost[0]] >= _MOST_DEATHS:
            names = ", ".join(str(work.jobs[position].client) for position in work.chunks[lost[0]])
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

    def _end_processes(self, kill: bool) -> list[int]:
        """End all worker processes and forget the chunks that they had.

        Args:
            kill: Whether to kill the processes. Otherwise the executor has ended them.

        Returns:
            The exit codes: minus the number of the signal that ended the process.
        """
        processes = [process for process in self._context.processes if process.pid]
        if kill:
            for process in processes:
                process.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        self._context.processes.clear()
        self._in_flight.clear()
        self._free = list(range(len(self._slots)))
        self._broken = None
        return [process.exitcode or 0 for process in processes]


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
        self._isolated: int | None = None  # chunk that was handed out without any other
        # Maximum number of jobs after `position` that are handed out. It bounds the
        # memory for waiting results.
        self._ahead = 3 * workers * max(map(len, chunks))

    def next(self, are_idle: bool) -> int | None:
        """Return the chunk to hand out now, or None.

        After two deaths, the lost chunks are handed out one at a time. After the third
        death it is then known which chunk the process worked on.

        Args:
            are_idle: Whether the workers have no chunks at the moment.
        """
        if not self._waiting:
            return None
        first = self._waiting[0]
        if self._handed - self.position >= self._ahead and self._chunk_of[self.position] != first:
            return None
        if self._isolated is not None:
            return None
        if self.deaths[first] >= _MOST_DEATHS - 1:
            if not are_idle:
                return None
            self._isolated = first
        self._handed += len(self.chunks[first])
        return heapq.heappop(self._waiting)

    def give_back(self, chunks: Sequence[int]) -> None:
        self._isolated = None
        for chunk in chunks:
            self._handed -= len(self.chunks[chunk])
            heapq.heappush(self._waiting, chunk)

    def finish(self, chunk: int, done: Done) -> None:
        self._isolated = None
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


class _Context(context.ForkServerContext):
    """A multiprocessing context that holds the processes that it made.

    The executor has no public list of its processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[context.ForkServerProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> context.ForkServerProcess:  # type: ignore[override] # noqa: N802 - multiprocessing's name
        self.processes.append(context.ForkServerProcess(*args, **kwargs))
        return self.processes[-1]


def _start_fork_server(inner: Mapping[str, Any]) -> None:
    """Start multiprocessing's fork server if it does not run.

    It lives longer than an engine. The next run of a sweep can therefore fork workers
    at once.

    Raises:
        FedexpError: The system refuses it.
    """
    multiprocessing.set_forkserver_preload([wire.__name__, inner["_target_"].rpartition(".")[0]])
    environment = {
        # With one thread there is no thread pool, which would make a fork unsafe.
        # Workers set their own number of threads.
        "OMP_NUM_THREADS": "1",
        # If the run is killed, multiprocessing removes its semaphores. It would also
        # print a warning.
        "PYTHONWARNINGS": ",".join([*os.environ.get("PYTHONWARNINGS", "").split(","), _IGNORED]),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with _separated(), _uninterrupted():
            resource_tracker.ensure_running()
            # The fork server and the workers inherit blocked signals. The run's process
            # handles Ctrl-C and the end of the terminal.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except OSError as error:
        raise FedexpError(
            "worker processes cannot be started",
            where="engine=workers",
            got=str(error),
            do="check the limits of processes and open files, and that TMPDIR is a short, "
            "writable path. Or use engine=serial",
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _separated() -> Iterator[None]:
    """Hide the user's script and start method from processes that are being started.

    Processes then do not import the script, so that scripts and notebooks need no
    `__main__` guard. The start method of joblib's workers is unknown to new processes.
    """
    main = sys.modules["__main__"]
    before = {name: getattr(main, name, None) for name in ("__spec__", "__file__")}
    method = multiprocessing.get_start_method(allow_none=True)
    vars(main).update(dict.fromkeys(before))
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        yield
    finally:
        vars(main).update(before)
        multiprocessing.set_start_method(method, force=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay the handlers of signals until a process has been started.

    If the start was interrupted, the new process would print a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    arrived: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "for an unknown reason"
    if status < 0:
        name = signal.Signals(-status).name
        return f"{name}, as the system does when memory runs out" if name == "SIGKILL" else name
    return f"exit code {status}"
