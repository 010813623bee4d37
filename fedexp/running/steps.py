"""The steps of a run, with an evaluation at the end of rounds.

This module computes the rows of ``metrics.jsonl``. It is therefore part of the run's
code hash. The module `fedexp.running.execute`, which records the rows and writes
checkpoints, is not part of the hash.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedexp.core import trees
from fedexp.core.data import FederatedData
from fedexp.core.engine import Engine
from fedexp.core.env import Env
from fedexp.core.errors import FedexpError
from fedexp.core.phases import phase
from fedexp.core.result_check import check_outcome, is_users
from fedexp.core.runner import Snapshot, run
from fedexp.evaluation.breakdown import Breakdown
from fedexp.evaluation.evaluate import Evaluator
from fedexp.evaluation.tracing import Traced, Tracer
from fedexp.running.experiment import Experiment


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A finished step.

    Args:
        after: Snapshot after the step.
        row: Row for ``metrics.jsonl``. Its key ``step`` is the number of finished steps
            of the run. If each iteration of the method is a step, keys ``traced/...``
            contain the traced values of this step.
        within: Number of the step within its round, from 0.
        seconds: Seconds by phase.
        ends_round: Whether this is the last step of its round.
        ends_run: Whether this is the last step of the run.
        traced: Values and weights that were traced within the step. Empty if the config
            asks for no trace.
    """

    after: Snapshot
    row: dict[str, Any]
    within: int
    seconds: dict[str, float]
    ends_round: bool
    ends_run: bool
    traced: Traced


def steps(
    experiment: Experiment,
    env: Env,
    data: FederatedData,
    engine: Engine,
    snapshot: Snapshot,
    on_client: Callable[[int, int], None],
) -> Iterator[RecordedStep]:
    """Yield the steps that follow `snapshot`.

    The last yielded step is the method's last step, or the first step whose metrics
    reach ``stop.target``.

    Args:
        experiment: Checked experiment.
        env: Environment of the aggregator.
        data: Training, validation and test data.
        engine: Engine that executes the clients' jobs.
        snapshot: Snapshot to continue from.
        on_client: Function that is called after each client with the number of finished
            jobs and the number of all jobs of the step.

    Raises:
        ConfigError: The headline, or the metric that stops the run, belongs to a class
            without samples.
        FedexpError: The server's update has NaN or infinity, a metric is NaN, a metric
            of the test or validation set is infinite, or a plug-in drew from a global
            generator.
    """
    config, aggregator = experiment.config, experiment.aggregator
    evaluator = Evaluator(experiment.task, config.eval.batch_size)
    breakdown = Breakdown(evaluator, data, config.eval.per_class, config.eval.per_client)
    breakdown.check({experiment.headline, experiment.stop_metric}, aggregator.delivers)
    tracer = Tracer(evaluator, data, config.trace.every, config.trace.weights)
    env = replace(env, trace=tracer)
    following = run(aggregator, env, engine, data, snapshot, config.on_nonfinite, on_client)

    while True:
        with experiment.server_work("a step of the server"):
            # The server consumes results as they arrive, so clients train within this
            # phase.
            with phase("aggregate"):
                step = next(following, None)
            if step is None:
                return
            traced = tracer.take()
            began = time.perf_counter()
            outcome = aggregator.outcome(step.after.state)
            if is_users(aggregator):
                check_outcome(
                    outcome,
                    aggregator.delivers,
                    env.dtype,
                    aggregator,
                    ("fuse", "update", "outcome"),
                )

            # Clients' models need no check, because each was checked when it arrived.
            if aggregator.delivers == "global":
                nonfinite = trees.nonfinite(outcome.models[0].params)
                _raise_problem(
                    None
                    if nonfinite is None
                    else f"the server's update left NaN or infinity in {nonfinite}",
                    step.round,
                    experiment,
                )

            row = {"round": step.round + 1, "step": step.after.step, **step.metrics}
            row |= {
                f"traced/{name}": value
                for name, value in traced.of_step(step.within).items()
                if name not in row
            }

            if step.ends_run or (step.ends_round and (step.round + 1) % config.eval.every == 0):
                with phase("evaluate"):
                    row |= evaluator(outcome, data.test, "test")
                    if data.val is not None:
                        row |= evaluator(outcome, data.val, "val")
                    row |= breakdown(outcome)

        _raise_problem(_problem_of(row), step.round, experiment)
        seconds = {**step.seconds, "evaluate": time.perf_counter() - began + traced.seconds}
        seconds["aggregate"] -= traced.seconds
        ends_run = step.ends_run or has_reached_target(experiment, [row])
        yield RecordedStep(
            after=step.after,
            row=row,
            within=step.within,
            seconds=seconds,
            ends_round=step.ends_round,
            ends_run=ends_run,
            traced=traced,
        )

        if ends_run:
            return


def _problem_of(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the metrics of a step, or None.

    Metrics can be NaN or infinite although the weights are finite, because values in
    the network may overflow. A training loss may be infinite, because a run may recover
    from it.
    """
    for name, value in row.items():
        if math.isnan(value):
            return f"{name} is NaN"
        if math.isinf(value) and name.startswith(("test/", "val/")):
            return f"{name} is infinite"
    return None


def has_reached_target(experiment: Experiment, rows: list[dict[str, Any]]) -> bool:
    """Return whether the metric in one of `rows` reaches ``stop.target``."""
    metric, target = experiment.stop_metric, experiment.config.stop.target
    return target is not None and any(
        experiment.meets(metric, row.get(metric), target) for row in rows
    )


def _raise_problem(problem: str | None, round: int, experiment: Experiment) -> None:
    if problem:
        raise FedexpError(
            f"round {round + 1}: {problem}",
            where=f"aggregator {type(experiment.aggregator).__name__}, "
            f"server optimizer {type(experiment.server_optimizer).__name__}",
            do="lower local.lr, the server optimizer's step size, or aggregator.lr"
            if experiment.aggregator.trains_on_server
            else "lower local.lr, or the server optimizer's step size",
        )
