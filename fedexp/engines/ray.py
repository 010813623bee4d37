"""Engine that executes client jobs on a Ray cluster.

Actors are processes on the nodes of the cluster. Each runs an engine. Ray chooses their
nodes and starts lost actors again.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any, Literal

from fedexp.core.build import build, require
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, EngineContext, describe
from fedexp.core.errors import ClientError, ConfigError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult
from fedexp.core.numerics import Numerics
from fedexp.core.trees import num_bytes
from fedexp.engines.ray_actor import code_of
from fedexp.engines.ray_cluster import (
    START_SECONDS,
    Actor,
    ActorPool,
    Connection,
    unexpected_error,
)
from fedexp.engines.ray_wire import JobBatch, Packer, Reply, SentData, SentResult

MAX_LOSSES = 3  # jobs fail once this many actors have died while working on them
# Approximate number of clients per actor if `actors` is auto. The inner engine is
# chosen for this number.
_STACK = 8
# A message costs about a millisecond, so small jobs are sent in batches of up to this
# many chunks and bytes.
_BATCH_CHUNKS = 8
_BATCH_BYTES = 1 << 24
# Number of batches that an actor holds: one that runs, and one that waits. The actor
# is then never idle between two batches.
DEPTH = 2


@dataclass
class Ray(Engine):
    """An engine that hands chunks of jobs to actors.

    The results are bit-identical to those of `inner` with `threads` threads, for any
    number of actors. Data are sent once per node. Weights and broadcast trees are sent
    once per round. The run's own process aggregates. This process must be on a machine
    of the cluster.

    Args:
        address: ``auto`` (the cluster that this machine belongs to), ``host:port``, or
            ``local`` (start a cluster for this run).
        actors: Number of actors, or ``auto`` for as many as the CPUs and GPUs of the
            cluster allow, also on nodes that join later.
        threads: Number of CPUs and threads of each actor.
        gpus: Number of GPUs of each actor, a fraction of one GPU or a whole number.
        inner: Config node of the engine that each actor runs.
    """

    address: str = "auto"
    actors: int | Literal["auto"] = "auto"
    threads: int = 1
    gpus: float = 0.0
    inner: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "fedexp.engines.serial.Serial"}
    )

    def __post_init__(self) -> None:
        require(self.threads >= 1, f"engine.threads must be at least 1, got {self.threads}")
        require(
            self.actors == "auto" or self.actors >= 1,
            f"engine.actors must be at least 1, got {self.actors}",
        )
        require(
            0 <= self.gpus <= 1 or self.gpus == int(self.gpus),
            f"engine.gpus must be a fraction of one GPU or a whole number, got {self.gpus:g}",
        )
        host, _, port = self.address.rpartition(":")
        require(
            self.address in ("auto", "local")
            or (bool(host) and port.isdecimal() and "/" not in host),
            f"engine.address must be auto, local or host:port, got '{self.address}'",
        )

        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "engine=ray needs the package ray",
                where="engine",
                do="install it: pip install 'fedexp[ray]'",
            )

        self._computing: Engine = build(Engine, self.inner, "engine.inner")  # type: ignore[type-abstract]
        if self._computing.computing is not self._computing:
            raise ConfigError(
                "an actor's engine must compute itself",
                where="engine.inner",
                expected="an engine that computes itself, for example fedexp.engines.serial.Serial",
                got=self.inner.get("_target_"),
            )

        self._connection: Connection | None = None
        self._pool: ActorPool | None = None
        self._sent_data: tuple[FederatedData, Any] | None = None
        self._codes: dict[tuple[str, ...], str] = {}
        self._stacked = 0

    def choose(self, context: EngineContext) -> Engine:
        self._check_device(context.numerics)
        # A missing cluster is reported before an inner engine makes its choices.
        self._connect(context.threads)
        actors = -(-len(context.jobs) // _STACK) if self.actors == "auto" else self.actors
        try:
            self._computing = self._computing.choose(
                context.per_process(actors, self.threads)
            ).computing
        except BaseException:
            self.close()
            raise
        self.inner = describe(self._computing)
        return self

    def restore(self, computing: Engine, threads: int, num_threads: int) -> Engine:
        return replace(self, threads=threads, inner=describe(computing))

    @property
    def computing(self) -> Engine:
        return self._computing

    def threads_each(self, num_threads: int) -> int:
        return self.threads

    @property
    def stacked_steps(self) -> int:
        return self._stacked

    def split(self, jobs: Sequence[ClientJob], data: FederatedData) -> list[list[int]]:
        self._computing.note = self.note
        return self._computing.split(jobs, data)

    def open(self, numerics: Numerics, threads: int) -> None:
        """Join or start the cluster and start the actors.

        Raises:
            ConfigError: There is no cluster at `address`, it is too small, or its nodes
                have other code or versions.
        """
        self._check_device(numerics)
        self._connect(threads)
        try:
            self._pool = ActorPool(
                None if self.actors == "auto" else self.actors,
                self.threads,
                self.gpus,
                describe(self._computing),
                numerics,
                self.note,
            )
        except BaseException:
            self.close()
            raise

    def map(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Generator[ClientResult, None, None]:
        if not jobs:
            return
        if self._pool is None:
            raise RuntimeError("the engine is not open")

        chunks = self.split(jobs, data)
        sending = _Sending(self._pool, jobs, chunks, self._packing(jobs, data))
        try:
            for sent in sending.results():
                result = sent.result(data.train.x.device)
                at_once = max(1, len(self._pool.ready))
                yield replace(result, probe_seconds=result.probe_seconds / at_once)
        finally:
            self._stacked += sending.stacked
            for text in sending.notes:
                self.note(text)
            sending.close()

    def close(self) -> None:
        self._sent_data = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check_device(self, numerics: Numerics) -> None:
        if (self.gpus > 0) != (numerics.device != "cpu"):
            raise ConfigError(
                "actors must compute on the run's kind of device, because the bits depend on it",
                where="engine.gpus",
                expected="a fraction of a GPU, for example 0.25" if self.gpus == 0 else "0",
                got=f"{self.gpus:g}, and device {numerics.device}",
                do="set engine.gpus with device=cuda, or device=cpu and engine.gpus=0",
            )

    def _connect(self, threads: int) -> None:
        if self._connection is None:
            self._connection = Connection(self.address, max(threads, self.threads), self.gpus > 0)

    def _packing(
        self, jobs: Sequence[ClientJob], data: FederatedData
    ) -> Callable[[list[list[int]]], JobBatch]:
        """Return a function that makes a batch from chunks of jobs.

        Each batch has a reference to the data, and the fingerprint of the code that its
        jobs use.
        """
        plugins: set[type] = {
            type(plugin) for job in jobs for plugin in (job.trainer, job.task, *job.probes)
        }
        plugins |= {type(self._computing), type(data.train.augment)}
        names = {f"{kind.__module__}.{kind.__name__}" for kind in plugins}
        targets = tuple(sorted(names | {job.start.spec.arch for job in jobs}))
        if targets not in self._codes:
            self._codes[targets] = code_of(targets)
        if self._sent_data is None or self._sent_data[0] is not data:
            self._sent_data = (data, _put(SentData.of(data)))
        reference, code = self._sent_data[1], self._codes[targets]
        packer = Packer(jobs, _put)
        return lambda chunks: packer.batch(chunks, reference, targets, code)


class _Sending:
    """One call of `map`: batches are sent, and results arrive in any order.

    The number of sent jobs whose results have not been returned yet is bounded. Memory
    therefore does not grow with the number of jobs.
    """

    def __init__(
        self,
        pool: ActorPool,
        jobs: Sequence[ClientJob],
        chunks: list[list[int]],
        pack: Callable[[list[list[int]]], JobBatch],
    ) -> None:
        import ray

        self.stacked = 0
        self.notes: list[str] = []
        self._ray, self._pool, self._jobs, self._pack = ray, pool, jobs, pack
        self._waiting = sorted(chunks)  # a heap
        # Number of actors that died while they worked on a chunk, by the position of
        # the first job of the chunk.
        self._lost: Counter[int] = Counter()
        self._in_flight: dict[Any, tuple[Actor, list[list[int]]]] = {}
        self._arrived: dict[int, SentResult | FedexpError] = {}

        largest = max(map(len, chunks))
        weight = num_bytes(jobs[0].start.params) * largest
        self._together = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // max(1, weight)))
        self._most_ahead = 2 * DEPTH * self._together * largest  # jobs per actor
        pool.fill(len(chunks))

    def results(self) -> Iterator[SentResult]:
        """Yield the results in job order.

        Raises:
            ClientError: A job failed, or `MAX_LOSSES` actors died while they worked on
                it.
        """
        for position in range(len(self._jobs)):
            self._send(position)
            while position not in self._arrived:
                self._receive()
                self._send(position)
            found = self._arrived.pop(position)
            if isinstance(found, FedexpError):
                raise found
            yield found

    def close(self) -> None:
        """Cancel the batches whose results have not arrived."""
        for reference, (actor, _) in self._in_flight.items():
            actor.batches.remove(reference)
            if self._ray.is_initialized():
                self._ray.cancel(reference)
        self._in_flight.clear()

    def _send(self, needed: int) -> None:
        """Send batches to free actors, until as many jobs are ahead as are allowed.

        The job at position `needed` is sent to a free actor even if too many jobs are
        ahead.
        """
        most = self._most_ahead * len(self._pool.actors)
        while self._waiting:
            sent = sum(len(chunk) for _, chunks in self._in_flight.values() for chunk in chunks)
            if len(self._arrived) + sent >= most and self._waiting[0][0] > needed:
                return
            free = [actor for actor in self._pool.ready if len(actor.batches) < DEPTH]
            if not free:
                return

            actor = min(free, key=lambda actor: len(actor.batches))
            chunks = self._next_chunks()
            reference = actor.handle.run.remote(self._pack(chunks))
            actor.batches.append(reference)
            self._in_flight[reference] = actor, chunks

    def _next_chunks(self) -> list[list[int]]:
        """Return the next batch's chunks: several if many chunks wait, else one.

        A chunk whose actor died is sent in a separate batch. If another actor dies, it
        is then known which chunk the actor worked on.
        """
        count = len(self._waiting) // (2 * DEPTH * len(self._pool.actors))
        chunks = [heappop(self._waiting)]
        while len(chunks) < min(count, self._together) and self._lost.keys().isdisjoint(
            [chunks[0][0], self._waiting[0][0]]
        ):
            chunks.append(heappop(self._waiting))
        return chunks

    def _receive(self) -> None:
        """Wait until a batch has ended or an actor has started."""
        starting = self._pool.starting
        # If no actor works, an actor must start within `START_SECONDS`.
        timeout = None if self._in_flight else START_SECONDS
        done, _ = self._ray.wait([*self._in_flight, *starting], num_returns=1, timeout=timeout)
        if not done:
            raise FedexpError(
                "the Ray cluster has no actor left and no room for a new one",
                where="engine=ray",
                do="look at 'ray status', then repeat the command to resume this run",
            )
        for reference in done:
            if reference not in starting:
                self._take(reference)
            elif self._pool.admit(starting[reference]) is None:
                self._pool.fill(len(self._waiting))

    def _take(self, reference: Any) -> None:
        actor, chunks = self._in_flight[reference]
        try:
            reply: Reply = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise unexpected_error(error) from error
        except self._ray.exceptions.RayError as error:
            for number, held in enumerate(self._pool.lose(actor)):
                self._repeat(self._in_flight.pop(held)[1], number == 0, error)
            return

        del self._in_flight[reference]
        actor.batches.remove(reference)
        self.stacked += reply.stacked
        self.notes += reply.notes
        positions = [position for chunk in chunks for position in chunk]
        if reply.failure is not None:
            self._arrived |= dict.fromkeys(positions, reply.failure)
        self._arrived |= zip(positions, reply.results, strict=False)

    def _repeat(self, chunks: list[list[int]], suspect: bool, error: Exception) -> None:
        """Send a lost actor's chunks again, or give up.

        Args:
            chunks: Chunks of a batch of the actor.
            suspect: Whether the actor worked on this batch.
            error: Ray's error.
        """
        for chunk in chunks:
            self._lost[chunk[0]] += suspect
            if self._lost[chunk[0]] < MAX_LOSSES:
                heappush(self._waiting, chunk)
                continue

            clients = ", ".join(str(self._jobs[position].client) for position in chunk)
            failure = ClientError(
                f"client {clients}: {MAX_LOSSES} Ray actors died over this work",
                where=f"engine=ray, last error: {type(error).__name__}",
                do="look for 'out of memory' in 'ray status' and the nodes' logs. "
                "Fewer engine.actors need less memory",
            )
            self._arrived |= dict.fromkeys(chunk, failure)


def _put(value: object) -> Any:
    """Store `value` in the object store and return its reference.

    Each node whose actors need the value fetches it once.
    """
    import ray

    try:
        return ray.put(value)
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise FedexpError(
            "Ray's object store is full",
            where="engine=ray",
            got=str(error).partition("\n")[0],
            do="start Ray with a larger --object-store-memory",
        ) from error
