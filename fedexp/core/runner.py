"""The runner, which executes the steps of a run with any method and any engine.

In each step the aggregator plans jobs, and the runner adds the clients' states to them.
The engine executes the jobs, the runner checks the results, and the aggregator updates
its state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedexp.core.aggregator import Aggregator, State
from fedexp.core.client_states import After, committed, owned
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine, execute
from fedexp.core.env import Env
from fedexp.core.errors import ClientError, FedexpError
from fedexp.core.jobs import ClientJob, ClientResult, bytes_down, bytes_up
from fedexp.core.result_check import check_trees, checked_metrics
from fedexp.core.task import Metrics
from fedexp.core.trainer import Received
from fedexp.core.trees import Trees

OnNonfinite = Literal["raise", "skip_client"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The server and client states that a run needs to continue after a step.

    Keep only the latest snapshot, because client states are not copied from step to
    step. The second-latest snapshot stays usable until the run begins another step.
    Older snapshots raise a RuntimeError when their client states are read.

    Args:
        step: Number of finished steps.
        state: The server's state.
        clients: The client states.
    """

    step: int
    state: State
    clients: Mapping[int, Trees] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step of a run.

    Args:
        after: The snapshot after the step.
        round: Communication round of the step, from 0.
        within: Number of the step within the round, from 0.
        ends_round: Whether it was the last step of that round.
        ends_run: Whether it was the last step of the run.
        metrics: Values to log.
        seconds: Seconds by phase: ``train``, ``aggregate`` and, if there are probes,
            ``probe``.
    """

    after: Snapshot
    round: int
    within: int
    ends_round: bool
    ends_run: bool
    metrics: Metrics
    seconds: dict[str, float]


def run(
    aggregator: Aggregator,
    env: Env,
    engine: Engine,
    data: FederatedData,
    snapshot: Snapshot | None = None,
    on_nonfinite: OnNonfinite = "raise",
    on_client: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Step]:
    """Execute a method and yield a `Step` after every step.

    To stop the run, stop iterating. Client states change only after all results of a
    step have been consumed. An interrupted step therefore changes nothing.

    Args:
        aggregator: The method.
        env: The environment of the aggregator.
        engine: The engine that executes client jobs.
        data: The data.
        snapshot: The snapshot to continue from, or None to start from round 0.
        on_nonfinite: Reaction to NaN or infinity in a client's result. ``raise`` raises
            an error. ``skip_client`` ignores the result of this client.
        on_client: Callback with two arguments: the number of finished jobs and the
            number of all jobs of the step.

    Raises:
        ClientError: A client failed. With ``on_nonfinite=raise``, a result with NaN or
            infinity is a failure, too.
        FedexpError: The results of the engine do not fit the jobs, or the aggregator's
            positions do not ascend.
    """
    now = snapshot or Snapshot(0, aggregator.init(env))
    here = env_of(aggregator, env, now)
    over = aggregator.done(now.state, here)
    while not over:
        began = time.perf_counter()
        states = committed(now.clients)
        env.models.keep_only(now.state)
        jobs = next_jobs(aggregator, env, now)
        dropped = [job for job in jobs if job.drops_out]
        jobs = [job for job in jobs if not job.drops_out]

        with contextlib.closing(execute(engine, jobs, data)) as executed:
            stream = _Stream(jobs, executed, here, on_nonfinite, on_client, aggregator.communicates)
            stream.drop(dropped)
            results = iter(stream)
            state, metrics = aggregator.update(now.state, results, here)
            # An aggregator may stop reading early. The results of the remaining clients
            # are consumed here, because their new states are needed.
            for _ in results:
                pass

        now = Snapshot(now.step + 1, state, After(states, stream.states))
        total = time.perf_counter() - began
        # If several processes run probes in parallel, the sum of their seconds may
        # exceed the elapsed time. The time of probes is then only an estimate.
        probing = min(stream.probe_seconds, stream.seconds)
        seconds = {"train": stream.seconds - probing, "aggregate": total - stream.seconds}
        if any(job.probes for job in jobs):
            seconds["probe"] = probing

        following = env_of(aggregator, env, now)
        if (following.round, following.step) <= (here.round, here.step):
            raise FedexpError(
                "the aggregator's position does not ascend",
                where=f"{type(aggregator).__name__}.position",
                expected=f"a round and a step after {here.round, here.step}",
                got=f"{following.round, following.step}",
                do="return the next step of the round, or step 0 of a later round",
            )
        over = aggregator.done(now.state, following)
        yield Step(
            after=now,
            round=here.round,
            within=here.step,
            ends_round=over or following.round > here.round,
            ends_run=over,
            metrics={
                **stream.metrics(),
                **checked_metrics(metrics, (aggregator, env.server_optimizer)),
            },
            seconds=seconds,
        )
        here = following


def env_of(aggregator: Aggregator, env: Env, now: Snapshot) -> Env:
    """Return the environment of the step that follows `now`."""
    return env.at(*aggregator.position(now.state, now.step))


def next_jobs(aggregator: Aggregator, env: Env, now: Snapshot) -> list[ClientJob]:
    """Return the client jobs of the step that follows `now`, with client states."""
    # Initial client states by trainer, model and frozen parameters. Clients that agree
    # in all three share one initial state.
    first: dict[tuple[int, int, frozenset[str]], Trees | None] = {}
    jobs = []

    for job in aggregator.plan(now.state, env_of(aggregator, env, now)):
        state = now.clients.get(job.client)
        if state is None:
            key = id(job.trainer), id(job.start), job.frozen
            if key not in first:
                own = job.trainer.init_state(
                    job.trainable, Received(job.start.params, job.start.buffers)
                )
                if own is not None:
                    check_trees(own, "the initial client state", job.trainer, "init_state")
                first[key] = own
            state = first[key]
        jobs.append(job if state is None else replace(job, state=state))

    return jobs


class _Stream:
    """An iterable that passes the engine's results on to the aggregator.

    On the way it checks each result, adds up counts and metrics, and collects the
    clients' new states.
    """

    def __init__(
        self,
        jobs: list[ClientJob],
        results: Iterable[ClientResult],
        env: Env,
        on_nonfinite: OnNonfinite,
        on_client: Callable[[int, int], None],
        communicates: bool,
    ) -> None:
        self.jobs, self.results, self.env = jobs, iter(results), env
        self.on_nonfinite, self.on_client, self.communicates = on_nonfinite, on_client, communicates
        self.states: dict[int, Trees] = {}
        self.seconds = self.probe_seconds = 0.0
        self.steps = self.up = self.down = self.skipped = self.dropped = 0
        # Number of samples by metric, summed over the clients that measured the metric.
        self.examples: dict[str, int] = {}
        self.totals: Metrics = {}

    def __iter__(self) -> Iterator[ClientResult]:
        for done, job in enumerate(self.jobs, start=1):
            began = time.perf_counter()
            result = next(self.results).in_order()
            self.seconds += time.perf_counter() - began
            self.steps += result.num_steps
            finite = self._finite(result)
            self.probe_seconds += result.probe_seconds
            if self.communicates:
                self.down += bytes_down(job)
                self.up += bytes_up(result)
            self.on_client(done, len(self.jobs))
            if not finite:
                self.skipped += 1
                continue
            for name, value in result.metrics.items():
                self.examples[name] = self.examples.get(name, 0) + result.num_examples
                self.totals[name] = self.totals.get(name, 0.0) + value * result.num_examples
            if result.state is not None:
                self.states[result.client] = {
                    name: owned(tree) for name, tree in result.state.items()
                }
            yield result
        # `execute` refuses further results.
        next(self.results, None)

    def drop(self, jobs: list[ClientJob]) -> None:
        """Count the jobs of clients that drop out.

        These clients receive the model, but send nothing and keep their state.
        """
        self.dropped = len(jobs)
        if self.communicates:
            self.down += sum(map(bytes_down, jobs))

    def _finite(self, result: ClientResult) -> bool:
        bad = result.nonfinite()
        if bad is None:
            return True
        if self.on_nonfinite == "skip_client":
            return False
        raise ClientError(
            f"round {self.env.round + 1}: client {result.client} returned NaN or infinity in {bad}",
            where=f"{result.num_examples} training samples, {result.num_steps} steps, lr "
            f"{self.env.lr:g}",
            do="lower local.lr, set local.clip, or set on_nonfinite=skip_client",
        )

    def metrics(self) -> Metrics:
        """Return the metrics of the step that are logged for every method.

        They are:

        - the means of the clients' metrics, weighted by numbers of training samples
        - the number of local steps
        - the bytes that server and clients would send
        - the number of skipped clients, if it is not 0
        - the number of clients that dropped out, if it is not 0

        All values are deterministic.
        """
        if not self.jobs and not self.dropped:
            return {}
        means = {
            f"train/{name}": total / self.examples[name] for name, total in self.totals.items()
        }
        counts = {"local_steps": self.steps, "bytes/down": self.down, "bytes/up": self.up}
        skipped = {"skipped_clients": self.skipped} if self.skipped else {}
        dropped = {"dropped_clients": self.dropped} if self.dropped else {}
        return means | counts | skipped | dropped
